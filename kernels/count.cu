// Counts where the tokens of a routing go, and gives the counts to the host as soon as they are
// known: the host waits for the last word in pinned memory instead of for the stream. Launched by
// csrc/ops/count_ops.cpp, before any communicator has been made. One block, which needs neither
// zeroed outputs nor others: 4096 tokens are few microseconds.
#include "kernels/abi/count.h"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

constexpr i32 kGroup = 64;  // ranks whose set is one word
constexpr i32 kWarps = kCountThreads / 32;
constexpr i32 kIdsAtOnce = 8;

// Returns which ranks of `first`, first + 1, ... a token goes to, and adds its experts to `experts`
// unless that is null.
__device__ inline u64 ranks_of(const CountParams& p, i32 token, i32 first, i32* experts) {
  const i32 each = p.num_experts / p.num_ranks;
  u64 ranks = 0;
  for (i32 begin = 0; begin < p.topk; begin += kIdsAtOnce) {
    i64 id[kIdsAtOnce];
#pragma unroll
    for (i32 j = 0; j < kIdsAtOnce; ++j) {
      const i64 at = static_cast<i64>(token) * p.topk + begin + j;
      id[j] = begin + j >= p.topk ? -1
              : p.topk_is_int64   ? __ldg(p.topk_idx.as<const i64>() + at)
                                  : __ldg(p.topk_idx.as<const i32>() + at);
    }
#pragma unroll
    for (i32 j = 0; j < kIdsAtOnce; ++j) {
      if (id[j] < 0 || id[j] >= p.num_experts) continue;
      if (experts) atomicAdd(&experts[id[j]], 1);
      const i32 rank = static_cast<i32>(id[j]) / each - first;
      if (rank >= 0 && rank < kGroup) ranks |= u64{1} << rank;
    }
  }
  return ranks;
}

// Adds the number of lanes that are in each of `num` sets of `width` bits to counts[0], ...
__device__ inline void count_sets(u64 bits, i32 num, i32 width, i32* counts, i32 lane) {
  const u64 mask = width == kGroup ? ~u64{0} : (u64{1} << width) - 1;
  for (i32 i = 0; i < num; ++i) {
    const i32 with = __popc(__ballot_sync(~0u, (bits >> i * width & mask) != 0));
    if (lane == 0 && with > 0) atomicAdd(&counts[i], with);
  }
}

// Counts in shared memory: of ranks, nodes and experts, one after the other.
__device__ inline void count(const CountParams& p, i32* counts) {
  const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
  i32* per_node = counts + p.num_ranks;
  i32* per_expert = per_node + p.num_nodes;
  for (i32 i = thread; i < p.num_ranks + p.num_nodes + p.num_experts; i += kCountThreads)
    counts[i] = 0;
  __syncthreads();
  const i32 of_node = p.num_nodes > 0 ? p.num_ranks / p.num_nodes : 0;
  for (i32 first = 0; first < p.num_ranks; first += kGroup) {
    const i32 ranks_here = min(p.num_ranks - first, kGroup);
    for (i32 begin = thread / 32 * 32; begin < p.num_tokens; begin += kWarps * 32) {
      const i32 token = begin + lane;
      u64 ranks = 0;
      if (token < p.num_tokens) {
        ranks = ranks_of(p, token, first, first == 0 ? per_expert : nullptr);
        if (p.in_rank) {
          char* in_rank = p.in_rank.get() + static_cast<i64>(token) * p.num_ranks + first;
          for (i32 r = 0; r < ranks_here; ++r) in_rank[r] = static_cast<char>(ranks >> r & 1);
        }
      }
      __syncwarp();
      count_sets(ranks, ranks_here, 1, counts + first, lane);
      if (of_node > 0)
        count_sets(ranks, ranks_here / of_node, of_node, per_node + first / of_node, lane);
    }
  }
  __syncthreads();
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kCountThreads, 1)
    moe_p2p_count(const __grid_constant__ CountParams p) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  auto* counts = reinterpret_cast<i32*>(shared_memory());
  const bool given = !p.topk_idx;
  if (!given) count(p, counts);
  const auto store = [&](const DevicePtr<i32>& to, const i32* from, i32 num, i32* host) {
    for (i32 i = thread; i < num; i += kCountThreads) {
      if (!given && to) to[i] = from[i];
      if (host) host[i] = given ? to[i] : from[i];
    }
  };
  i32* host = p.host.get();
  store(p.per_rank, counts, p.num_ranks, host);
  if (!given) store(p.per_node, counts + p.num_ranks, p.num_nodes, nullptr);
  store(p.per_expert, counts + p.num_ranks + p.num_nodes, p.num_experts,
        host ? host + p.num_ranks : nullptr);
  if (!host) return;
  __syncthreads();
  if (thread > 0) return;
  host[p.num_ranks + p.num_experts] = p.num_tokens;
  // Behind the counts of all threads; pairs with AllToAll::await_counts() of the host.
  st_release_sys_u32(reinterpret_cast<u32*>(host) + p.num_ranks + p.num_experts + 1, p.call);
}
