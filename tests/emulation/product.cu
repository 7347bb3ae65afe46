// A product of tests/gpu/test_gpu_ready.py: block by block, from the last to the first, it writes
// rows of y and then raises their counter.
#include "kernels/device/ptx.cuh"

namespace moe_p2p::abi {

struct ProductParams {
  u64 y, result;  // u32 [experts, capacity, row_words]
  u64 counters;   // u32 [experts, per_expert]
  i32 capacity, row_words, rows, per_expert;
  u32 adds;
};

}  // namespace moe_p2p::abi

using namespace moe_p2p::device;

__global__ void moe_p2p_product(const __grid_constant__ moe_p2p::abi::ProductParams p) {
  const i32 tile = static_cast<i32>(gridDim.x - 1 - blockIdx.x);
  const i32 expert = tile / p.per_expert, first = tile % p.per_expert * p.rows;
  const i32 last = first + p.rows < p.capacity ? first + p.rows : p.capacity;
  const u64 begin = (static_cast<u64>(expert) * p.capacity + first) * p.row_words;
  const auto* from = reinterpret_cast<const u32*>(p.result) + begin;
  auto* to = reinterpret_cast<u32*>(p.y) + begin;
  for (i32 i = static_cast<i32>(threadIdx.x); i < (last - first) * p.row_words;
       i += static_cast<i32>(blockDim.x))
    to[i] = from[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto* counter = reinterpret_cast<u32*>(p.counters) + tile;
  st_release_sys_u32(counter, *counter + p.adds);
}
