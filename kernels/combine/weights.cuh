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

inline constexpr u64 kSlotWeightsBytes = 4 * kTopk;
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
  char* region = near ? weights_inbox_at(p.comm.data[d], slot, self.local)
                      : weights_outbox_at(p.comm.data[self.local], slot, d - kLocal);
  float* to = behind_header<float>(region);
  const float* from = p.topk_weights.get();
  const i32 begin = chunk * kChunk;
  const i32 num_items = (min(begin + kChunk, handle.meta().num_tokens) - begin) * kTopk;
  i32 num_slots = 0;
  for (i32 first = 0; first < num_items; first += kBlockThreads) {
    const i32 i = first + static_cast<i32>(threadIdx.x), token = begin + i / kTopk, k = i % kTopk;
    const i32 at = i < num_items ? handle.send_slots(token)[column] : -1;
    if (at >= 0) to[at * kTopk + k] = from[static_cast<i64>(token) * kTopk + k];
    num_slots += __syncthreads_count(at >= 0 && k == 0);  // and all have stored
  }
  if (threadIdx.x != 0) return;
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
  for (i32 d = block; d < kSpeakers; d += p.grid.num_send_blocks)
    push_weights_to(p, self, step, chunk, d);
  bool came = true;
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads) {
    if (MOE_P2P_MUTATED(kSumBeforeWeights)) break;
    if (!wait_weights(p.comm, self, step, source)) {
      came = came && is_masked(p.comm, source);
      continue;
    }
    const RegionHeader* header = region_header(weights_region(p.comm, self, slot_of(step), source));
    // Only block 0 checks the header. After block 0 announces 'read', the source may overwrite it.
    if (block != 0 || (header->flags == kWeightsFlags && header->slot_bytes == kSlotWeightsBytes))
      continue;
    raise_fault(p.comm, kWrongHeader, Phase::kWeights, source, step, kSlotWeightsBytes,
                header->slot_bytes);
    came = false;
  }
  return __syncthreads_and(came);
}

// Returns the weights of one slot from `source`, [K].
__device__ inline const float* slot_weights(const DeviceComm& comm, const Self& self, i32 slot,
                                            i32 source, i32 index) {
  return behind_header<float>(weights_region(comm, self, slot, source)) + index * kTopk;
}

}  // namespace moe_p2p::device
