// Which row a token fills at its receivers: the placements, as policies with the same functions. A
// kernel is compiled for one of them, Placement, by its layout; no other file asks which.
//
// Senders put a position into every slot and counts of the whole call into the headers. A receiver
// adds a position to the first row of (group, source), which follows from the counts. `a` is the
// Sender (route.cuh) or the Receiver (place.cuh). All threads of its block call what begins, ends,
// adds and reports; a worker or warp calls the others.
#pragma once

#include "kernels/dispatch/routing_table.cuh"

namespace moe_p2p::device {

// A row for each local expert that a token names, in the room of the expert (padded) or behind the
// rows of the experts before (grouped). A position is the number of earlier tokens of the call that
// name the expert; a group is a local expert.
struct PerExpert {
  // --- sending ---
  __device__ static constexpr i32 num_token_counts() { return 0; }
  // Entries that a lane asks for before it counts them.
  __device__ static constexpr i32 num_counted_ahead() { return 24; }

  __device__ static void begin(auto& s) {
#pragma unroll 1
    for (i32 i = static_cast<i32>(threadIdx.x); i < SendWorker::kCount * kExperts;
         i += kBlockThreads)
      s.worker[i / kExperts].seen[i % kExperts] = 0;
  }
  __device__ static void begin_chunk(const auto&) {}
  __device__ static void route(const auto&, i32, i32, i32) {}
  __device__ static void end_chunk(const auto&) {}

  // Counts entries [from, end) of the call, for the positions of the next token.
  __device__ static void count(const DispatchParams& p, i32* seen, i64 from, i64 end, i32 thread,
                               i32 num_threads) {
    count_experts(p, seen, from, end, thread, num_threads);
  }
  __device__ static i32 position(const auto&, const auto& w, i32 expert, i32) {
    return w.seen[expert];
  }
  __device__ static void count_call(const auto&, i32*) {}
  __device__ static void send_call(const auto&, u64, const i32*) {}

  // --- receiving ---
  __device__ static constexpr i32 max_groups() { return kMaxLocalExperts; }
  __device__ static i32 num_groups(const DispatchParams& p) { return num_local_experts(p.comm); }
  __device__ static i32 group_of(i32 expert) { return expert; }
  __device__ static i32 count_of(i32 group) { return group; }  // number of its count in a header
  __device__ static bool shares_room(const DispatchParams& p) { return p.grouped; }
  __device__ static i32 last_offset(const DispatchParams& p) { return num_local_experts(p.comm); }
  __device__ static constexpr i32 weights_per_row() { return 1; }

  __device__ static void report_range(const auto& a, i32 group, i32 source, i32 first, i32 count) {
    const DispatchParams& p = a.p;
    if (a.reports && p.ranges)
      p.ranges[group * kWorld + source] =
          min(i64{first}, p.capacity) << 32 | max(min(i64{count}, p.capacity - first), i64{0});
  }
  __device__ static void lose_ranges(const DispatchParams& p, i32 expert) {
    if (p.ranges)
#pragma unroll 1
      for (i32 source = 0; source < kWorld; ++source)
        p.ranges[expert * kWorld + source] = 0xffffffff;  // from row 0 on, -1
  }

  // First rows of grouped experts: a prefix sum of their aligned numbers of rows, by one warp.
  __device__ static void place_groups(const auto& a) {
    const i32 lane = static_cast<i32>(threadIdx.x), num_experts = num_groups(a.p);
    const auto alignment = static_cast<i32>(a.p.alignment);
    i32 before = 0;
#pragma unroll 1
    for (i32 first = 0; first < num_experts; first += 32) {
      const i32 e = first + lane;
      const i32 rows =
          e < num_experts ? (a.s.num_rows[e] + alignment - 1) / alignment * alignment : 0;
      i32 sum = rows;
#pragma unroll
      for (i32 d = 1; d < 32; d *= 2) {
        const i32 left = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += left;
      }
      if (e < num_experts) a.s.start[e] = before + sum - rows;
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  // The first row of expert `lane` with `num_rows` rows. Called by a warp, for at most 32 experts.
  __device__ static i32 start_by_warp(const DispatchParams& p, i32 lane, i32 num_rows) {
    if (!p.grouped) return static_cast<i32>(lane * p.capacity);
    const auto alignment = static_cast<i32>(p.alignment);
    const i32 rows = alignment == 1 ? num_rows : (num_rows + alignment - 1) / alignment * alignment;
    i32 sum = rows;
#pragma unroll
    for (i32 d = 1; d < 32; d *= 2) {
      const i32 left = __shfl_up_sync(~0u, sum, d);
      if (lane >= d) sum += left;
    }
    return sum - rows;
  }
  // Makes first_row, which counts from the group's start, a row of the output.
  __device__ static void add_starts(const auto& a, i32 num_experts) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    if (a.p.grouped) {
      if (thread < 32) place_groups(a);
      __syncthreads();
    }
#pragma unroll 1
    for (i32 i = thread; i < num_experts * kWorld; i += kBlockThreads)
      a.s.first_row[i / kWorld][i % kWorld] += a.s.start[i / kWorld];
  }
  // Writes counts and offsets of experts. None exceeds the room, whatever was sent.
  __device__ static void report(const auto& a, u64 step) {
    const DispatchParams& p = a.p;
    const auto& s = a.s;
    const i32 thread = static_cast<i32>(threadIdx.x), num_experts = num_groups(p);
    i32* offsets = p.offsets.get();
    if (num_experts == 0 && thread == 0) offsets[0] = 0;
#pragma unroll 1
    for (i32 e = thread; e < num_experts; e += kBlockThreads) {
      const i64 room = a.end_of(e), start = min(i64{s.start[e]}, room);
      const i64 end = i64{s.start[e]} + s.num_rows[e];
      const bool drops = end > room && !raise_capacity(p, s, step);
      p.counts[e] = static_cast<i32>(min(end, room) - start);
      offsets[e] = static_cast<i32>(start);
      if (e + 1 == num_experts)
        offsets[e + 1] =
            static_cast<i32>(p.grouped ? min((end + p.alignment - 1) / p.alignment * p.alignment,
                                             drops ? i64{0x7fffffff} : room)
                                       : room);
    }
  }

  // Returns which of the lanes with a row keep it: all.
  __device__ static u32 keep(const DispatchParams&, i32, u32 have, i64, i32, const char*) {
    return have;
  }
  __device__ static i64 kept(u32, i32, i64 row) { return row; }
  __device__ static void store_weight(const DispatchParams& p, i64 row, float weight) {
    p.row_weights[row] = weight;
  }
  __device__ static void lose_entries(const DispatchParams&, i64) {}
  __device__ static void clear_entries(const auto&, const auto&) {}
};

// One row for each token that names experts of the rank, ordered by source and token. A position is
// the number of earlier tokens of the call for that rank; all rows are one group.
struct PerToken {
  // --- sending ---
  __device__ static constexpr i32 num_token_counts() { return kWorld; }  // of tokens for each rank
  __device__ static constexpr i32 num_counted_ahead() { return 0; }

  __device__ static void begin(auto& s) {
#pragma unroll 1
    for (i32 rank = static_cast<i32>(threadIdx.x); rank < kWorld; rank += kBlockThreads)
      s.before[rank] = 0;
#pragma unroll 1
    for (i32 e = static_cast<i32>(threadIdx.x); e < kExperts; e += kBlockThreads)
      s.worker[0].seen[e] = 0;
  }
  __device__ static void begin_chunk(const auto& a) {
    if constexpr (kOthers == 0) return;
    for (i32 i = static_cast<i32>(threadIdx.x); i < kWorld * kChunkWords; i += kBlockThreads)
      (&a.s.far_has[0][0])[i] = 0;
    __syncthreads();
  }
  // Notes that token 32 * word + lane of the chunk is for `rank`. Bits of own-node ranks are in
  // `has`.
  __device__ static void route(const auto& a, i32 rank, i32 word, i32 lane) {
    if constexpr (kOthers > 0)
      if (!a.self.same_node(rank)) atomicOr(&a.s.far_has[rank][word], 1u << lane);
  }
  // Adds the chunk's tokens for the next one.
  __device__ static void end_chunk(const auto& a) {
#pragma unroll 1
    for (i32 rank = static_cast<i32>(threadIdx.x); rank < kWorld; rank += kBlockThreads) {
      const u32* has = a.s.has[rank % kLocal];
      if constexpr (kOthers > 0)
        if (!a.self.same_node(rank)) has = a.s.far_has[rank];
      a.s.before[rank] += tokens_in(has);
    }
    __syncthreads();
  }

  __device__ static void count(const DispatchParams&, i32*, i64, i64, i32, i32) {}
  // In the inbox of an own-node rank the slot's number counts the tokens of this chunk.
  __device__ static i32 position(const auto& a, const auto& w, i32 expert, i32 at) {
    const i32 rank = owner_of(a.p.comm, expert).rank;
    i32 earlier = w.slot[rank % kLocal];
    if constexpr (kOthers > 0)
      if (!a.self.same_node(rank)) earlier = tokens_before(a.s.far_has[rank], at);
    return a.s.before[rank] + earlier;
  }
  __device__ static void count_call(const auto& a, i32* tokens) {
    count_tokens(a.p, tokens, a.num_tokens);
  }
  __device__ static void send_call(const auto& a, u64 step, const i32* tokens) {
#pragma unroll 1
    for (i32 rank = static_cast<i32>(threadIdx.x); rank < kWorld; rank += kBlockThreads)
      if (!is_masked(a.p.comm, rank)) send_count(a, step, rank, count_of(0), tokens[rank]);
  }

  // --- receiving ---
  __device__ static constexpr i32 max_groups() { return 1; }
  __device__ static i32 num_groups(const DispatchParams&) { return 1; }
  __device__ static i32 group_of(i32) { return 0; }
  __device__ static i32 count_of(i32) { return kMaxLocalExperts; }
  __device__ static bool shares_room(const DispatchParams&) { return true; }
  __device__ static i32 last_offset(const DispatchParams&) { return kWorld; }
  __device__ static constexpr i32 weights_per_row() { return kTopk; }

  __device__ static void report_range(const auto&, i32, i32, i32, i32) {}
  __device__ static i32 start_by_warp(const DispatchParams&, i32, i32) { return 0; }
  __device__ static void lose_ranges(const DispatchParams&, i32) {}
  __device__ static void add_starts(const auto&, i32) {}

  // Out of line, or recv_slot() would have fewer registers: place.cuh.
  __device__ static void report(const auto& a, u64 step) { report_sources(a.p, a.s, step); }

  // Stores the K entries of a row; other ranks' experts become none.
  __device__ static void store_entries(const DispatchParams& p, i32 lane, i64 row, i32 expert,
                                       const char* slot) {
    if (row < 0 || lane >= kTopk) return;
    const float weight = slot_weights<kTopk>(slot)[lane];
    store_topk(p, row * kTopk + lane, expert);
    p.row_weights[row * kTopk + lane] = expert < 0 ? 0.0f : weight;
  }
  // All lanes with a row have the same one: the first keeps it.
  __device__ static u32 keep(const DispatchParams& p, i32 lane, u32 have, i64 row, i32 expert,
                             const char* slot) {
    store_entries(p, lane, __shfl_sync(~0u, row, max(__ffs(have) - 1, 0)), expert, slot);
    return have & (~have + 1);
  }
  __device__ static i64 kept(u32 have, i32 lane, i64 row) {
    if (!(have >> lane & 1)) row = -1;
    return row;
  }
  __device__ static void store_weight(const DispatchParams&, i64, float) {}
  __device__ static void lose_entries(const DispatchParams& p, i64 row) {
    for (i32 k = 0; k < kTopk; ++k) store_topk(p, row * kTopk + k, -1);
  }
  // Rows without a token name no expert, whether padding is cleared or not.
  __device__ static void clear_entries(const auto& a, const auto& worker) {
    const i64 end = a.p.capacity * kTopk, stride = worker.count * RecvWorker::kThreads;
    i64 i = static_cast<i64>(a.s.num_rows[0]) * kTopk + worker.id * RecvWorker::kThreads;
    for (i += worker.thread; i < end; i += stride) {
      store_topk(a.p, i, -1);
      a.p.row_weights[i] = 0.0f;
    }
  }
  __device__ __forceinline__ static void store_topk(const DispatchParams& p, i64 at, i32 expert) {
    if (p.topk_is_int64) {
      p.row_topk.as<i64>()[at] = expert;
    } else {
      p.row_topk.as<i32>()[at] = expert;
    }
  }
};

template <RowLayout>
struct PlacementOf;
template <>
struct PlacementOf<RowLayout::kPadded> {  // and kGrouped
  using Type = PerExpert;
};
template <>
struct PlacementOf<RowLayout::kByRank> {
  using Type = PerToken;
};
using Placement = PlacementOf<kLayout>::Type;

}  // namespace moe_p2p::device
