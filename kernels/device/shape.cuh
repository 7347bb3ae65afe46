// The numbers that a kernel is compiled for, from macros (moe_p2p/device_kernels.py sets them).
#pragma once

#include "kernels/abi/params.h"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

inline constexpr Shape kShape{
    .world_size = MOE_P2P_WORLD_SIZE,
    .ranks_per_node = MOE_P2P_RANKS_PER_NODE,
    .num_experts = MOE_P2P_NUM_EXPERTS,
    .max_local_experts = MOE_P2P_MAX_LOCAL_EXPERTS,
    .topk = MOE_P2P_TOPK,
    .chunk_tokens = MOE_P2P_CHUNK_TOKENS,
    .steps_in_flight = MOE_P2P_STEPS_IN_FLIGHT,
    .reserved = 0,
    .max_token_bytes = MOE_P2P_MAX_TOKEN_BYTES,
    .max_partial_bytes = MOE_P2P_MAX_PARTIAL_BYTES,
};
inline constexpr Regions kRegions = make_regions(kShape);
inline constexpr u64 kInboxBytes = inbox_bytes(kShape);
inline constexpr u64 kPartialBytes = partial_bytes(kShape);
inline constexpr u64 kFlagsBytes = flags_bytes(kShape);
inline constexpr u64 kInboxSlots = inbox_slots_offset(kShape);
inline constexpr i32 kHidden = MOE_P2P_HIDDEN_DIM;
inline constexpr i32 kTopk = kShape.topk;
inline constexpr i32 kWorld = kShape.world_size;
inline constexpr i32 kLocal = kShape.ranks_per_node;
inline constexpr i32 kColumns = kLocal + kShape.num_nodes();  // of HandleMeta's send_slots
inline constexpr i32 kChunk = kShape.chunk_tokens;
inline constexpr i32 kChunkWords = (kChunk + 31) / 32;
inline constexpr i32 kThreads = MOE_P2P_THREADS;
inline constexpr i32 kScales = (kHidden + kScaleBlock - 1) / kScaleBlock;
static_assert(kShape.num_nodes() == 1, "between nodes a gateway relays; not compiled here");

// Region `index` of step slot `slot` in the memory at `data`.
__device__ __forceinline__ char* region_at(u64 data, i32 slot, u64 first, u64 bytes, i32 index) {
  return reinterpret_cast<char*>(data + static_cast<u64>(slot) * kRegions.step_bytes + first +
                                 static_cast<u64>(index) * bytes);
}
__device__ __forceinline__ char* inbox_at(u64 data, i32 slot, i32 source) {
  return region_at(data, slot, kRegions.inbox, kInboxBytes, source);
}
__device__ __forceinline__ u32* inbox_flags_at(u64 data, i32 slot, i32 source) {
  return reinterpret_cast<u32*>(region_at(data, slot, kRegions.inbox_flags, kFlagsBytes, source));
}
__device__ __forceinline__ char* partial_at(u64 data, i32 slot, i32 expert_rank) {
  return region_at(data, slot, kRegions.partial_inbox, kPartialBytes, expert_rank);
}
__device__ __forceinline__ u32* partial_flags_at(u64 data, i32 slot, i32 expert_rank) {
  return reinterpret_cast<u32*>(
      region_at(data, slot, kRegions.partial_flags, kFlagsBytes, expert_rank));
}

// The handle's arrays for one chunk (HandleLayout).
struct HandleArrays {
  HandleMeta* meta;
  i32* send_slots;
  i32* slot_counts;
  i32* slot_rows;

  __device__ static HandleArrays of(u64 handle, i32 num_rows) {
    const Shape shape = kShape;  // a constant of the compiler has no address on the device
    const HandleLayout layout = HandleLayout::make(shape, num_rows, 1);
    auto* words = reinterpret_cast<i32*>(handle);
    return {reinterpret_cast<HandleMeta*>(words), words + layout.send_slots,
            words + layout.slot_counts, words + layout.slot_rows};
  }
  __device__ i32* rows_of(i32 source, i32 slot) const {
    return slot_rows + (static_cast<i64>(source) * kChunk + slot) * kTopk;
  }
};

// The last block of a kernel to call this returns true, with all others' work behind it.
__device__ inline bool last_block(DeviceState& state) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atom_add_acq_rel_gpu_u32(&state.blocks_done, 1) == gridDim.x - 1;
    if (last) state.blocks_done = 0;
  }
  __syncthreads();
  return last;
}

}  // namespace moe_p2p::device
