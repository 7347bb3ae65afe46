// Dispatch, receiving half: where rows go, from the counts in the headers. Each receiving block
// works it out for itself; one writes the caller's outputs.
#pragma once

#include "kernels/device/lost.cuh"
#include "kernels/dispatch/placement.cuh"

namespace moe_p2p::device {

inline constexpr i32 kRowGroups = Placement::max_groups();

struct FoundRows {
  i32 row[2][kTopk];  // this rank's rows of the current slot, and of the one before
  i64 scales[2][kScaled ? kTopk : 1];  // where their scales begin (ScalePlace)
  i32 num_rows[2];
  bool arrived[2];
};
struct RecvScratch : FoundRows {
  u32 head[2][kHeadWords];  // what lies before the payload
  // For self-flagged slots: the scales behind the payload.
  u32 scale[2][kSelfFlagged && kScaled ? kScales : 1];
  u32 mine[RecvWorker::kThreads / 32];  // bit j: item j of the batch has rows of this rank
};
struct RecvShared {
  i32 first_row[kRowGroups][kWorld];  // of each source
  i32 num_rows[kRowGroups];
  i32 start[kRowGroups];
  i32 num_slots[2][kWorld];  // of this chunk and the one before; -1 = did not arrive
  bool lost;                 // a slot, or some of its words, is lost
  RecvScratch worker[RecvWorker::kCount];
};

struct Receiver {
  const DispatchParams& p;
  const Self self;
  const HandleArrays handle;
  const bool reports;  // one block writes what all work out
  RecvShared& s;

  // Returns the row behind the last one that there is room for.
  __device__ i64 end_of(i32 group) const {
    return p.grouped ? p.capacity : (group + 1) * p.capacity;
  }
};

// Writes how long a wait took, in cycles of the GPU; a call of several chunks adds up.
__device__ inline void report_ticks(const Receiver& a, i32 chunk, i32 source, i64 ticks) {
  i64* ticks_of = &a.p.wait_ticks[source];
  *ticks_of = chunk == 0 ? ticks : *ticks_of + ticks;
}

// --- masks: whether a source has arrived is decided once, by the block that `reports`, because all
// blocks place rows by it. It has arrived when all of its slots have: rows of a source that ends in
// between are absent. ---

__device__ inline u64* came_word(const Receiver& a, u64 step, i32 source) {
  return state_words<u64>(a.p.comm, kWords.came) + slot_of(step) * kWorld + source;
}

__device__ inline bool await_source(const Receiver& a, u64 step, i32 source) {
  const DeviceComm& comm = a.p.comm;
  if (kInParts && !a.self.same_node(source))  // header and counts are in the first
    return wait_part(comm, Phase::kDispatch, step, source, 0);
  if constexpr (!kMasksGrow) return wait_dispatch(comm, a.self, step, source);
  if (a.reports) return wait_dispatch(comm, a.self, step, source) && !is_masked(comm, source);
  const u64* word = came_word(a, step, source);
  return wait_word(comm, word, 2 * (step + 1), {Phase::kDispatch, comm.rank, step}) &&
         (ld_relaxed_sys_u64(word) & 1);
}

// Whether a source that did not arrive is lost, not merely masked.
__device__ inline bool is_lost(const Receiver& a, i32 source) {
  if constexpr (kMasks && !kMasksGrow) return !is_masked(a.p.comm, source);
  return !kMasks || (is_aborted(a.p.comm) && !is_masked(a.p.comm, source));
}

// Called by the block that `reports`: waits for the slots of the own node, and stores whether each
// source has arrived. Returns false if one is lost.
__device__ inline bool decide(const Receiver& a, u64 step, i32* num_slots) {
  const DeviceComm& comm = a.p.comm;
  const i32 thread = static_cast<i32>(threadIdx.x);
  for (i32 i = thread; i < kLocal * chunk_of(comm); i += kBlockThreads) {
    const i32 l = i % kLocal, index = i / kLocal, source = a.self.node * kLocal + l;
    if (index < num_slots[source] &&
        !wait_flag(comm,
                   inbox_flags_at(comm, data_of(comm, a.self.local), slot_of(step), l) + index,
                   {Phase::kDispatch, source, step}))
      atomicExch(&num_slots[source], -1);
  }
  __syncthreads();
  bool lost = false;
#pragma unroll 1
  for (i32 source = thread; source < kWorld; source += kBlockThreads) {
    if (num_slots[source] < 0) lost = lost || is_lost(a, source);
    a.handle.slot_count(0, source) = max(num_slots[source], 0);
    // Pairs with the wait in await_source(); behind it lie the header and the slots.
    st_release_gpu_u64(came_word(a, step, source), 2 * (step + 1) + (num_slots[source] >= 0));
  }
  return !__syncthreads_or(lost);
}

// Returns the number of slots of a chunk from `source`; -1 when it does not arrive.
__device__ inline i32 receive_slots(const Receiver& a, u64 step, i32 source) {
  const DispatchParams& p = a.p;
  const RegionHeader* header =
      region_header(dispatch_region(p.comm, a.self, slot_of(step), source));
  const u32 flags = wire_flags(p);
  i32 slots;
  u64 slot_bytes;
  u32 got;
  if (kSelfFlagged && a.self.same_node(source)) {
    const Awaited what{Phase::kDispatch, source, step};
    u64 words[2] = {ld_relaxed_sys_u64(&header->announced[0]),
                    ld_relaxed_sys_u64(&header->announced[1])};
    for (i32 i = 0; i < 2; ++i)
      if (!wait_tagged(p.comm, &header->announced[i], words[i], what)) return -1;
    const auto size = static_cast<u32>(words[0]);
    slots = static_cast<i32>(size & 0xffff);
    slot_bytes = (size >> 16) * kLine;
    got = static_cast<u32>(words[1]);
  } else {
    if (!await_source(a, step, source)) return -1;
    slots = static_cast<i32>(header->num_tokens);
    slot_bytes = header->slot_bytes;
    got = header->flags;
  }
  if (got == flags && slot_bytes == p.parts.slot_bytes && slots <= p.num_slots) return slots;
  if (only_max_tokens_differ(got, flags)) {
    raise_fault(p.comm, kOtherMaxTokens, Phase::kDispatch, source, step,
                static_cast<u64>(p.max_tokens), got >> kMaxTokensShift);
  } else {
    raise_fault(p.comm, kWrongHeader, Phase::kDispatch, source, step, p.parts.slot_bytes,
                slot_bytes);
  }
  return -1;
}

// Waits for the headers of a step from all ranks. wait_ticks measures only these waits: own-node
// slots may arrive later than their header, but no single place waits for all of them. Returns
// false if one is lost.
__device__ inline bool read_headers(const Receiver& a, u64 step, i32 chunk) {
  const DispatchParams& p = a.p;
  bool lost = false;
  // Threads of one warp end a wait together, so where ticks count they are as far apart as can be.
  constexpr i32 kEach = kBlockThreads / kWorld;  // threads available for a source
  constexpr i32 kApart = kEach > 32 ? 32 : kEach < 1 ? 1 : kEach;
  const bool timed = a.reports && is_timed(p);
  const i32 apart = timed ? kApart : 1;
  if (const i32 thread = static_cast<i32>(threadIdx.x); thread % apart == 0)
#pragma unroll 1
    for (i32 source = thread / apart; source < kWorld; source += kBlockThreads / apart) {
      const i64 began = clock64();
      const i32 slots = receive_slots(a, step, source);
      if (timed) report_ticks(a, chunk, source, clock64() - began);
      a.s.num_slots[chunk % 2][source] = slots;
      if (slots < 0) lost = lost || is_lost(a, source);
      if (a.reports) a.handle.slot_count(chunk, source) = max(slots, 0);
    }
  __syncwarp();
  lost = __syncthreads_or(lost);
  if constexpr (kMasksGrow)
    if (a.reports && !lost) lost = !decide(a, step, a.s.num_slots[chunk % 2]);
  return !lost;
}

// Count i of `source` about the call for this rank, read in two steps: loads of several counts can
// be under way together.
__device__ __forceinline__ const char* counts_from(const Receiver& a, u64 step, i32 source) {
  return behind_header<char>(dispatch_region(a.p.comm, a.self, slot_of(step), source));
}
__device__ __forceinline__ u64 ask_count(const Receiver& a, u64 step, i32 source, i32 i) {
  const char* counts = counts_from(a, step, source);
  const bool near = a.self.same_node(source);
  if (kSelfFlagged && near) return ld_relaxed_sys_u64(values_at<u64>(counts) + i);
  return values_at<u32>(counts)[(near ? 0 : a.self.local * kCountsPerRank) + i];
}
// Returns -1 if the count did not arrive.
__device__ __forceinline__ i32 receive_count(const Receiver& a, u64 step, i32 source, i32 i,
                                             u64 word) {
  if (kSelfFlagged && a.self.same_node(source))
    if (!wait_tagged(a.p.comm, values_at<u64>(counts_from(a, step, source)) + i, word,
                     {Phase::kDispatch, source, step}))
      return -1;
  return static_cast<i32>(static_cast<u32>(word));
}

// Reports the capacity that would have sufficed and, in the padded layout, which expert needs it.
// Returns false where rows may be left out.
__device__ __noinline__ bool raise_capacity(const DispatchParams& p, const RecvShared& s,
                                            u64 step) {
  if (p.drop) return false;
  const bool shared_room = Placement::shares_room(p);
  i64 needed = 0;
  i32 expert = -1;
#pragma unroll 1
  for (i32 g = 0; g < Placement::num_groups(p); ++g) {
    const i64 rows = (shared_room ? i64{s.start[g]} : 0) + s.num_rows[g];
    if (rows > needed) needed = rows, expert = g;
  }
  raise_fault(p.comm, kCapacity, Phase::kDispatch, shared_room ? -1 : expert, step,
              static_cast<u64>(p.capacity), static_cast<u64>(needed));
  return true;
}

inline constexpr i32 kOutScales =  // 4-byte words that a quantizing dispatch delivers
    kScaleFormat == ScaleFormat::kUe8m0 ? (kScales + 3) / 4 : kScales;
__device__ __forceinline__ i32 num_scales(const DispatchParams& p) {
  return kQuantize ? kOutScales : kScaled ? static_cast<i32>(p.parts.bytes[1] / 4) : 0;
}
__device__ __forceinline__ i64 scales_of(const DispatchParams& p, i64 row, i32 expert) {
  return row * p.scale_place.row + expert * p.scale_place.expert;
}

// --- what is lost ---

// Marks the rows of this call as unknown. Called by the whole block.
__device__ __noinline__ void report_lost(const DispatchParams& p, bool reports) {
  const i32 thread = static_cast<i32>(threadIdx.x), num_experts = num_local_experts(p.comm);
  if (!reports || !p.offsets) return;
#pragma unroll 1
  for (i32 e = thread; e < num_experts; e += kBlockThreads) {
    p.counts[e] = -1;
    Placement::lose_ranges(p, e);
  }
#pragma unroll 1
  for (i32 i = thread; i <= Placement::last_offset(p); i += kBlockThreads) p.offsets[i] = 0;
}

// Something of `step` is lost, and which rows it would have filled is unknown. So all are poisoned,
// by all threads that get here; rows that do arrive are stored at the same time and may be whole or
// not.
__device__ __noinline__ void lose_rows(const DispatchParams& p, u64 step) {
  if (!p.offsets) return;
  const i64 num_rows = (Placement::shares_room(p) ? 1 : num_local_experts(p.comm)) * p.capacity;
#pragma unroll 1
  for (i64 row; (row = take_lost(p.comm, step)) >= 0 && row < num_rows;) {
    lose(p.out_x.as<char>() + row * kPayloadVecs * 16, kPayloadVecs * 16);
    if constexpr (kScaled) {
      const auto expert = static_cast<i32>(p.grouped ? 0 : row / p.capacity);
      u32* scales = p.out_scales.as<u32>() + scales_of(p, row, Placement::group_of(expert));
#pragma unroll 1
      for (i32 i = 0; i < num_scales(p); ++i) scales[i * p.scale_place.word] = ~0u;
    }
    for (i32 x = 0; x < num_extras(p); ++x) {
      const u64 bytes = p.parts.bytes[2 + x];
      lose(p.out_extras[x].data.get() + static_cast<u64>(row) * bytes, bytes);
    }
    constexpr i32 kWeights = Placement::weights_per_row();
    lose(p.row_weights.as<char>() + row * kWeights * 4, kWeights * 4);
    Placement::lose_entries(p, row);
    if (p.source) p.source.as<i64>()[row] = -1;  // both words
  }
}

// Writes counts of experts and offsets of sources: PerToken::report().
__device__ __noinline__ void report_sources(const DispatchParams& p, RecvShared& s, u64 step) {
  const Receiver a{p, Self(p.comm), HandleArrays(p), true, s};
  const i32 thread = static_cast<i32>(threadIdx.x);
  i32* offsets = a.p.offsets.get();
#pragma unroll 1
  for (i32 source = thread; source < kWorld; source += kBlockThreads)
    offsets[source] = static_cast<i32>(min(i64{s.first_row[0][source]}, a.p.capacity));
  if (thread == 0) {
    offsets[kWorld] = static_cast<i32>(min(i64{s.num_rows[0]}, a.p.capacity));
    if (s.num_rows[0] > a.p.capacity) raise_capacity(a.p, s, step);
  }
  for (i32 e = thread; e < num_local_experts(a.p.comm); e += kBlockThreads) {
    constexpr i32 kAtOnce = 8;
    i32 sum = 0, all = 0;
    for (i32 first = 0; first < kWorld; first += kAtOnce) {
      u64 word[kAtOnce];
#pragma unroll
      for (i32 j = 0; j < kAtOnce; ++j)
        if (first + j < kWorld) word[j] = ask_count(a, step, first + j, e);
#pragma unroll
      for (i32 j = 0; j < kAtOnce; ++j)
        if (first + j < kWorld && s.num_slots[0][first + j] >= 0) {
          const i32 count = receive_count(a, step, first + j, e, word[j]);
          all |= count;  // negative once one count is
          sum += count;
        }
    }
    // At most as many rows as there is room for name it.
    a.p.counts[e] = all < 0 ? -1 : static_cast<i32>(min(i64{sum}, a.p.capacity));
  }
}

// Places the rows of every (group, source), by the counts of the whole call. Returns false if some
// did not arrive.
__device__ inline bool place_rows(const Receiver& a, u64 step) {
  const DispatchParams& p = a.p;
  RecvShared& s = a.s;
  const i32 thread = static_cast<i32>(threadIdx.x), num_groups = Placement::num_groups(p);
  bool lost = false;
#pragma unroll 1
  for (i32 i = thread; i < num_groups * kWorld; i += kBlockThreads) {
    const i32 source = i / num_groups, g = i % num_groups, index = Placement::count_of(g);
    const i32 count = s.num_slots[0][source] < 0 ? 0
                                                 : receive_count(a, step, source, index,
                                                                 ask_count(a, step, source, index));
    lost = lost || count < 0;
    s.first_row[g][source] = count;
  }
  if (__syncthreads_or(lost)) return false;
#pragma unroll 1
  for (i32 g = thread; g < num_groups; g += kBlockThreads) {
    i32 at = 0;
    for (i32 source = 0; source < kWorld; ++source) {
      const i32 count = s.first_row[g][source];
      Placement::report_range(a, g, source, at, count);
      s.first_row[g][source] = at;
      at += count;
    }
    s.num_rows[g] = at;
    s.start[g] = static_cast<i32>(g * p.capacity);  // padded
  }
  __syncthreads();
  Placement::add_starts(a, num_groups);
  if (a.reports && p.offsets) Placement::report(a, step);
  return true;
}

// Whether one warp places all rows, a lane for each group, while another reads the headers: counts
// then pass through registers only, and the block through one barrier.
inline constexpr bool kWarpPlaces = kPlain && kSelfFlagged && kOthers == 0 && kRowGroups > 1 &&
                                    kRowGroups <= 32 && kWorld <= 8 && kBlockThreads > 32;

// Called by one warp.
__device__ __forceinline__ bool place_by_warp(const Receiver& a, u64 step) {
  const DispatchParams& p = a.p;
  RecvShared& s = a.s;
  const i32 g = static_cast<i32>(threadIdx.x) % 32, num_groups = Placement::num_groups(p);
  u64 word[kWorld];
#pragma unroll
  for (i32 source = 0; source < kWorld; ++source)
    word[source] = ask_count(a, step, source, g < num_groups ? Placement::count_of(g) : 0);
  Awaited what{Phase::kDispatch, -1, step};
  const auto again = [&] {
    bool any = false;
#pragma unroll
    for (i32 source = 0; source < kWorld; ++source)
      if (g < num_groups && !is_tagged(word[source], step)) {
        what.source = source, any = true;
        word[source] = ask_count(a, step, source, Placement::count_of(g));
      }
    return any;
  };
  const bool came = wait_flagged(p.comm, again, what);
  i32 first[kWorld], rows = 0;
#pragma unroll
  for (i32 source = 0; source < kWorld; ++source) {
    first[source] = rows;
    rows += g < num_groups ? static_cast<i32>(static_cast<u32>(word[source])) : 0;
  }
  const i32 start = Placement::start_by_warp(p, g, rows);
  if (g < num_groups) {
#pragma unroll
    for (i32 source = 0; source < kWorld; ++source) {
      s.first_row[g][source] = start + first[source];
      Placement::report_range(
          a, g, source, first[source],
          (source + 1 < kWorld ? first[(source + 1) % kWorld] : rows) - first[source]);
    }
    s.num_rows[g] = rows;
    s.start[g] = start;
  }
  return came;
}
// read_headers() and place_rows() of a call's first chunk.
__device__ inline bool read_and_place(const Receiver& a, u64 step) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  bool good = true;
  if (thread < 32) {
    good = place_by_warp(a, step);
  } else if (const i32 source = thread - 32; source < kWorld) {
    const i32 slots = receive_slots(a, step, source);
    a.s.num_slots[0][source] = slots;
    if (slots < 0) good = !is_lost(a, source);
    if (a.reports) a.handle.slot_count(0, source) = max(slots, 0);
  }
  __syncwarp();
  if (thread == 0) a.s.lost = false;
  if (!__syncthreads_and(good)) return false;
  if (a.reports && a.p.offsets) Placement::report(a, step);
  return true;
}

// Rows without a token, when asked for: weight 0, source -1, values 0.
__device__ __noinline__ void clear_padding(const DispatchParams& p, RecvShared& s,
                                           const RecvWorker& worker) {
  const Receiver a{p, Self(p.comm), HandleArrays(p), false, s};
  const i32 num_groups = Placement::num_groups(p);
  for (i32 g = num_groups > 0 ? 0 : -1; g < num_groups; ++g) {  // -1: this rank owns none
    const i64 begin = g < 0 ? 0 : static_cast<i64>(a.s.start[g]) + a.s.num_rows[g];
    const i64 room = a.end_of(g);  // place_rows() reported too many rows
    const i64 end = p.grouped && g + 1 < num_groups ? min(i64{a.s.start[g + 1]}, room) : room;
    for (i64 row = begin + worker.id; row < end; row += worker.count) {
      for (i32 at = worker.thread; at < kPayloadVecs; at += RecvWorker::kThreads)
        st_na_v4(p.out_x.as<char>() + (row * kPayloadVecs + at) * 16, Vec{});
      if constexpr (kScaled)
        for (i32 i = worker.thread; i < num_scales(p); i += RecvWorker::kThreads)
          p.out_scales.as<u32>()[scales_of(p, row, g) + i * p.scale_place.word] = 0;
      for (i32 x = 0; x < num_extras(p); ++x)
        for (u64 b = static_cast<u64>(worker.thread); b < p.parts.bytes[2 + x];
             b += RecvWorker::kThreads)
          p.out_extras[x].data.get()[static_cast<u64>(row) * p.parts.bytes[2 + x] + b] = 0;
      if (worker.thread == 0) {
        Placement::store_weight(p, row, 0.0f);
        if (p.source) p.source.as<i64>()[row] = -1;  // both words
      }
    }
  }
}

}  // namespace moe_p2p::device
