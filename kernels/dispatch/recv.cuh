// Dispatch, receiving half: slots straight into rows. Own-node slots lie in this rank's inbox and
// are taken one by one as their flags go up; slots of other nodes lie in the gateways' landing
// regions and are read over NVLink once their source has arrived. The row follows from place.cuh
// and the position in the slot.
#pragma once

#include "kernels/dispatch/ready.cuh"

namespace moe_p2p::device {

template <typename W>
__device__ inline void copy_row(const W& worker, char* to, const char* from, u64 bytes) {
  if (bytes % 4 == 0) return copy_words(worker, to, from, bytes);
  for (u64 b = static_cast<u64>(worker.thread); b < bytes; b += W::kThreads) to[b] = from[b];
}

template <typename W>
__device__ inline void copy_extras(const DispatchParams& p, const W& worker, u64 row,
                                   const char* slot) {
  for (i32 e = 0; e < num_extras(p); ++e)
    copy_row(worker, p.out_extras[e].data.get() + row * p.parts.bytes[2 + e],
             slot + p.parts.offset[2 + e], p.parts.bytes[2 + e]);
}

// Returns word i of a row's scales in this rank's format, from a slot.
__device__ __forceinline__ u32 scale_word(const char* scales, i32 i) {
  const u32* words = values_at<u32>(scales);
  if constexpr (kScaleFormat != ScaleFormat::kUe8m0) return words[i];
  u32 packed = 0;
#pragma unroll
  for (i32 j = 0; j < 4; ++j)
    if (const i32 block = 4 * i + j; block < kScales)
      packed |= (words[block] >> 23 & 0xff) << 8 * j;
  return packed;
}

// Stores words first, first + kThreads, ... of the scales of a row.
template <typename W>
__device__ inline void store_scales(const DispatchParams& p, const W&, i64 at, const char* scales,
                                    i32 first) {
  u32* to = p.out_scales.as<u32>() + at;
#pragma unroll 1
  for (i32 i = first; i < num_scales(p); i += W::kThreads)
    to[i * p.scale_place.word] = scale_word(scales, i);
}

// Finds the rows of this rank that the slot at `from` fills, into w.row[buffer]. Called by the
// first warp.
__device__ inline void find_rows(const Receiver& a, i32 lane, i32 chunk, const Item& item,
                                 const char* from, i32 buffer, FoundRows& w) {
  const DispatchParams& p = a.p;
  i64 row = -1;
  i32 expert = -1;  // of this rank
  if (lane < kTopk && w.arrived[buffer]) {
    const u16 e = slot_expert_ids(from)[lane];
    const Owner owner = e < kExperts ? owner_of(p.comm, expert_from(item.source, e)) : Owner{-1, 0};
    if (owner.rank == p.comm.rank) {
      expert = owner.local;
      const i32 group = Placement::group_of(expert);
      const i32 position = slot_positions<kTopk>(from)[lane];
      row = a.s.first_row[group][item.source] + position;
      // place_rows() reported the excess; a lost position is -1.
      if (row >= a.end_of(group) || position < 0) row = -1;
    }
  }
  const u32 have = Placement::keep(p, lane, __ballot_sync(~0u, row >= 0), row, expert, from);
  row = Placement::kept(have, lane, row);
  if (row >= 0) {
    const i32 r = __popc(have & ((1u << lane) - 1));
    w.row[buffer][r] = static_cast<i32>(row);
    if constexpr (kScaled) w.scales[buffer][r] = scales_of(p, row, Placement::group_of(expert));
  }
  if (lane == 0) w.num_rows[buffer] = __popc(have);
  if (lane >= kTopk) return;
  a.handle.rows_of(chunk, item.source, item.index)[lane] = static_cast<i32>(row);
  if (row < 0) return;
  Placement::store_weight(p, row, slot_weights<kTopk>(from)[lane]);
  if (p.source) {
    p.source[2 * row] = item.source;
    p.source[2 * row + 1] = static_cast<i32>(slot_head(from)->token);
  }
}

// Reads the head of a slot into shared memory, all of it for the latency of one load. Called by the
// first warp. takes: the slot flags itself.
__device__ inline void read_head(const Receiver& a, i32 lane, char* from, bool takes, i32 buffer,
                                 const Awaited& what, RecvScratch& w) {
  constexpr i32 kEach = (kHeadWords + 31) / 32;
  const auto at = [&](i32 i) { return values_at<u32>(from) + i * 32 + lane; };
  u32 word[kEach];
#pragma unroll
  for (i32 i = 0; i < kEach; ++i) word[i] = takes ? ld_relaxed_sys_u32(at(i)) : *at(i);
  bool lost = false;
#pragma unroll
  for (i32 i = 0; i < kEach; ++i)
    w.head[buffer][i * 32 + lane] =
        takes ? take_word(a.p.comm, at(i), word[i], what, &lost) : word[i];
  if (lost) a.s.lost = true;
  __syncwarp();
}

__device__ inline char* slot_at(const Receiver& a, u64 step, const Item& item) {
  return dispatch_region(a.p.comm, a.self, slot_of(step), item.source) +
         (a.self.same_node(item.source) ? kInboxSlots : kOutboxSlots) +
         static_cast<u64>(item.index) * a.p.parts.slot_bytes;
}

// Clears the words of a self-flagged slot that do not flag themselves: a flag did.
__device__ inline void clear_opaque(const DispatchParams& p, const RecvWorker& worker, char* from) {
  worker.sync();  // all have read them
  for (u64 at = p.parts.offset[kOpaqueX ? 0 : 1] + static_cast<u64>(worker.thread) * 16;
       at < p.parts.slot_bytes; at += RecvWorker::kThreads * 16)
    st_relaxed_sys_v4(from + at, Vec{});
}

__device__ inline void recv_slot(const Receiver& a, const RecvWorker& worker, u64 step, i32 chunk,
                                 const Item& item, i32 buffer) {
  const DispatchParams& p = a.p;
  const DeviceComm& comm = p.comm;
  RecvScratch& w = a.s.worker[worker.place];
  char* from = slot_at(a, step, item);
  const bool near = a.self.same_node(item.source), takes = kSelfFlagged && near;
  const Awaited what{Phase::kDispatch, item.source, step};
  const bool takes_x = takes && !kOpaqueX;
  const bool flag = near && (!takes || is_opaque(p));
  if (worker.thread == 0) w.arrived[buffer] = true;
  if (flag && !kMasksGrow) {
    if (worker.thread == 0) {
      w.arrived[buffer] = wait_flag(
          comm,
          inbox_flags_at(comm, data_of(comm, a.self.local), slot_of(step), item.source % kLocal) +
              item.index,
          what);
      if (!w.arrived[buffer]) a.s.lost = true;
    }
    worker.sync();
  }
  using R = Rounds<RecvWorker>;
  Vec payload[R::kVecs];  // under way while the rows are found
  const auto each_vec = [&](i32 piece, const auto& each) {
#pragma unroll
    for (i32 i = 0; i < R::kVecs; ++i)
      if (const i32 at = R::at(worker, piece, i); at < kPayloadVecs)
        each(payload[i], from + kHeadBytes + at * 16);
  };
  const auto load = [&](i32 piece) {
    each_vec(piece, [&](Vec& vec, const char* at) {
      vec = takes_x ? ld_relaxed_sys_v4(at) : ld_na_v4(at);
    });
  };
  const auto take = [&](i32 piece) {
    if (!takes_x) return;
    const auto again = [&] {
      bool any = false;
      each_vec(piece, [&](Vec& vec, const char* at) {
        if (!has_come(vec)) vec = ld_relaxed_sys_v4(at), any = true;
      });
      return any;
    };
    wait_flagged(comm, again, what);
    each_vec(piece, [&](Vec& vec, char* at) { vec = take_vec(at, vec); });
  };
  load(0);
  // Also under way: a word of the scales for each thread.
  char* scales = from + p.parts.offset[1];
  const bool takes_scales = kScaled && takes && !is_opaque(p);
  const auto scale_at = [&](i32 i) { return values_at<u32>(scales) + i; };
  const i32 num_taken = takes_scales ? static_cast<i32>(p.parts.bytes[1] / 4) : 0;
  u32 scale = 0;
  if (takes_scales) {
    if (worker.thread < num_taken) scale = ld_relaxed_sys_u32(scale_at(worker.thread));
  } else if (kScaled && worker.thread < num_scales(p)) {
    scale = scale_word(scales, worker.thread);
  }
  if (worker.thread < 32) {
    read_head(a, worker.thread, from, takes, buffer, what, w);
    find_rows(a, worker.thread, chunk, item, reinterpret_cast<const char*>(w.head[buffer]), buffer,
              w);
  }
  take(0);
#pragma unroll 1
  for (i32 i = worker.thread; i < num_taken; i += RecvWorker::kThreads) {
    if (i != worker.thread) scale = ld_relaxed_sys_u32(scale_at(i));
    w.scale[buffer][i] = take_word(comm, scale_at(i), scale, what);
  }
  worker.sync();
  if (takes_scales) {
    scales = reinterpret_cast<char*>(w.scale[buffer]);
    if (worker.thread < num_scales(p)) scale = scale_word(scales, worker.thread);
  }
  const i32 num_rows = w.num_rows[buffer];
  for (i32 piece = 0; piece < R::kPieces; ++piece) {
    if (piece > 0) load(piece), take(piece);
    for (i32 r = 0; r < num_rows; ++r)
      each_vec(piece, [&](const Vec& vec, const char* at) {
        st_na_v4(p.out_x.as<char>() + static_cast<i64>(w.row[buffer][r]) * kPayloadVecs * 16 +
                     (at - from - kHeadBytes),
                 vec);
      });
  }
#pragma unroll 1
  for (i32 r = 0; r < num_rows; ++r) {
    const auto row = static_cast<u64>(w.row[buffer][r]);
    if constexpr (kScaled) {
      u32* to = p.out_scales.as<u32>() + w.scales[buffer][r];
      if (worker.thread < num_scales(p)) to[worker.thread * p.scale_place.word] = scale;
      store_scales(p, worker, w.scales[buffer][r], scales, worker.thread + RecvWorker::kThreads);
    }
    copy_extras(p, worker, row, from);
  }
  if (takes && is_opaque(p)) clear_opaque(p, worker, from);
  if constexpr (kReady) raise_rows(a, worker, buffer);
}

// Finds the own-node ranks that the slot of another node's source is for; the handle keeps them for
// combine. True if this rank is one. Looks at all slots, so that the kernel ends only after all
// parts have arrived.
__device__ inline bool slot_is_mine(const Receiver& a, u64 step, i32 chunk, const Item& item,
                                    i32 part) {
  if (MOE_P2P_MUTATED(kPartBefore)) part = max(part - 1, 0);
  if (kInParts && !wait_part(a.p.comm, Phase::kDispatch, step, item.source, part)) {
    a.s.lost = true;
    *a.handle.ranks_of(chunk, item.source, item.index) = 0;
    return false;
  }
  const u32* ids = values_at<u32>(slot_at(a, step, item), expert_ids_offset());
  u32 pairs[(kTopk + 1) / 2];  // all under way at once
#pragma unroll
  for (i32 i = 0; i < (kTopk + 1) / 2; ++i) pairs[i] = ids[i];
  u64 ranks = 0;
#pragma unroll
  for (i32 k = 0; k < kTopk; ++k) {
    const u32 e = pairs[k / 2] >> (k % 2 * 16) & 0xffff;
    if (e >= kExperts) continue;
    const i32 rank = owner_of(a.p.comm, static_cast<i32>(e)).rank;
    if (a.self.same_node(rank)) ranks |= u64{1} << (rank % kLocal);
  }
  *a.handle.ranks_of(chunk, item.source, item.index) = ranks;
  return ranks >> a.self.local & 1;
}

__device__ inline void recv_slots(const Receiver& a, const RecvWorker& worker, u64 step,
                                  i32 chunk) {
  RecvScratch& w = a.s.worker[worker.place];
  const i32* num_slots = a.s.num_slots[chunk % 2];
  i32 most = 0, buffer = 0;
  for (i32 source = 0; source < kWorld; ++source) most = max(most, num_slots[source]);
  if constexpr (kOthers == 0) {
#pragma unroll 1
    for (i32 i = worker.id; i < most * kWorld; i += worker.count) {
      const Item item = item_of(a.self, i);
      if (item.index >= num_slots[item.source]) continue;
      recv_slot(a, worker, step, chunk, item, buffer);
      buffer ^= 1;
    }
    return;
  }
  // Own-node slots are handled together with part 0 of remote slots. In batches: each thread looks
  // at the head of one slot, or the latency of NVLink would add up over the many slots for other
  // ranks of the node.
  const i32 each = slots_of_part(a.p.parts.slot_bytes);
  for (i32 part = 0; part * each < most; ++part) {
    const i32 begin = part * each * kWorld;
    const i32 end = (part == 0 ? most : min(most, (part + 1) * each)) * kWorld;
    for (i32 first = begin + worker.id; first < end; first += worker.count * RecvWorker::kThreads) {
      const i32 i = first + worker.thread * worker.count;
      const Item item = item_of(a.self, i);
      bool mine = i < end && item.index < num_slots[item.source];
      if (mine && a.self.same_node(item.source)) {
        mine = part == 0;
      } else if (mine) {
        mine = (!kInParts || item.index / each == part) && slot_is_mine(a, step, chunk, item, part);
      }
      const u32 bits = __ballot_sync(~0u, mine);
      if (worker.thread % 32 == 0) w.mine[worker.thread / 32] = bits;
      worker.sync();
      for (i32 warp = 0; warp < RecvWorker::kThreads / 32; ++warp)
        for (u32 left = w.mine[warp]; left != 0; left &= left - 1) {
          const i32 j = warp * 32 + __ffs(left) - 1;
          recv_slot(a, worker, step, chunk, item_of(a.self, first + j * worker.count), buffer);
          buffer ^= 1;
        }
      worker.sync();
    }
  }
}

// Once all workers have read a solo step, the last one announces it with the empty combine.
__device__ __noinline__ void acknowledge(const DeviceComm& comm, RecvShared& s,
                                         const RecvWorker& worker, u64 step) {
  RecvScratch& w = s.worker[worker.place];
  u32* received = state_words<u32>(comm, kWords.received);
  worker.sync();
  const u32 last = static_cast<u32>(worker.count - 1);
  if (worker.thread == 0)
    w.arrived[0] = atom_inc_acq_rel_gpu_u32(&received[slot_of(step)], last) ==
                   (MOE_P2P_MUTATED(kSoloReadByFirst) ? 0 : last);
  worker.sync();
  if (w.arrived[0])
    say_read(comm, Self(comm), step, worker.thread, RecvWorker::kThreads, EmptyHeader{});
  worker.sync();
}

// good: the kernel may receive. Returns false if the places of rows are lost, or the kernel may not
// receive.
__device__ inline bool begin_chunk(const Receiver& a, const RecvWorker& worker, bool good, u64 step,
                                   i32 chunk) {
  bool placed;
  if constexpr (kWarpPlaces) {
    placed = good && read_and_place(a, step);
  } else {
    placed = good && read_headers(a, step, chunk) && (chunk > 0 || place_rows(a, step));
    if constexpr (kReady)
      if (placed && chunk == 0 && a.reports) raise_counts(a);
  }
  if (!placed) {
    report_lost(a.p, a.reports);
    lose_rows(a.p, step);
    return false;
  }
  if constexpr (kWarpPlaces) return true;
  // Once a slot of a call is lost, later chunks poison the rows again: they wrote to these rows
  // too.
  if (chunk == 0 && threadIdx.x == 0) a.s.lost = false;
  // A second barrier behind the headers of later chunks: with the one in read_headers alone,
  // compute-sanitizer's racecheck takes what the last warps read of them for a race, in most runs.
  __syncthreads();
  if (chunk > 0) return true;
  Placement::clear_entries(a, worker);
  if (!kPlain && a.p.zero_padding) clear_padding(a.p, a.s, worker);
  return true;
}

__device__ inline void dispatch_recv(const DispatchParams& p, const Begun& begun, i32 block) {
  auto& s = shared<RecvShared>();
  const Receiver a{p, Self(p.comm), HandleArrays(p), block == 0, s};
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
#pragma unroll 1
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (!begin_chunk(a, worker, begun.good, step, chunk)) return;
    recv_slots(a, worker, step, chunk);
    if (a.s.lost) lose_rows(p, step);  // the thread that found it, and others as they get here
    // Writes of own-node ranks into this rank's memory at combine are ordered behind the reads
    // there in earlier steps (docs/gpu.md, "Rows that flag themselves").
    if (kSelfFlagged && a.reports)
#pragma unroll 1
      for (i32 l = static_cast<i32>(threadIdx.x); l < kLocal; l += kBlockThreads)
        wait_dispatch(p.comm, a.self, step, a.self.node * kLocal + l);
    if (is_solo(p)) acknowledge(p.comm, s, worker, step);
  }
}

}  // namespace moe_p2p::device
