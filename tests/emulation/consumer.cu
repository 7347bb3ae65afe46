// A product of tests/gpu/test_gpu_arriving.py: block by block, from the last to the first, it waits
// until rows of x are here and copies those that the counts say there are.
#include "kernels/device/ptx.cuh"

namespace moe_p2p::abi {

struct ConsumerParams {
  u64 x, out;    // u32 [experts, capacity, row_words]
  u64 counters;  // u32 [experts, per_expert]
  u64 counts;    // i32 [experts]
  u64 late;      // u32: counters that did not come in time
  u64 timeout_ns;
  i32 capacity, row_words, rows, per_expert;
  u32 want;
};

}  // namespace moe_p2p::abi

using namespace moe_p2p::device;

namespace {

void await(const moe_p2p::abi::ConsumerParams& p, i32 counter, u32 want) {
  const auto* word = reinterpret_cast<const u32*>(p.counters) + counter;
  const u64 end = globaltimer_ns() + p.timeout_ns;
  while (ld_acquire_sys_u32(word) < want)
    if (globaltimer_ns() > end) {
      atomicAdd(reinterpret_cast<u32*>(p.late), 1);
      return;
    }
}

}  // namespace

__global__ void moe_p2p_consumer(const __grid_constant__ moe_p2p::abi::ConsumerParams p) {
  const i32 tile = static_cast<i32>(gridDim.x - 1 - blockIdx.x);
  const i32 expert = tile / p.per_expert, first = tile % p.per_expert * p.rows;
  if (threadIdx.x == 0) {
    await(p, expert * p.per_expert, static_cast<u32>(p.rows) + 1);
    await(p, tile, p.want);
  }
  __syncthreads();
  const i32 count = reinterpret_cast<const i32*>(p.counts)[expert];
  const i32 last = first + p.rows < count ? first + p.rows : count;
  const u64 begin = (static_cast<u64>(expert) * p.capacity + first) * p.row_words;
  const auto* from = reinterpret_cast<const u32*>(p.x) + begin;
  auto* to = reinterpret_cast<u32*>(p.out) + begin;
  for (i32 i = static_cast<i32>(threadIdx.x); i < (last - first) * p.row_words;
       i += static_cast<i32>(blockDim.x))
    to[i] = from[i];
}
