// What the host passes to the kernel that turns expert ids into slots (kernels/map.cu).
#pragma once

#include "kernels/abi/params.h"

namespace moe_p2p::abi {

inline constexpr i32 kMapThreads = 256;

struct MapParams {
  DevicePtr<const void> topk_idx;  // i32 or i64 [T, K]: logical experts; -1: none
  DevicePtr<void> out;             // [T, K] of the same type: slots; -1: none
  DevicePtr<const i32> slots;      // [E, M]: the slots of each expert, as many as counts tells
  DevicePtr<const i32> counts;     // [E], 1 to M
  i64 num_ids;                     // T * K, below 2^31
  i32 topk;
  i32 num_experts;
  i32 max_replicas;  // M
  i32 num_slots;     // stands for an id that no expert has: a dispatch refuses it by name
  i32 first;         // added to the number of a token
  i32 is_int64;
};

// Where in `slots` the slot of an id lies: token t takes replica (t + first) mod counts[id]. In 32
// bits: GPUs call a function, with a stack, to divide 64.
MOE_P2P_HD constexpr i64 place_of_replica(const MapParams& p, i64 at, i64 id, i32 count) {
  const u32 turn = static_cast<u32>(at) / static_cast<u32>(p.topk) + static_cast<u32>(p.first);
  return id * p.max_replicas + turn % static_cast<u32>(count);
}

}  // namespace moe_p2p::abi
