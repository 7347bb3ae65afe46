// Dispatch, receiving half: slots straight into expert-major rows. Those of the own node lie in this
// rank's inbox and are taken one by one as their flags go up; those of other nodes lie in the gateways'
// landing regions and are read over NVLink once their source has arrived. Where a row goes follows from
// the counts in the headers and the positions in the slot.
#pragma once

#include "kernels/dispatch_send.cuh"

namespace moe_p2p::device {

struct RecvScratch {
  i32 row[2][kTopk];  // rows of the slot at hand that are ours, and of the one before
  i32 num_rows[2];
  bool arrived[2];
  u32 mine[RecvWorker::kThreads / 32];  // bit j: item j of the batch has rows of ours
};
struct RecvShared {
  i32 first_row[kMaxLocalExperts][kWorld];  // of each local expert and source
  i32 num_rows[kMaxLocalExperts];
  i32 start[kMaxLocalExperts];
  i32 num_slots[2][kWorld];  // of this chunk and the one before; -1 = did not arrive
  RecvScratch worker[RecvWorker::kCount];
};

struct Receiver {
  const DispatchParams& p;
  const Self self;
  const HandleArrays handle;
  const bool tells;  // one block writes what all find out
  RecvShared& s;
};

// Waits for the headers of a step from everybody.
__device__ inline void read_headers(const Receiver& a, u64 step, i32 chunk) {
  const DispatchParams& p = a.p;
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads) {
    i32 slots = -1;
    if (wait_dispatch(p.comm, a.self, step, source)) {
      const auto* header = reinterpret_cast<const RegionHeader*>(
          dispatch_region(p.comm, a.self, slot_of(step), source));
      slots = static_cast<i32>(header->num_tokens);
      if (header->flags != kWireFlags || header->slot_bytes != p.parts.slot_bytes ||
          slots > kChunk) {
        raise_fault(p.comm, kWrongHeader, Phase::kDispatch, source, step, p.parts.slot_bytes,
                    header->slot_bytes);
        slots = -1;
      }
    }
    a.s.num_slots[chunk % 2][source] = slots;
    if (a.tells) a.handle.slot_count(chunk, source) = max(slots, 0);
  }
  __syncwarp();
  __syncthreads();
}

// First rows of grouped experts: a prefix sum of their aligned numbers of rows, by one warp.
__device__ inline void place_groups(const Receiver& a) {
  const i32 lane = static_cast<i32>(threadIdx.x), num_experts = a.p.comm.num_local_experts;
  i32 before = 0;
  for (i32 first = 0; first < num_experts; first += 32) {
    const i32 e = first + lane;
    const auto alignment = static_cast<i32>(a.p.alignment);
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

// The rows of every (expert, source), from the counts of the whole call.
__device__ inline void place_rows(const Receiver& a, u64 step) {
  const DispatchParams& p = a.p;
  RecvShared& s = a.s;
  const i32 thread = static_cast<i32>(threadIdx.x), num_experts = p.comm.num_local_experts;
  for (i32 i = thread; i < num_experts * kWorld; i += kBlockThreads) {
    const i32 source = i / num_experts, e = i % num_experts;
    const char* region = dispatch_region(p.comm, a.self, slot_of(step), source);
    const auto* counts = reinterpret_cast<const i32*>(region + sizeof(RegionHeader));
    const i32 first = a.self.same_node(source) ? 0 : a.self.local * kMaxLocalExperts;
    s.first_row[e][source] = s.num_slots[0][source] < 0 ? 0 : counts[first + e];
  }
  __syncthreads();
  for (i32 e = thread; e < num_experts; e += kBlockThreads) {
    i32 at = 0;
    for (i32 source = 0; source < kWorld; ++source) {
      const i32 count = s.first_row[e][source];
      s.first_row[e][source] = at;
      at += count;
    }
    s.num_rows[e] = at;
    s.start[e] = static_cast<i32>(e * p.capacity);  // padded
  }
  __syncthreads();
  if (p.grouped) {
    if (thread < 32) place_groups(a);
    __syncthreads();
  }
  for (i32 i = thread; i < num_experts * kWorld; i += kBlockThreads)
    s.first_row[i / kWorld][i % kWorld] += s.start[i / kWorld];
  if (!a.tells) return;
  if (num_experts == 0 && thread == 0) reinterpret_cast<i32*>(p.offsets)[0] = 0;
  for (i32 e = thread; e < num_experts; e += kBlockThreads) {
    const i64 end = static_cast<i64>(s.start[e]) + s.num_rows[e];
    if (end > (p.grouped ? p.capacity : (e + 1) * p.capacity))
      raise_fault(p.comm, kCapacity, Phase::kDispatch, e, step, static_cast<u64>(p.capacity),
                  static_cast<u64>(p.grouped ? end : s.num_rows[e]));
    reinterpret_cast<i32*>(p.counts)[e] = s.num_rows[e];
    reinterpret_cast<i32*>(p.offsets)[e] = s.start[e];
    if (e + 1 == num_experts)
      reinterpret_cast<i32*>(p.offsets)[e + 1] = static_cast<i32>(
          p.grouped ? (end + p.alignment - 1) / p.alignment * p.alignment : (e + 1) * p.capacity);
  }
}

// Rows without a token, when asked for: weight 0, source -1, values 0.
__device__ inline void clear_padding(const Receiver& a, const RecvWorker& worker) {
  const DispatchParams& p = a.p;
  const i32 num_experts = p.comm.num_local_experts;
  for (i32 e = num_experts > 0 ? 0 : -1; e < num_experts; ++e) {  // -1: this rank owns none
    const i64 begin = e < 0 ? 0 : static_cast<i64>(a.s.start[e]) + a.s.num_rows[e];
    const i64 end = !p.grouped            ? (e + 1) * p.capacity
                    : e + 1 < num_experts ? a.s.start[e + 1]
                                          : p.capacity;
    for (i64 row = begin + worker.id; row < end; row += worker.count) {
      for (i32 at = worker.thread; at < kPayloadVecs; at += RecvWorker::kThreads)
        st_na_v4(reinterpret_cast<char*>(p.out_x) + (row * kPayloadVecs + at) * 16, Vec{});
      if (p.out_scales)
        for (i32 i = worker.thread; i < kScales; i += RecvWorker::kThreads)
          reinterpret_cast<float*>(p.out_scales)[row * kScales + i] = 0.0f;
      for (i32 x = 0; x < p.num_extras; ++x)
        for (u64 b = static_cast<u64>(worker.thread); b < p.parts.bytes[2 + x];
             b += RecvWorker::kThreads)
          reinterpret_cast<char*>(
              p.out_extras[x].data)[static_cast<u64>(row) * p.parts.bytes[2 + x] + b] = 0;
      if (worker.thread == 0) {
        reinterpret_cast<float*>(p.row_weights)[row] = 0.0f;
        if (p.source) reinterpret_cast<i64*>(p.source)[row] = -1;  // both words
      }
    }
  }
}

__device__ inline void copy_row(const RecvWorker& worker, char* to, const char* from, u64 bytes) {
  if (bytes % 4 == 0) return copy_words(worker, to, from, bytes);
  for (u64 b = static_cast<u64>(worker.thread); b < bytes; b += RecvWorker::kThreads)
    to[b] = from[b];
}

// A slot of a step: `index` of those of `source`.
struct Item {
  i32 source, index;
};
// Items in an order that takes the sources in turns, the own rank first.
__device__ __forceinline__ Item item_of(const Self& self, i32 i) {
  return {(i + self.rank) % kWorld, i / kWorld};
}

// Which rows of this rank the slot at `from` fills, into w.row[buffer]; the first warp calls it.
__device__ inline void find_rows(const Receiver& a, i32 lane, i32 chunk, const Item& item,
                                 const char* from, i32 buffer, RecvScratch& w) {
  const DispatchParams& p = a.p;
  i64 row = -1;
  if (lane < kTopk && w.arrived[buffer]) {
    const u16 e = reinterpret_cast<const u16*>(from + expert_ids_offset())[lane];
    const Owner owner = e < kExperts ? owner_of(p.comm, e) : Owner{-1, 0};
    if (owner.rank == p.comm.rank) {
      row = a.s.first_row[owner.local][item.source] +
            reinterpret_cast<const i32*>(from + positions_offset(kTopk))[lane];
      if (row >= (p.grouped ? p.capacity : (owner.local + 1) * p.capacity))
        row = -1;  // told in place_rows()
    }
  }
  const u32 have = __ballot_sync(~0u, row >= 0);
  if (row >= 0) w.row[buffer][__popc(have & ((1u << lane) - 1))] = static_cast<i32>(row);
  if (lane == 0) w.num_rows[buffer] = __popc(have);
  if (lane >= kTopk) return;
  a.handle.rows_of(chunk, item.source, item.index)[lane] = static_cast<i32>(row);
  if (row < 0) return;
  reinterpret_cast<float*>(p.row_weights)[row] =
      reinterpret_cast<const float*>(from + weights_offset(kTopk))[lane];
  if (p.source) {
    reinterpret_cast<i32*>(p.source)[2 * row] = item.source;
    reinterpret_cast<i32*>(p.source)[2 * row + 1] = reinterpret_cast<const i32*>(from)[1];
  }
}

__device__ inline char* slot_at(const Receiver& a, u64 step, const Item& item) {
  return dispatch_region(a.p.comm, a.self, slot_of(step), item.source) +
         (a.self.same_node(item.source) ? kInboxSlots : kOutboxSlots) +
         static_cast<u64>(item.index) * a.p.parts.slot_bytes;
}

__device__ inline void recv_slot(const Receiver& a, const RecvWorker& worker, u64 step, i32 chunk,
                                 const Item& item, i32 buffer) {
  const DispatchParams& p = a.p;
  RecvScratch& w = a.s.worker[worker.place];
  const char* from = slot_at(a, step, item);
  if (worker.thread == 0)
    w.arrived[buffer] =
        !a.self.same_node(item.source) ||
        wait_word(p.comm,
                  inbox_flags_at(p.comm.data[a.self.local], slot_of(step), item.source % kLocal) +
                      item.index,
                  static_cast<u32>(step + 1), {Phase::kDispatch, item.source, step});
  worker.sync();
  using R = Rounds<RecvWorker>;
  Vec payload[R::kVecs];  // under way while the rows are found
  const auto load = [&](i32 piece) {
#pragma unroll
    for (i32 i = 0; i < R::kVecs; ++i)
      if (const i32 at = R::at(worker, piece, i); at < kPayloadVecs)
        payload[i] = ld_na_v4(from + kHeadBytes + at * 16);
  };
  load(0);
  // So is a word of the scales for each thread, where that is all of them.
  constexpr bool kScaleEarly = kScales <= RecvWorker::kThreads;
  const bool scaled = kScaleEarly && p.parts.bytes[1] > 0 && worker.thread < kScales;
  float scale = 0.0f;
  if (scaled) scale = reinterpret_cast<const float*>(from + p.parts.offset[1])[worker.thread];
  if (worker.thread < 32) find_rows(a, worker.thread, chunk, item, from, buffer, w);
  worker.sync();
  const i32 num_rows = w.num_rows[buffer];
  for (i32 piece = 0; piece < R::kPieces; ++piece) {
    if (piece > 0) load(piece);
    for (i32 r = 0; r < num_rows; ++r)
#pragma unroll
      for (i32 i = 0; i < R::kVecs; ++i)
        if (const i32 at = R::at(worker, piece, i); at < kPayloadVecs)
          st_na_v4(reinterpret_cast<char*>(p.out_x) +
                       (static_cast<i64>(w.row[buffer][r]) * kPayloadVecs + at) * 16,
                   payload[i]);
  }
  for (i32 r = 0; r < num_rows; ++r) {
    const auto row = static_cast<u64>(w.row[buffer][r]);
    if (scaled) reinterpret_cast<float*>(p.out_scales)[row * kScales + worker.thread] = scale;
    if (!kScaleEarly && p.parts.bytes[1])
      copy_words(worker, reinterpret_cast<char*>(p.out_scales) + row * p.parts.bytes[1],
                 from + p.parts.offset[1], p.parts.bytes[1]);
    for (i32 e = 0; e < p.num_extras; ++e)
      copy_row(worker, reinterpret_cast<char*>(p.out_extras[e].data) + row * p.parts.bytes[2 + e],
               from + p.parts.offset[2 + e], p.parts.bytes[2 + e]);
  }
}

// Which own-node ranks the slot of another node's source is for; the handle keeps it for combine.
__device__ inline bool slot_is_mine(const Receiver& a, u64 step, i32 chunk, const Item& item) {
  const auto* ids = reinterpret_cast<const u32*>(slot_at(a, step, item) + expert_ids_offset());
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
    for (i32 i = worker.id; i < most * kWorld; i += worker.count) {
      const Item item = item_of(a.self, i);
      if (item.index >= num_slots[item.source]) continue;
      recv_slot(a, worker, step, chunk, item, buffer);
      buffer ^= 1;
    }
    return;
  }
  // In batches: each thread looks at the head of one slot, or the latency of NVLink adds up over the
  // many that are for other ranks of the node.
  for (i32 first = worker.id; first < most * kWorld; first += worker.count * RecvWorker::kThreads) {
    const i32 i = first + worker.thread * worker.count;
    const Item item = item_of(a.self, i);
    bool mine = i < most * kWorld && item.index < num_slots[item.source];
    if (mine && !a.self.same_node(item.source)) mine = slot_is_mine(a, step, chunk, item);
    const u32 bits = __ballot_sync(~0u, mine);
    if (worker.thread % 32 == 0) w.mine[worker.thread / 32] = bits;
    worker.sync();
    for (i32 j = 0; j < RecvWorker::kThreads; ++j) {
      if (j % 32 == 0 && w.mine[j / 32] == 0) j += 31;
      if (!(w.mine[j / 32] >> (j % 32) & 1)) continue;
      recv_slot(a, worker, step, chunk, item_of(a.self, first + j * worker.count), buffer);
      buffer ^= 1;
    }
    worker.sync();
  }
}

// Once all workers have read a solo step, the last one says so with its empty combine.
__device__ inline void acknowledge(const Receiver& a, const RecvWorker& worker, u64 step) {
  RecvScratch& w = a.s.worker[worker.place];
  auto* received = reinterpret_cast<u32*>(a.p.comm.state + kWords.received);
  worker.sync();
  const u32 last = static_cast<u32>(worker.count - 1);
  if (worker.thread == 0)
    w.arrived[0] = atom_inc_acq_rel_gpu_u32(&received[slot_of(step)], last) == last;
  worker.sync();
  if (w.arrived[0])
    say_read(a.p.comm, a.self, step, worker.thread, RecvWorker::kThreads, EmptyHeader{});
  worker.sync();
}

__device__ inline void dispatch_recv(const DispatchParams& p, u64 first_step, i32 block) {
  const Receiver a{p, Self(p.comm), HandleArrays(p.handle, p.num_chunks), block == 0,
                   shared<RecvShared>()};
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = first_step + static_cast<u64>(chunk);
    read_headers(a, step, chunk);
    if (chunk == 0) {
      place_rows(a, step);
      __syncthreads();
      if (p.zero_padding) clear_padding(a, worker);
    }
    recv_slots(a, worker, step, chunk);
    if (p.solo) acknowledge(a, worker, step);
    __syncthreads();  // the next chunk's headers take the place of this one's
  }
}

}  // namespace moe_p2p::device
