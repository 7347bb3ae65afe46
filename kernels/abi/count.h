// What the host passes to the counting kernel (kernels/count.cu), and what it gets back.
#pragma once

#include "kernels/abi/params.h"

namespace moe_p2p::abi {

inline constexpr i32 kCountThreads = 1024;

// Words of the counts in pinned memory: [W] tokens for each rank, [E] for each expert, T, and the
// number of the call, which the kernel stores last.
MOE_P2P_HD constexpr i64 count_words(i64 num_ranks, i64 num_experts) {
  return num_ranks + num_experts + 2;
}

struct CountParams {
  DevicePtr<const void> topk_idx;  // i32 or i64 [T, K], -1 = none; 0: the counts are given
  DevicePtr<i32> per_rank;         // [W] written, or read where they are given; 0: the host's only
  DevicePtr<i32> per_node;         // [N] written
  DevicePtr<i32> per_expert;       // [E] as per_rank
  DevicePtr<char> in_rank;         // bool [T, W] written; 0: not wanted
  DevicePtr<i32> host;             // count_words() in pinned memory; 0: the host needs none
  i32 num_tokens;
  i32 topk;
  i32 topk_is_int64;
  i32 num_ranks;
  i32 num_nodes;  // of W / N ranks each, a divisor of 64; 0: nodes are not counted
  i32 num_experts;
  u32 call;
  i32 reserved;
};

}  // namespace moe_p2p::abi
