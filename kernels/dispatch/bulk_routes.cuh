// Dispatch on few multiprocessors, of long steps: who routes, and when. A block may begin to send
// once the first tokens are routed, while a warp of its own routes the others; and counts may be
// sent by a block that does nothing before they arrive.
#pragma once

#include "kernels/device/bulk.cuh"
#include "kernels/dispatch/route.cuh"

namespace moe_p2p::device::bulk {

// How far a block has routed: words of `has`, of all chunks together, so it only grows.
struct Routed {
  u32 num_words;

  // Called by the thread that stored these words, or before a barrier of the block behind them.
  __device__ void publish(i32 chunk, i32 words) {
    st_release_cta_u32(&num_words, static_cast<u32>(chunk * kChunkWords + words));
  }
  // Waits until word `word` of the chunk is routed: for one warp of the block, which waits for
  // nothing itself.
  __device__ void await(i32 chunk, i32 word) const {
    const auto want = static_cast<u32>(chunk * kChunkWords + word + 1);
    while (static_cast<i32>(ld_acquire_cta_u32(&num_words) - want) < 0) {
    }
  }
};

// Words that the whole block routes, before its workers begin: one round. all: it needs all words.
__device__ __forceinline__ i32 words_before(bool all) {
  return all ? kChunkWords : min(kRouters, kChunkWords);
}

// Routes words from `first` on. Called by one warp.
__device__ inline void route_rest(const Sender& a, const RouteTask& task, i32 first,
                                  Routed& routed) {
#pragma unroll 1
  for (i32 w = first; w < kChunkWords; ++w) {
    route_word(a, task, w, [&](i32 token, const auto& each) { for_each_id(a.p, token, each); });
    if (threadIdx.x % 32 == 0) routed.publish(task.chunk, w + 1);  // the lane that stored the word
  }
}

// Whether the first receiving block sends headers and counts. It waits for earlier steps only
// before, as senders do, so that it cannot be waited for in a circle: receivers of all ranks wait
// for first receivers that have sent already. With several chunks a sending block does it for each.
__device__ __forceinline__ bool receiver_counts(const DispatchParams& p) {
  return kPlain && p.grid.num_send_blocks > 0 && p.grid.num_recv_blocks > 0;
}

// Called by that block, whose shared memory is not in use yet.
__device__ inline void send_counts_first(const DispatchParams& p, u64 step) {
  const Sender a{p, Self(p.comm), HandleArrays(p), check_num_tokens(p, step, ask_num_tokens(p)),
                 shared<SendShared>()};
  Placement::begin(a.s);
  __syncthreads();
  // Where the slot does not become free a fault is raised, which ends the waits that follow.
  if (route_chunk(a, {.step = step, .chunk = 0, .reports = false, .counts = true}, kChunkWords))
    send_headers(a, step, 0, /*counted=*/true);
  __syncthreads();
  fence_shared_for_bulk();  // copies that arrive take the place of what was stored here
}

}  // namespace moe_p2p::device::bulk
