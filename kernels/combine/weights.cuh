// Weights that a source did not know at dispatch and sends with combine: every rank pushes the
// weights of its own tokens to the expert ranks, and each sending block waits for all ranks'
// weights before it sums.
//
// So senders wait for senders here. Destinations are dealt to the first blocks of a grid, which are
// on the device before any other, and no block waits before it has pushed: the awaited weights are
// under way wherever the same call has been launched (docs/protocol.md, section 9).
#pragma once

#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

// The sending block that announces that this rank has read a dispatch: it takes as long as a row,
// and the last block has the fewest rows. Between nodes the first one does.
__device__ __forceinline__ i32 announcer(const CombineParams& p) {
  return kOthers == 0 ? p.grid.num_send_blocks - 1 : 0;
}

inline constexpr u64 kSlotWeightsBytes = 4 * kTopk;
// Within a node, weights of short steps are tagged words (device/self_flag.cuh): nobody waits for a
// fence behind all of them, and rows of y are read while they travel.
inline constexpr bool kTaggedWeights = kSelfFlagged && kOthers == 0;
inline constexpr u32 kWeightsFlags = dtype_flags(DType::kFloat32);

// Destination d: a rank of this node, or after those another node, through the outbox for it.
__device__ inline void push_weights_to(const CombineParams& p, const Self& self, u64 step,
                                       i32 chunk, i32 d) {
  if constexpr (kMasks)
    if (!__syncthreads_and(!speaker_masked(p.comm, self, d))) return;
  const HandleArrays handle(p);
  const i32 slot = slot_of(step);
  const bool near = d < kLocal;
  const i32 column = near ? d : kLocal + other_node(d - kLocal, self.node);
  char* region = near ? weights_inbox_at(p.comm, data_of(p.comm, d), slot, self.index_at(d))
                      : weights_outbox_of(p.comm, self, slot, d - kLocal);
  float* to = behind_header<float>(region);
  const float* from = p.topk_weights.get();
  const i32 chunk_tokens = chunk_of(p.comm), begin = chunk * chunk_tokens;
  const i32 num_items = (min(begin + chunk_tokens, handle.meta().num_tokens) - begin) * kTopk;
  i32 num_slots = 0;
#pragma unroll 1
  for (i32 first = 0; first < num_items; first += kBlockThreads) {
    const i32 i = first + static_cast<i32>(threadIdx.x), token = begin + i / kTopk, k = i % kTopk;
    const i32 at = i < num_items ? handle.send_slots(token)[column] : -1;
    if constexpr (kTaggedWeights) {
      if (at >= 0)
        st_tagged(behind_header<u64>(region) + at * kTopk + k, step,
                  __float_as_uint(from[static_cast<i64>(token) * kTopk + k]));
      continue;
    }
    if (at >= 0) to[at * kTopk + k] = from[static_cast<i64>(token) * kTopk + k];
    num_slots += __syncthreads_count(at >= 0 && k == 0);  // and all have stored
  }
  if (kTaggedWeights || threadIdx.x != 0) return;
  region_header(region)->describe(static_cast<u32>(num_slots), kWeightsFlags, kSlotWeightsBytes);
  st_release_sys_u64(header_word(region), step + 1);  // pairs with wait_weights() there
  if (!near)
    ring(p.comm, Phase::kWeights, step, self.local, other_node(d - kLocal, self.node),
         region_part(weights_bytes(Shape{kShape}, num_slots), 0, 0, 0));
}

// Pushes this block's share of one chunk, and waits for all that this rank needs. Returns false if
// some did not arrive.
__device__ __noinline__ bool exchange_weights(const CombineParams& p, u64 step, i32 chunk,
                                              i32 block) {
  const Self self(p.comm);
#pragma unroll 1
  for (i32 d = block; d < kSpeakers; d += p.grid.num_send_blocks)
    push_weights_to(p, self, step, chunk, d);
  if constexpr (kTaggedWeights) return true;
  bool came = true;
#pragma unroll 1
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads) {
    if (MOE_P2P_MUTATED(kSumBeforeWeights)) break;
    if (!wait_weights(p.comm, self, step, source)) {
      came = came && is_masked(p.comm, source);
      continue;
    }
    const RegionHeader* header = region_header(weights_region(p.comm, self, slot_of(step), source));
    // Only one block checks the header: once it announces 'read', the source may overwrite it.
    if (block != announcer(p) ||
        (header->flags == kWeightsFlags && header->slot_bytes == kSlotWeightsBytes))
      continue;
    raise_fault(p.comm, kWrongHeader, Phase::kWeights, source, step, kSlotWeightsBytes,
                header->slot_bytes);
    came = false;
  }
  return __syncthreads_and(came);
}

// Waits for weight k of a slot from `source`; a NaN where it is lost.
__device__ __noinline__ float late_weight(const DeviceComm& comm, u64 step, i32 source, i32 index,
                                          i32 k) {
  const Self self(comm);
  const char* region = weights_region(comm, self, slot_of(step), source);
  const u64* word = behind_header<u64>(region) + index * kTopk + k;
  u64 value = ld_relaxed_sys_u64(word);
  const bool came = wait_tagged(comm, word, value, {Phase::kWeights, source, step});
  return __uint_as_float(came ? static_cast<u32>(value) : ~0u);
}
// A weight that a thread waits for, once the rows of y are under way.
struct LateWeight {
  float* to = nullptr;  // null: none
  i32 source = -1, index = 0, k = 0;

  __device__ __forceinline__ void take(const DeviceComm& comm, u64 step) const {
    if (to) *to = late_weight(comm, step, source, index, k);
  }
};

// Returns the weights of one slot from `source`, [K].
__device__ inline const float* slot_weights(const DeviceComm& comm, const Self& self, i32 slot,
                                            i32 source, i32 index) {
  return behind_header<float>(weights_region(comm, self, slot, source)) + index * kTopk;
}

}  // namespace moe_p2p::device
