// The routing table of a call, topk_idx: its entries, and what senders count in it.
#pragma once

#include "kernels/dispatch/token.cuh"

namespace moe_p2p::device {

// Entry i of topk_idx; -1 = none.
__device__ __forceinline__ i64 id_at(const DispatchParams& p, i64 i) {
  return p.topk_is_int64 ? __ldg(p.topk_idx.as<const i64>() + i)
                         : __ldg(p.topk_idx.as<const i32>() + i);
}
// Its low word: all that is needed once route_chunk() has reported entries out of range. No thread
// waits for it before expert_of().
__device__ __forceinline__ i32 ask_id(const DispatchParams& p, i64 i) {
  return __ldg(p.topk_idx.as<const i32>() + (i << p.topk_is_int64));
}
__device__ __forceinline__ i32 expert_of(i64 id) {
  return id >= 0 && id < kExperts ? static_cast<i32>(id) : -1;
}

// Calls each(id) for the entries of a token, read together.
template <typename Each>
__device__ __forceinline__ void for_each_id(const DispatchParams& p, i32 token, const Each& each) {
  constexpr i32 kAtOnce = kTopk < 8 ? kTopk : 8;
  for (i32 first = 0; first < kTopk; first += kAtOnce) {
    i64 id[kAtOnce];
#pragma unroll
    for (i32 k = 0; k < kAtOnce; ++k)
      if (first + k < kTopk) id[k] = id_at(p, static_cast<i64>(token) * kTopk + first + k);
#pragma unroll
    for (i32 k = 0; k < kAtOnce; ++k)
      if (first + k < kTopk) each(id[k]);
  }
}

// A set of numbers below kCount, in registers.
template <i32 kCount>
struct Bits {
  static constexpr i32 kWords = (kCount + 31) / 32;
  u32 word[kWords] = {};

  __device__ __forceinline__ void add(i32 i) {
#pragma unroll
    for (i32 w = 0; w < kWords; ++w)
      if (i / 32 == w) word[w] |= 1u << (i % 32);
  }
  // Returns which lanes have i, a constant of an unrolled loop.
  __device__ __forceinline__ u32 lanes_with(i32 i) const {
    return __ballot_sync(~0u, word[i / 32] >> (i % 32) & 1);
  }
};

// Adds the experts of entries [from, end) of the call's topk_idx to `seen`.
__device__ inline void count_experts(const DispatchParams& p, i32* seen, i64 from, i64 end,
                                     i32 thread, i32 num_threads) {
  constexpr i32 kAtOnce = 4;  // loads under way together
#pragma unroll 1
  for (i64 first = from + thread; first < end; first += num_threads * kAtOnce) {
    i32 id[kAtOnce];
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
      if (const i64 i = first + j * num_threads; i < end) id[j] = ask_id(p, i);
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
      if (first + j * num_threads < end)
        if (const i32 e = expert_of(id[j]); e >= 0) atomicAdd(&seen[e], 1);
  }
}

// Adds to `tokens` how many of the call's first tokens are for each rank.
__device__ inline void count_tokens(const DispatchParams& p, i32* tokens, i32 num_tokens) {
  const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
  i32 count[Bits<kWorld>::kWords] = {};  // of ranks lane, lane + 32, ...
#pragma unroll 1
  for (i32 first = thread - lane; first < num_tokens; first += kBlockThreads) {
    Bits<kWorld> ranks;
    if (first + lane < num_tokens)
      for_each_id(p, first + lane, [&](i64 id) {
        if (const i32 e = expert_of(id); e >= 0) ranks.add(owner_of(p.comm, e).rank);
      });
    __syncwarp();
#pragma unroll
    for (i32 rank = 0; rank < kWorld; ++rank) {
      const u32 with = ranks.lanes_with(rank);
      if (lane == rank % 32) count[rank / 32] += __popc(with);
    }
  }
#pragma unroll
  for (i32 w = 0; w < Bits<kWorld>::kWords; ++w)
    if (const i32 rank = w * 32 + lane; rank < kWorld && count[w] > 0)
      atomicAdd(&tokens[rank], count[w]);
}

// Returns how many of tokens [from, to) of the chunk are in `has`.
__device__ inline i32 tokens_between(const u32* has, i32 from, i32 to) {
  i32 count = 0;
  for (i32 w = from / 32; w <= to / 32; ++w) {
    u32 bits = has[w];
    if (w == from / 32) bits &= ~0u << (from % 32);
    if (w == to / 32) bits &= (1u << (to % 32)) - 1;
    count += __popc(bits);
  }
  return count;
}
__device__ inline i32 tokens_before(const u32* has, i32 token) {
  i32 count = 0;
  for (i32 w = 0; w < token / 32; ++w) count += __popc(has[w]);
  return count + __popc(has[token / 32] & ((1u << (token % 32)) - 1));
}
__device__ inline i32 tokens_in(const u32* has) {
  i32 count = 0;
  for (i32 w = 0; w < kChunkWords; ++w) count += __popc(has[w]);
  return count;
}

}  // namespace moe_p2p::device
