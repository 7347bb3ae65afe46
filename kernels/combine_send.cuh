// Combine, sending half: adds up this rank's experts for each received slot. For a token of the own node
// the partial row goes to its source. For one of another node it goes to the gateway; whichever rank of
// the node hands in the last partial of a row adds them, and with the last row rings. Sums are in fp32
// in a fixed order (docs/protocol.md, section 10), so the result does not depend on arrival.
#pragma once

#include "kernels/device/quantize.cuh"
#include "kernels/device/self_flag.cuh"
#include "kernels/device/steps.cuh"
#include "kernels/device/worker.cuh"
#include "kernels/late_weights.cuh"

namespace moe_p2p::device {

inline constexpr DType kYType = static_cast<DType>(MOE_P2P_Y_DTYPE);
inline constexpr DType kOutType = static_cast<DType>(MOE_P2P_OUT_DTYPE);
inline constexpr u64 kOutBytes = kHidden * item_bytes(kOutType);
inline constexpr u64 kYBytes = kHidden * item_bytes(kYType);
// A thread works on kValues neighbouring values: one Vec of the narrower type.
inline constexpr i32 kValues = Values<kYType>::kCount > Values<kOutType>::kCount
                                   ? Values<kYType>::kCount
                                   : Values<kOutType>::kCount;
inline constexpr i32 kGroups = kHidden / kValues;
static_assert(kHidden % kValues == 0);

// Who writes a row: nobody while the kernel runs, peers before its flag, or peers right now.
enum class Written { kBefore, kByPeers, kNow };

// kValues values of one row.
template <DType kType, Written kWritten>
struct Piece {
  static constexpr i32 kVecs = kValues / Values<kType>::kCount;
  Vec vec[kVecs];

  __device__ __forceinline__ static const char* at(const char* row, i32 group, i32 i) {
    return row + (group * kVecs + i) * 16;
  }
  __device__ __forceinline__ void load(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      vec[i] = kWritten == Written::kBefore    ? ld_nc_v4(at(row, group, i))
               : kWritten == Written::kByPeers ? ld_na_v4(at(row, group, i))
                                               : ld_relaxed_sys_v4(at(row, group, i));
  }
  // Of a self-flagged row: reads again what has not come, if any.
  __device__ __forceinline__ bool again(const char* row, i32 group) {
    bool any = false;
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      if (!has_come(vec[i])) vec[i] = ld_relaxed_sys_v4(at(row, group, i)), any = true;
    return any;
  }
  __device__ __forceinline__ void take(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = take_vec(const_cast<char*>(at(row, group, i)), vec[i]);
  }
  __device__ __forceinline__ void load_shared(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = reinterpret_cast<const Vec*>(row)[group * kVecs + i];
  }
  // Adding zeros changes no sum, because no sum is ever -0.0.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = Vec{};
  }
  __device__ __forceinline__ void add_to(float* acc, float weight, bool weighted) const {
    constexpr i32 kPerVec = Values<kType>::kCount;
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) {
      float f[kPerVec];
      Values<kType>::load(vec[i], f);
#pragma unroll
      for (i32 j = 0; j < kPerVec; ++j)
        acc[i * kPerVec + j] =
            __fadd_rn(acc[i * kPerVec + j], weighted ? __fmul_rn(weight, f[j]) : f[j]);
    }
  }
};

// flag: into a self-flagged row.
__device__ __forceinline__ void store_values(char* row, i32 group, const float* acc, bool flag) {
  constexpr i32 kPerVec = Values<kOutType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i) {
    char* to = row + (group * (kValues / kPerVec) + i) * 16;
    const Vec v = Values<kOutType>::store(acc + i * kPerVec);
    if (kSelfFlagged && flag) {
      st_flagged_v4(to, v);
    } else {
      st_na_v4(to, v);
    }
  }
}

__device__ __forceinline__ void store_values_shared(char* row, i32 group, const float* acc) {
  constexpr i32 kPerVec = Values<kOutType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i)
    reinterpret_cast<Vec*>(row)[group * (kValues / kPerVec) + i] =
        Values<kOutType>::store(acc + i * kPerVec);
}

// Parts of a row, one group for each thread of a worker, which several workers share where a step has few
// rows.
inline constexpr bool kFewRows = kSelfFlagged && kOthers == 0 && kChunk <= 16;
template <typename W>
inline constexpr i32 kRowParts = kFewRows ? (kGroups + W::kThreads - 1) / W::kThreads : 1;
template <typename W>
__device__ __forceinline__ Part share_of_row(const W& worker) {
  if constexpr (kRowParts<W> == 1) return {0, 1};
  const i32 count = min(kRowParts<W>, worker.count);
  return {worker.id % count, count};
}

struct AllHaveCome {
  template <typename Each>
  __device__ void operator()(const Each&) const {}
};

// to = sum of `num_rows` rows in their order, times weight_of(i) when `weighted`. Rows are loaded
// kRowsAtOnce at a time. settle(each) then waits for what is still to come of them: each(f) calls
// f(piece, i, group) for every piece.
template <DType kType, Written kWritten, i32 kRowsAtOnce, typename W, typename RowAt,
          typename WeightOf, typename Settle = AllHaveCome>
__device__ __forceinline__ void sum_rows(const W& worker, i32 part, char* to, bool flag,
                                         i32 num_rows, const RowAt& row_at, bool weighted,
                                         const WeightOf& weight_of, const Settle& settle = {}) {
  constexpr i32 kStride = W::kThreads * kRowParts<W>;
  // Groups of a thread that are under way together. More hide more latency and cost registers.
  constexpr i32 kGroupsAtOnce = kGroups <= kStride || kWritten == Written::kNow ? 1 : 2;
  for (i32 first = part * W::kThreads + worker.thread; first < kGroups;
       first += kStride * kGroupsAtOnce) {
    float acc[kGroupsAtOnce][kValues] = {};
    for (i32 r = 0; r < num_rows; r += kRowsAtOnce) {
      Piece<kType, kWritten> piece[kRowsAtOnce][kGroupsAtOnce];
      const auto each = [&](const auto& f) {
#pragma unroll
        for (i32 j = 0; j < kRowsAtOnce; ++j)
#pragma unroll
          for (i32 g = 0; g < kGroupsAtOnce; ++g)
            if (const i32 group = first + g * kStride; r + j < num_rows && group < kGroups)
              f(piece[j][g], r + j, group);
      };
#pragma unroll
      for (i32 j = 0; j < kRowsAtOnce; ++j)
#pragma unroll
        for (i32 g = 0; g < kGroupsAtOnce; ++g) piece[j][g].clear();
      each([&](auto& piece, i32 i, i32 group) { piece.load(row_at(i), group); });
      settle(each);
#pragma unroll
      for (i32 j = 0; j < kRowsAtOnce; ++j)
        if (r + j < num_rows)
#pragma unroll
          for (i32 g = 0; g < kGroupsAtOnce; ++g)
            piece[j][g].add_to(acc[g], weighted ? weight_of(r + j) : 1.0f, weighted);
    }
#pragma unroll
    for (i32 g = 0; g < kGroupsAtOnce; ++g)
      if (const i32 group = first + g * kStride; group < kGroups)
        store_values(to, group, acc[g], flag);
  }
}

// Items are looked up in batches, kLanes threads for each: one latency for all of them.
inline constexpr i32 kLanes = kTopk <= 1    ? 1
                              : kTopk <= 2  ? 2
                              : kTopk <= 4  ? 4
                              : kTopk <= 8  ? 8
                              : kTopk <= 16 ? 16
                                            : 32;
inline constexpr i32 kBatch = SendWorker::kThreads / kLanes;

template <i32 kItems>
struct Rows {
  i32 row[kItems][kLanes];  // rows of y of one slot, k ascending, one after the other
  float weight[kItems][kLanes];
  i32 num_rows[kItems];
  u64 ranks[kOthers > 0 ? kItems
                        : 1];  // own-node ranks that hold a partial, of slots of other nodes
};
struct CombineScratch : Rows<kBatch> {
  bool last;
};
struct CombineSendShared {
  CombineScratch worker[SendWorker::kCount];
};

__device__ __forceinline__ CombineScratch& scratch_of(const SendWorker& worker) {
  return shared<CombineSendShared>().worker[worker.place];
}

struct Adder {
  const CombineParams& p;
  const Self self;
  const HandleArrays handle;
  const bool valid;  // the handle is one

  // Slots of a chunk in the order of item(); those behind a source's last are left out.
  __device__ i32 num_items(i32 chunk) const {
    i32 most = 0;
    for (i32 source = 0; source < kWorld; ++source)
      most = max(most, handle.slot_count(chunk, source));
    return most * kWorld;
  }
  __device__ Item item(i32 num_items, i32 i) const {
    return far_item_first(self, i, num_items / kWorld);
  }
  __device__ bool weighted() const { return p.row_weights != 0 || p.topk_weights != 0; }
  __device__ CombineHeader header_of(i32 chunk, i32 source) const {
    return {static_cast<u32>(handle.slot_count(chunk, source)),
            static_cast<u32>(kOutType) << kDTypeShift | (p.with_scalars ? kScalars : 0u), p.stride};
  }
};

// The weight of row `row` of y, which is the k-th expert of a slot.
__device__ __forceinline__ float weight_of_row(const Adder& a, u64 step, i32 source, i32 index,
                                               i32 k, i32 row) {
  if (a.p.topk_weights) return slot_weights(a.p.comm, a.self, slot_of(step), source, index)[k];
  return a.p.row_weights ? reinterpret_cast<const float*>(a.p.row_weights)[row] : 1.0f;
}

// The rows and weights of items i, i + count, ...: of each slot those of this rank. All that lies in
// the handle is asked for at once, wanted or not.
template <typename W, i32 kItems>
__device__ inline void look_up(const Adder& a, const W& worker, u64 step, i32 chunk, i32 num_items,
                               i32 i, Rows<kItems>& w) {
  static_assert(kItems == W::kThreads / kLanes);
  const i32 lane = worker.thread % kLanes, place = worker.thread / kLanes;
  i += place * worker.count;
  const auto [source, index] = a.item(num_items, i);
  const bool inside = index < kChunk;
  const i32 count = a.handle.slot_count(chunk, source);
  const i32 found = inside && lane < kTopk ? a.handle.rows_of(chunk, source, index)[lane] : -1;
  const u64 ranks = kOthers > 0 && inside ? *a.handle.ranks_of(chunk, source, index) : 0;
  bool mine = a.valid && inside && index < count;
  // Its weights may not have come.
  if constexpr (kMasks) mine = mine && !is_masked(a.p.comm, source);
  if (kOthers > 0 && mine && !a.self.same_node(source)) {
    if (lane == 0) w.ranks[place] = ranks;
    mine = ranks >> a.self.local & 1;
  }
  const i32 row = mine ? found : -1;
  const u32 have = __ballot_sync(~0u, row >= 0);
  const u32 ours = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  const u32 bits = have >> (worker.thread % 32 / kLanes * kLanes) & ours;
  if (row >= 0) {
    const i32 at = __popc(bits & ((1u << lane) - 1));
    w.row[place][at] = row;
    w.weight[place][at] = weight_of_row(a, step, source, index, lane, row);
  }
  if (lane == 0) w.num_rows[place] = mine ? __popc(bits) : -1;
}

// Scalar k behind the sum at `to`, of a slot whose rows of y are `rows` and begin with `first`.
__device__ __forceinline__ void store_scalar(const Adder& a, char* to, bool flag, const i32* rows,
                                             i32 first, i32 k) {
  const i64 at = a.p.scalars_by_rank ? static_cast<i64>(first) * kTopk + k : rows[k];
  const float scalar = at >= 0 ? reinterpret_cast<const float*>(a.p.row_scalars)[at] : 0.0f;
  auto* place = reinterpret_cast<float*>(to + kOutBytes) + k;
  if (kSelfFlagged && flag) {
    st_flagged_u32(place, __float_as_uint(scalar));
  } else {
    *place = scalar;
  }
}

// This rank's rows of one slot, added up at `to`.
__device__ inline void store_partial(const Adder& a, const SendWorker& worker, i32 part, i32 place,
                                     i32 chunk, i32 source, i32 index, char* to, bool flag) {
  const CombineScratch& w = scratch_of(worker);
  sum_rows < kYType, Written::kBefore,
      kTopk<2 ? 1 : 2>(
          worker, part, to, flag, w.num_rows[place],
          [&](i32 r) {
            return reinterpret_cast<const char*>(a.p.y) +
                   static_cast<u64>(w.row[place][r]) * kYBytes;
          },
          a.weighted(), [&](i32 r) { return w.weight[place][r]; });
  if (a.p.with_scalars && part == 0 && worker.thread < kTopk)
    store_scalar(a, to, flag, a.handle.rows_of(chunk, source, index), w.row[place][0],
                 worker.thread);
}

// The node's partials of one row, added up into the gateway's combine_outbox.
__device__ inline void add_partials(const Adder& a, const SendWorker& worker, u64 ranks, u64 data,
                                    i32 slot, i32 other, u64 offset) {
  const auto nth = [&](i32 n) {
    u64 left = ranks;
    for (; n > 0; --n) left &= left - 1;
    return gather_at(data, slot, other, __ffsll(static_cast<long long>(left)) - 1) + offset;
  };
  char* to = combine_outbox_at(data, slot, other) + offset;
  const i32 num_ranks = __popcll(ranks);
  sum_rows<kOutType, Written::kByPeers, 2>(worker, 0, to, false, num_ranks, nth, false,
                                           [](i32) { return 1.0f; });
  if (a.p.with_scalars && worker.thread < kTopk) {
    float sum = 0.0f;
    for (i32 r = 0; r < num_ranks; ++r)
      sum = __fadd_rn(sum, reinterpret_cast<const float*>(nth(r) + kOutBytes)[worker.thread]);
    reinterpret_cast<float*>(to + kOutBytes)[worker.thread] = sum;
  }
}

// A token of another node: where a single rank of this node holds rows for it, its partial is the sum.
__device__ inline void send_to_gateway(const Adder& a, const SendWorker& worker, u64 step,
                                       i32 chunk, i32 place, i32 source, i32 index) {
  CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step), gateway = source % kLocal;
  const i32 other = other_index(source / kLocal, a.self.node);
  const u64 data = a.p.comm.data[gateway], ranks = w.ranks[place];
  const u64 offset = combine_slots_offset() + static_cast<u64>(index) * a.p.stride;
  const bool alone = (ranks & (ranks - 1)) == 0;
  store_partial(
      a, worker, 0, place, chunk, source, index,
      (alone ? combine_outbox_at(data, slot, other) : gather_at(data, slot, other, a.self.local)) +
          offset,
      false);
  worker.sync();
  if (!alone) {
    const auto last = static_cast<u32>(__popcll(ranks) - 1);
    u32* count = gather_words_at(data, slot, other) + kLine / 4 + index;
    // Release: this partial; acquire, for the last one: all others.
    if (worker.thread == 0) w.last = atom_inc_acq_rel_sys_u32(count, last) == last;
    worker.sync();
    if (!w.last) return;
    add_partials(a, worker, ranks, data, slot, other, offset);
    worker.sync();
  }
  if (worker.thread == 0)
    hand_in(a.p.comm, a.self, step, gateway, other, a.header_of(chunk, source),
            part_of_slot(a.p.stride, index));
}

__device__ inline void combine_chunk(const Adder& a, const SendWorker& worker, const Part& share,
                                     u64 step, i32 chunk) {
  const CombineParams& p = a.p;
  const CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step);
  const i32 num_items = a.num_items(chunk);
  for (i32 first = worker.id; first < num_items; first += worker.count * kBatch) {
    // combine_send() did the first, unless weights had to be here before.
    if (first != worker.id || p.topk_weights)
      look_up(a, worker, step, chunk, num_items, first, scratch_of(worker));
    worker.sync();
    for (i32 place = 0, i = first; place < kBatch && i < num_items; ++place, i += worker.count) {
      if (w.num_rows[place] < 0) continue;
      const auto [source, index] = a.item(num_items, i);
      if (!a.self.same_node(source)) {
        send_to_gateway(a, worker, step, chunk, place, source, index);
        continue;
      }
      const u64 data = p.comm.data[source % kLocal];
      char* to = partial_at(data, slot, a.self.local) + combine_slots_offset() +
                 static_cast<u64>(index) * p.stride;
      for (i32 part = share.index; part < kRowParts<SendWorker>; part += share.count)
        store_partial(a, worker, part, place, chunk, source, index, to, true);
      if constexpr (kSelfFlagged) continue;
      worker.sync();
      // The row's flag, after every thread's stores; pairs with the wait in combine_recv() there.
      if (worker.thread == 0)
        st_release_sys_u32(partial_flags_at(data, slot, a.self.local) + index,
                           static_cast<u32>(step + 1));
    }
    worker.sync();  // the next batch takes the place of this one
  }
}

// e + 1: a combine of several chunks has read the sums of step e.
__device__ inline u64* read_word(const DeviceComm& comm, u64 step) {
  return reinterpret_cast<u64*>(comm.state + kWords.read) + slot_of(step);
}

__device__ inline bool wait_sums_read(const DeviceComm& comm, u64 step) {
  return wait_word(comm, read_word(comm, step), static_cast<u32>(step + 1),
                   {Phase::kCombine, comm.rank, step});
}

// A combine that opens steps of its own begins each with an empty dispatch, and with everybody's.
// False: somebody's did not come. The first kSteps steps of a call use slots of earlier kernels.
__device__ inline bool open_solo(const Adder& a, u64 step, i32 chunk, i32 block) {
  const DeviceComm& comm = a.p.comm;
  if (block == 0) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    bool is_free = thread >= 32 || wait_free(comm, a.self, step, thread);
    if (chunk >= kSteps && thread == 32)
      is_free = wait_sums_read(comm, step - static_cast<u64>(kSteps));
    if (!__syncthreads_and(is_free)) return false;
    send_empty_dispatch(comm, a.self, step);
  }
  bool came = true;
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads) {
    if (!wait_dispatch(comm, a.self, step, source)) {
      came = came && is_masked(comm, source);
      continue;
    }
    const auto* header =
        reinterpret_cast<const RegionHeader*>(dispatch_region(comm, a.self, slot_of(step), source));
    // By the block that will say that this was read: then the header may be another one.
    if (block != 0 || header->flags == kEmpty) continue;
    raise_fault(comm, kWrongHeader, Phase::kDispatch, source, step, 0, header->slot_bytes);
    came = false;
  }
  return __syncthreads_and(came);
}

// Release: whatever was dispatched has to be here before its source may send again.
__device__ inline void send_release(const CombineParams& p, u64 first_step) {
  const Self self(p.comm);
  for (u64 step = first_step; step < first_step + static_cast<u64>(p.num_chunks); ++step) {
    bool came = true;
    for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads)
      came = (wait_dispatch(p.comm, self, step, source) || is_masked(p.comm, source)) && came;
    if (!__syncthreads_and(came)) return;
    say_read(p.comm, self, step, static_cast<i32>(threadIdx.x), kBlockThreads, EmptyHeader{});
  }
}

// What comes before the sums of a chunk, by the whole block. False: somebody did not come.
__device__ inline bool open_chunk(const Adder& a, u64 step, i32 chunk, i32 block) {
  if (!a.valid || (a.p.solo && !open_solo(a, step, chunk, block))) return false;
  if (a.p.topk_weights && !exchange_weights(a.p, step, chunk, block)) return false;
  // This rank has read all of the step's dispatch, tokens or not: whoever sent may use the slot
  // again (protocol.md, section 9).
  if (block == 0)
    say_read(a.p.comm, a.self, step, static_cast<i32>(threadIdx.x), kBlockThreads,
             [&](i32 source) { return a.header_of(chunk, source); });
  return true;
}

__device__ inline void combine_send(const CombineParams& p, bool valid, u64 first_step, i32 block) {
  const Adder a{p, Self(p.comm), HandleArrays(p.handle, p.num_chunks), valid};
  const SendWorker own = SendWorker::of(block, p.grid.num_send_blocks);
  const Part share = share_of_row(own);
  const SendWorker worker = share.team(own);
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = first_step + static_cast<u64>(chunk);
    if (!p.topk_weights)
      look_up(a, worker, step, chunk, a.num_items(chunk), worker.id, scratch_of(worker));
    if (!open_chunk(a, step, chunk, block)) return;
    combine_chunk(a, worker, share, step, chunk);
    worker.sync();  // the next chunk's first batch takes the place of this one's last
  }
}

}  // namespace moe_p2p::device
