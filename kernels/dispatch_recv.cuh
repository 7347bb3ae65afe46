// Dispatch, receiving half: slots of the inbox straight into expert-major rows, each as soon as its
// flag is up. Where a row goes follows from the counts in the headers and the positions in the slot.
#pragma once

#include "kernels/dispatch_send.cuh"

namespace moe_p2p::device {

struct RecvShared {
  i32 first_row[MOE_P2P_MAX_LOCAL_EXPERTS][kWorld];  // of each local expert and source
  i32 num_rows[MOE_P2P_MAX_LOCAL_EXPERTS];
  i32 num_slots[kWorld];
  i32 row[kTopk];  // of the slot at hand
  bool arrived;
};

// Waits for all headers, then places the rows of every (expert, source).
__device__ inline void place_rows(const DispatchParams& p, u64 step, i32 slot, i32 block,
                                  RecvShared& s) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  const u64 own = p.comm.data[p.comm.rank % kLocal];
  for (i32 source = thread; source < kWorld; source += kThreads) {
    const auto* header = reinterpret_cast<const RegionHeader*>(inbox_at(own, slot, source));
    i32 slots = 0;
    if (wait_word(reinterpret_cast<const u32*>(&header->step), static_cast<u32>(step + 1), p.comm,
                  Phase::kDispatch, source, step)) {
      slots = static_cast<i32>(header->num_tokens);
      constexpr u32 kWant = static_cast<u32>(kWireType) << kDTypeShift;
      if (header->flags != kWant || header->slot_bytes != p.parts.slot_bytes) {
        raise_fault(p.comm, kWrongHeader, Phase::kDispatch, source, step, p.parts.slot_bytes,
                    header->slot_bytes);
        slots = 0;
      }
    }
    s.num_slots[source] = slots;
  }
  __syncthreads();
  for (i32 i = thread; i < p.comm.num_local_experts * kWorld; i += kThreads) {
    const char* region = inbox_at(own, slot, i % kWorld);
    const auto* counts = reinterpret_cast<const i32*>(region + sizeof(RegionHeader));
    s.first_row[i / kWorld][i % kWorld] = s.num_slots[i % kWorld] ? counts[i / kWorld] : 0;
  }
  __syncthreads();
  for (i32 e = thread; e < p.comm.num_local_experts; e += kThreads) {
    i32 at = 0;
    for (i32 source = 0; source < kWorld; ++source) {
      const i32 count = s.first_row[e][source];
      s.first_row[e][source] = at;
      at += count;
    }
    s.num_rows[e] = at;
  }
  __syncthreads();
  if (p.grouped && thread == 0) {  // E_local additions; padded rows need none
    i64 at = 0;
    for (i32 e = 0; e < p.comm.num_local_experts; ++e) {
      const i64 rows = s.num_rows[e];
      for (i32 source = 0; source < kWorld; ++source)
        s.first_row[e][source] += static_cast<i32>(at);
      at = (at + rows + p.alignment - 1) / p.alignment * p.alignment;
    }
  }
  __syncthreads();
  for (i32 e = thread; e < p.comm.num_local_experts; e += kThreads) {
    if (!p.grouped)
      for (i32 source = 0; source < kWorld; ++source)
        s.first_row[e][source] += static_cast<i32>(e * p.capacity);
    const i64 end = s.first_row[e][0] + s.num_rows[e];
    const i64 most = p.grouped ? p.capacity : (e + 1) * p.capacity;
    if (end > most && block == 0)
      raise_fault(p.comm, kCapacity, Phase::kDispatch, e, step, static_cast<u64>(p.capacity),
                  static_cast<u64>(p.grouped ? end : s.num_rows[e]));
    if (block != 0) continue;
    reinterpret_cast<i32*>(p.counts)[e] = s.num_rows[e];
    reinterpret_cast<i32*>(p.offsets)[e] = s.first_row[e][0];
    if (e + 1 == p.comm.num_local_experts)
      reinterpret_cast<i32*>(p.offsets)[e + 1] =
          static_cast<i32>(p.grouped ? (end + p.alignment - 1) / p.alignment * p.alignment : most);
  }
  const HandleArrays handle = HandleArrays::of(p.handle, p.num_rows);
  if (block == 0)
    for (i32 source = thread; source < kWorld; source += kThreads)
      handle.slot_counts[source] = s.num_slots[source];
  __syncthreads();
}

__device__ inline void copy_row(char* to, const char* from, u64 bytes) {
  if (bytes % 4 == 0) return copy_words(to, from, bytes);
  for (u64 b = threadIdx.x; b < bytes; b += kThreads) to[b] = from[b];
}

__device__ inline void recv_slot(const DispatchParams& p, u64 step, i32 slot, i32 source, i32 index,
                                 RecvShared& s, const HandleArrays& handle) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  const u64 own = p.comm.data[p.comm.rank % kLocal];
  const char* from =
      inbox_at(own, slot, source) + kInboxSlots + static_cast<u64>(index) * p.parts.slot_bytes;
  if (thread == 0)
    s.arrived = wait_word(inbox_flags_at(own, slot, source) + index, static_cast<u32>(step + 1),
                          p.comm, Phase::kDispatch, source, step);
  __syncthreads();
  if (thread < kTopk) {
    const u16 e = reinterpret_cast<const u16*>(from + expert_ids_offset())[thread];
    const bool mine = s.arrived && e != kNoExpert &&
                      reinterpret_cast<const i32*>(p.comm.expert_rank)[e] == p.comm.rank;
    i64 row = -1;
    if (mine) {
      const i32 local = reinterpret_cast<const i32*>(p.comm.expert_local)[e];
      row = s.first_row[local][source] +
            reinterpret_cast<const i32*>(from + positions_offset(kTopk))[thread];
      if (row >= (p.grouped ? p.capacity : (local + 1) * p.capacity))
        row = -1;  // told in place_rows()
    }
    s.row[thread] = static_cast<i32>(row);
    handle.rows_of(source, index)[thread] = static_cast<i32>(row);
    if (row >= 0) {
      reinterpret_cast<float*>(p.row_weights)[row] =
          reinterpret_cast<const float*>(from + weights_offset(kTopk))[thread];
      if (p.source) {
        reinterpret_cast<i32*>(p.source)[2 * row] = source;
        reinterpret_cast<i32*>(p.source)[2 * row + 1] = reinterpret_cast<const i32*>(from)[1];
      }
    }
  }
  __syncthreads();
  if (s.arrived) {
    for (i32 at = thread; at < kPayloadVecs; at += kThreads) {
      const Vec v = ld_na_v4(from + kHeadBytes + at * 16);
#pragma unroll
      for (i32 k = 0; k < kTopk; ++k)
        if (s.row[k] >= 0)
          st_na_v4(reinterpret_cast<char*>(p.out_x) +
                       (static_cast<i64>(s.row[k]) * kPayloadVecs + at) * 16,
                   v);
    }
    for (i32 k = 0; k < kTopk; ++k) {
      if (s.row[k] < 0) continue;
      const auto row = static_cast<u64>(s.row[k]);
      if (p.parts.bytes[1])
        copy_words(reinterpret_cast<char*>(p.out_scales) + row * p.parts.bytes[1],
                   from + p.parts.offset[1], p.parts.bytes[1]);
      for (i32 e = 0; e < p.num_extras; ++e)
        copy_row(reinterpret_cast<char*>(p.out_extras[e].data) + row * p.parts.bytes[2 + e],
                 from + p.parts.offset[2 + e], p.parts.bytes[2 + e]);
    }
  }
  __syncthreads();
}

// Rows without a token, when asked for: weight 0, source -1, values 0.
__device__ inline void clear_padding(const DispatchParams& p, i32 block, i32 num_blocks,
                                     const RecvShared& s) {
  for (i32 e = 0; e < p.comm.num_local_experts; ++e) {
    const i64 begin = s.first_row[e][0] + s.num_rows[e];
    const i64 end = !p.grouped                         ? (e + 1) * p.capacity
                    : e + 1 < p.comm.num_local_experts ? s.first_row[e + 1][0]
                                                       : p.capacity;
    for (i64 row = begin + block; row < end; row += num_blocks) {
      for (i32 at = static_cast<i32>(threadIdx.x); at < kPayloadVecs; at += kThreads)
        st_na_v4(reinterpret_cast<char*>(p.out_x) + (row * kPayloadVecs + at) * 16, Vec{});
      if (p.out_scales)
        for (i32 i = static_cast<i32>(threadIdx.x); i < kScales; i += kThreads)
          reinterpret_cast<float*>(p.out_scales)[row * kScales + i] = 0.0f;
      for (i32 x = 0; x < p.num_extras; ++x)
        for (u64 b = threadIdx.x; b < p.parts.bytes[2 + x]; b += kThreads)
          reinterpret_cast<char*>(
              p.out_extras[x].data)[static_cast<u64>(row) * p.parts.bytes[2 + x] + b] = 0;
      if (threadIdx.x == 0) {
        reinterpret_cast<float*>(p.row_weights)[row] = 0.0f;
        if (p.source) reinterpret_cast<i64*>(p.source)[row] = -1;  // both words
      }
    }
  }
}

__device__ inline void dispatch_recv(const DispatchParams& p, u64 step, i32 block, i32 num_blocks) {
  __shared__ RecvShared s;
  const auto slot = static_cast<i32>(step % static_cast<u64>(kShape.steps_in_flight));
  const HandleArrays handle = HandleArrays::of(p.handle, p.num_rows);
  place_rows(p, step, slot, block, s);
  if (p.zero_padding) clear_padding(p, block, num_blocks, s);
  i32 most = 0;
  for (i32 source = 0; source < kWorld; ++source) most = max(most, s.num_slots[source]);
  for (i32 i = block; i < most * kWorld; i += num_blocks) {
    const i32 source = (i + p.comm.rank) % kWorld;  // own tokens first, then round the node
    if (i / kWorld < s.num_slots[source]) recv_slot(p, step, slot, source, i / kWorld, s, handle);
  }
}

}  // namespace moe_p2p::device
