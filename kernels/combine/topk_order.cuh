// Combine in the order of top-k (docs/protocol.md, section 10), compiled with MOE_P2P_TOPK_ORDER:
// the receiving half adds what a rank sent at the last k of its experts, or each row at its k where
// rows come one by one. Ranks of one node; rows go through registers.
#pragma once

#include "kernels/combine/sum.cuh"
#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

inline constexpr bool kTopkOrder = MOE_P2P_TOPK_ORDER;
static_assert(!kTopkOrder || (kOthers == 0 && !kFarPacked && !kInBlocks));
// Most rows of a token at one rank, which may come one by one.
inline constexpr i32 kMostApart = kTopk < kMaxLocalExperts ? kTopk : kMaxLocalExperts;
// Contributors of a sum, beside the caller's bias.
inline constexpr i32 kAddends = kTopkOrder ? kTopk : kSpeakers;

// Where the scalars of what a rank sends for a token lie.
__device__ __forceinline__ u64 scalars_offset(const CombineParams& p) {
  return kTopkOrder && p.rows_apart ? kMostApart * kOutBytes : kSentBytes;
}

// The rank of expert k of an own token; -1: none.
__device__ __forceinline__ i32 rank_at(const CombineParams& p, i64 token, i32 k) {
  const i64 at = token * kTopk + k;
  const i64 expert =
      p.topk_is_int64 ? p.topk_idx.as<const i64>()[at] : p.topk_idx.as<const i32>()[at];
  return expert >= 0 && expert < kExperts ? p.comm.expert_rank[expert] : -1;
}

// What expert k adds to the sum of a token.
struct Addition {
  i32 rank;   // -1: nothing
  i32 row;    // among the rows that the rank sent
  bool last;  // of its rank
};
__device__ __forceinline__ Addition addition_at(const CombineParams& p, i64 token, i32 k) {
  Addition found{rank_at(p, token, k), 0, true};
  for (i32 other = 0; other < kTopk; ++other) {
    if (other == k || rank_at(p, token, other) != found.rank) continue;
    if (other > k) found.last = false;
    if (other < k && p.rows_apart) ++found.row;
  }
  if (!p.rows_apart && !found.last) found.rank = -1;
  return found;
}

}  // namespace moe_p2p::device
