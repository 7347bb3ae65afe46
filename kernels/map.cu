// Turns the ids of logical experts into slots of ranks, by a table that may change between two
// replays of a graph. Launched by csrc/ops/map_ops.cpp, before a dispatch; needs no communicator.
#include "kernels/abi/map.h"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

template <typename Id>
__device__ inline void map_ids(const MapParams& p) {
  const Id* ids = p.topk_idx.as<const Id>();
  Id* out = p.out.as<Id>();
  const i64 step = static_cast<i64>(gridDim.x) * kMapThreads;
  for (i64 at = static_cast<i64>(blockIdx.x) * kMapThreads + threadIdx.x; at < p.num_ids;
       at += step) {
    const i64 id = ids[at];
    i64 slot = id;  // -1, and what is below, which a dispatch refuses
    if (id >= p.num_experts) slot = p.num_slots;
    if (id >= 0 && id < p.num_experts)
      slot = p.slots.get()[place_of_replica(p, at, id, p.counts.get()[id])];
    out[at] = static_cast<Id>(slot);
  }
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kMapThreads)
    moe_p2p_map(const __grid_constant__ MapParams p) {
  p.is_int64 ? map_ids<i64>(p) : map_ids<i32>(p);
}
