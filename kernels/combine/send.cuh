// Combine, sending half: adds up this rank's experts for each received slot. For a token of the own
// node the partial row goes to its source. For a token of another node it goes to the gateway,
// which adds up the partials of its node and rings with the last row of a part. Sums are in fp32 in
// a fixed order (docs/protocol.md, section 10), so the order of arrival does not matter.
#pragma once

#include "kernels/combine/int10.cuh"
#include "kernels/combine/sums_read.cuh"
#include "kernels/combine/topk_order.cuh"
#include "kernels/combine/weights.cuh"
#include "kernels/device/lost.cuh"
#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

inline constexpr i32 kBatch = SendWorker::kThreads / kLanes;
using CombineScratch = Rows<kBatch>;
// Whether late weights are waited for while rows of y travel: that takes registers, and each thread
// a part of each row.
inline constexpr bool kWeightsWhileRowsTravel = kTaggedWeights && !kReady &&
                                                kGroups % SendWorker::kThreads == 0 &&
                                                kBlockThreads * MOE_P2P_BLOCKS_PER_SM <= 512;
// Items of a worker that it looks at again and again until their rows of y are written: whole
// batches, so that 512 or more are.
inline constexpr i32 kReadyBatches = kBatch >= 512 ? 1 : 512 / kBatch;
static_assert(!kReady || !kMasks, "a counter has no rank that could be masked");
struct Unready {
  i32 row[kBatch];  // of each item of a batch one that is not written, or -1
  i32 lasts;
};
struct CombineSendShared {
  CombineScratch worker[SendWorker::kCount];
  Unready unready[kReady ? SendWorker::kCount : 1];
};

__device__ __forceinline__ CombineScratch& scratch_of(const SendWorker& worker) {
  return shared<CombineSendShared>().worker[worker.place];
}

struct Adder {
  const CombineParams& p;
  const Self self;
  const HandleArrays handle;

  // Slots of a chunk in the order of item(); items behind a source's last slot are left out.
  __device__ i32 num_items(i32 chunk) const {
    i32 most = 0;
    for (i32 source = 0; source < kWorld; ++source)
      most = max(most, handle.slot_count(chunk, source));
    return most * kWorld;
  }
  __device__ Item item(i32 num_items, i32 i) const {
    return sum_item_of(self, i, num_items / kWorld);
  }
  __device__ bool weighted() const { return p.row_weights || p.topk_weights; }
  __device__ CombineHeader header_of(i32 chunk, i32 source) const {
    const auto count = static_cast<u32>(handle.slot_count(chunk, source));
    if (kFarPacked != kNearPacked && !self.same_node(source))
      return {count, combine_flags(far_type(kOutType, kPartials), device::with_scalars(p)),
              far_stride(p)};
    return {count, combine_flags(near_type(kOutType, kPartials), device::with_scalars(p)),
            p.stride};
  }
};

// Returns the weight of row `row` of y, which is the k-th expert of a slot.
__device__ __forceinline__ float weight_of_row(const Adder& a, u64 step, i32 source, i32 index,
                                               i32 k, i32 row) {
  if constexpr (kTaggedWeights)
    if (a.p.topk_weights)  // or else LateWeight takes it
      return kWeightsWhileRowsTravel ? 0.0f : late_weight(a.p.comm, step, source, index, k);
  if (a.p.topk_weights) return slot_weights(a.p.comm, a.self, slot_of(step), source, index)[k];
  return a.p.row_weights ? a.p.row_weights[row] : 1.0f;
}

struct Trusts {
  __device__ bool operator()() const { return true; }
};

// The bits of a vote that are of the kLanes threads of this thread's item.
template <typename W>
__device__ __forceinline__ u32 lanes_of(const W& worker, u32 votes) {
  const u32 ours = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  return votes >> (worker.thread % 32 / kLanes * kLanes) & ours;
}

// Finds the rows and weights of items i, i + count, ...: of each slot the rows of this rank. All
// words of the handle are asked for at once, needed or not. If the handle is not trusted, nothing
// is found.
template <typename W, i32 kItems, typename IsTrusted = Trusts>
__device__ inline LateWeight look_up(const Adder& a, const W& worker, u64 step, i32 chunk,
                                     i32 num_items, i32 i, Rows<kItems>& w,
                                     const IsTrusted& is_trusted = {}) {
  static_assert(kItems == W::kThreads / kLanes);
  const i32 lane = worker.thread % kLanes, place = worker.thread / kLanes;
  i += place * worker.count;
  const auto [source, index] = a.item(num_items, i);
  const bool inside = index < a.p.num_slots;
  const i32 count = a.handle.slot_count(chunk, source);
  const i32 found = inside && lane < kTopk ? a.handle.rows_of(chunk, source, index)[lane] : -1;
  const u64 ranks = kOthers > 0 && inside ? *a.handle.ranks_of(chunk, source, index) : 0;
  bool mine = is_trusted() && inside && index < count;
  // The source's weights may not have arrived.
  if constexpr (kMasks) mine = mine && !is_masked(a.p.comm, source);
  i32 none = -1;
  if (kOthers > 0 && mine && !a.self.same_node(source)) {
    if (lane == 0) w.ranks[place] = ranks;
    mine = ranks >> a.self.local & 1;
    if (source % kLocal == a.self.local) none = 0;  // the gateway adds up what others hold
  }
  LateWeight late;
  const i32 row = mine ? found : -1;
  const u32 bits = lanes_of(worker, __ballot_sync(~0u, row >= 0));
  if (row >= 0) {
    const i32 at = __popc(bits & ((1u << lane) - 1));
    w.row[place][at] = row;
    w.weight[place][at] = weight_of_row(a, step, source, index, lane, row);
    if (kWeightsWhileRowsTravel && a.p.topk_weights)
      late = {&w.weight[place][at], source, index, lane};
  }
  if (lane == 0) w.num_rows[place] = mine ? __popc(bits) : none;
  return late;
}

// Stores scalar k behind the sum at `to`, of a slot whose rows of y are `rows` and begin with
// `first`.
template <bool kPacks = kNearPacked>
__device__ __forceinline__ void store_scalar(const Adder& a, char* to, bool flag, const i32* rows,
                                             i32 first, i32 k) {
  const i64 at = a.p.topk_scalars ? static_cast<i64>(first) * kTopk + k : rows[k];
  const float scalar = at >= 0 ? a.p.row_scalars[at] : 0.0f;
  auto* place = reinterpret_cast<float*>(to + (kPacks ? kPackedBytes : scalars_offset(a.p))) + k;
  if (kSelfFlagged && flag) {
    st_flagged_u32(place, __float_as_uint(scalar));
  } else {
    *place = scalar;
  }
}

// Adds up this rank's rows of one slot at `to`. settle(): called while its rows travel.
template <bool kPacks = kNearPacked, typename Settle = DoNothing>
__device__ inline void store_partial(const Adder& a, const SendWorker& worker, i32 part, i32 place,
                                     i32 chunk, i32 source, i32 index, char* to, bool flag,
                                     const Settle& settle = {}) {
  const CombineScratch& w = scratch_of(worker);
  // Most tokens' rows are loaded for the latency of one, where a thread has the registers.
  constexpr i32 kMost = kGroups <= SendWorker::kThreads * kRowParts<SendWorker> ? 4 : 2;
  constexpr Written kWritten = kReady ? Written::kByPeers : Written::kBefore;
  constexpr i32 kRowsAtOnce = kTopk < kMost ? kTopk : kMost;
  const auto row_at = [&](i32 r) {
    return a.p.y.as<const char>() + static_cast<u64>(w.row[place][r]) * kYBytes;
  };
  if (kTopkOrder && !kPlain && a.p.rows_apart) {
    for (i32 r = 0; r < w.num_rows[place]; ++r)
      sum_rows<kYType, kWritten, 1, kOutType>(
          worker, part, to + static_cast<u64>(r) * kOutBytes, flag, 1,
          [&](i32) { return row_at(r); }, false, [](i32) { return 1.0f; });
  } else if constexpr (kPacks) {
    sum_pieces<Piece<kYType, kWritten>, kRowsAtOnce>(
        worker, part, w.num_rows[place], row_at, a.weighted(),
        [&](i32 r) { return w.weight[place][r]; },
        WhileRowsTravel<kWeightsWhileRowsTravel, Settle>{settle},
        StorePacked</*kRounded=*/!kNearPacked>{to, flag});
  } else {
    sum_rows<kYType, kWritten, kRowsAtOnce, kSentType>(
        worker, part, to, flag, w.num_rows[place], row_at, a.weighted(),
        [&](i32 r) { return w.weight[place][r]; },
        WhileRowsTravel<kWeightsWhileRowsTravel, Settle>{settle});
  }
  if (with_scalars(a.p) && part == 0 && worker.thread < kTopk)
    store_scalar<kPacks>(a, to, flag, a.handle.rows_of(chunk, source, index), w.row[place][0],
                         worker.thread);
}

// --- tokens of other nodes ---

// Adds up the node's partials of one row, which neighbours push, into this gateway's
// combine_outbox.
__device__ inline void add_partials(const Adder& a, const SendWorker& worker, u64 step, u64 ranks,
                                    i32 other, i32 index, char* to) {
  const u64 data = data_of(a.p.comm, a.self.local);
  const i32 slot = slot_of(step), num_ranks = __popcll(ranks);
  const u64 offset = combine_slots_offset() + static_cast<u64>(index) * a.p.stride;
  if (!kSelfFlagged) {
    if (const i32 l = worker.thread;
        l < kLocal && l != a.self.local && (ranks >> l & 1) && !MOE_P2P_MUTATED(kSumBeforeNode))
      if (!wait_flag(a.p.comm, gather_flags_at(a.p.comm, data, slot, other, l) + index,
                     {Phase::kCombine, a.self.node * kLocal + l, step}))
        lose(gather_at(a.p.comm, data, slot, other, l) + offset, a.p.stride);
    worker.sync();
  }
  const auto nth = [ranks](i32 n) {
    u64 left = ranks;
    for (; n > 0; --n) left &= left - 1;
    return __ffsll(static_cast<long long>(left)) - 1;
  };
  const auto row_at = [=](i32 r) {
    return static_cast<const char*>(gather_at(a.p.comm, data, slot, other, nth(r)) + offset);
  };
  const auto source_of = [&, nth](i32 r) {
    const i32 l = nth(r);
    return l == a.self.local ? -1 : a.self.node * kLocal + l;
  };
  constexpr Written kWritten = kSelfFlagged ? Written::kNow : Written::kByPeers;
  const auto one = [](i32) { return 1.0f; };
  if constexpr (kNearPacked) {
    const auto any_at = [&](i32 r) { return AnyRow{row_at(r), true}; };
    const auto settle = settle_rows(a.p.comm, step, any_at, source_of);
    if (num_ranks == 1) {  // more rounding would be for nothing
      copy_packed<kWritten>(worker, to, any_at(0), settle);
    } else {
      sum_pieces<AnyPiece<kWritten>, 2>(worker, 0, num_ranks, any_at, false, one, settle,
                                        StorePacked<false>{to, false});
    }
  } else if constexpr (kFarPacked) {
    sum_pieces<Piece<kOutType, kWritten>, 2>(worker, 0, num_ranks, row_at, false, one,
                                             settle_rows(a.p.comm, step, row_at, source_of),
                                             StorePacked<false>{to, false});
  } else {
    sum_rows<kSentType, kWritten, 2, kSentType>(worker, 0, to, false, num_ranks, row_at, false, one,
                                                settle_rows(a.p.comm, step, row_at, source_of));
  }
  const auto scalars_at = [=](i32 r) { return row_at(r) + (kNearBytes - kOutBytes); };
  if (with_scalars(a.p) && worker.thread < kTopk)
    reinterpret_cast<float*>(to + kFarBytes)[worker.thread] =
        sum_scalars<2>(a.p.comm, step, worker.thread, 0, num_ranks, scalars_at, source_of);
}

// Stores the partial at its gateway, if that is another rank. Otherwise the node's sum: where no
// other rank of this node holds rows for it, this rank's partial.
__device__ inline void send_to_node(const Adder& a, const SendWorker& worker, u64 step, i32 chunk,
                                    i32 place, i32 source, i32 index) {
  const CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step), gateway = source % kLocal;
  const i32 other = other_index(source / kLocal, a.self.node);
  const u64 data = data_of(a.p.comm, gateway), ranks = w.ranks[place];
  const u64 offset = combine_slots_offset() + static_cast<u64>(index) * a.p.stride;
  const bool pushes = gateway != a.self.local, alone = ranks == u64{1} << a.self.local;
  char* to = combine_outbox_of(a.p.comm, a.self, slot, other) + offset;
  if constexpr (kFarPacked != kNearPacked)
    to += static_cast<u64>(index) * (far_stride(a.p) - a.p.stride);
  if (kFarPacked != kNearPacked && alone && !pushes)
    store_partial<kFarPacked>(a, worker, 0, place, chunk, source, index, to, false);
  else if (ranks >> a.self.local & 1)
    store_partial(
        a, worker, 0, place, chunk, source, index,
        alone && !pushes ? to : gather_at(a.p.comm, data, slot, other, a.self.local) + offset,
        pushes);
  if (!pushes && !alone) add_partials(a, worker, step, ranks, other, index, to);
  if (pushes && kSelfFlagged) return;
  worker.sync();
  if (worker.thread != 0) return;
  if (pushes) {
    // After every thread's stores; pairs with the wait in add_partials() there.
    st_release_sys_u32(gather_flags_at(a.p.comm, data, slot, other, a.self.local) + index,
                       flag_of(step));
  } else {
    hand_in(a.p.comm, a.self, step, other, a.header_of(chunk, source), index);
  }
}

// Sends what this rank has for an item of the batch: stores the partial, and raises its flag.
template <typename Settle>
__device__ __forceinline__ void send_item(const Adder& a, const SendWorker& worker,
                                          const Part& share, u64 step, i32 slot, i32 chunk,
                                          i32 place, const Item& item, const Settle& settle) {
  const auto [source, index] = item;
  if (!a.self.same_node(source)) return send_to_node(a, worker, step, chunk, place, source, index);
  const i32 there = source % kLocal, own = a.self.index_at(there);
  const u64 data = data_of(a.p.comm, there);
  char* to = partial_at(a.p.comm, data, slot, own) + combine_slots_offset() +
             static_cast<u64>(index) * a.p.stride;
#pragma unroll 1
  for (i32 part = share.index; part < kRowParts<SendWorker>; part += share.count)
    store_partial(a, worker, part, place, chunk, source, index, to, true, settle);
  if constexpr (kSelfFlagged) return;
  worker.sync();
  // The row's flag, after every thread's stores; pairs with the wait in wait_partial() there.
  if (worker.thread == 0)
    st_release_sys_u32(partial_flags_at(a.p.comm, data, slot, own) + index, flag_of(step));
}

__device__ inline void combine_chunk(const Adder& a, const SendWorker& worker, const Part& share,
                                     u64 step, i32 chunk, LateWeight late) {
  const CombineParams& p = a.p;
  const CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step);
  const i32 num_items = a.num_items(chunk);
#pragma unroll 1
  for (i32 first = worker.id; first < num_items; first += worker.count * kBatch) {
    // combine_send() looked up the first batch, unless weights had to arrive before; the block has
    // met since.
    if (first != worker.id || (p.topk_weights && !kWeightsWhileRowsTravel)) {
      late = look_up(a, worker, step, chunk, num_items, first, scratch_of(worker));
      worker.sync();
    }
    // All threads of the worker call it for the first slot with rows, each at least once.
    bool settled = !kWeightsWhileRowsTravel || !p.topk_weights;
    const auto settle = [&] {
      if (settled) return;
      late.take(p.comm, step);
      worker.sync();
      settled = true;
    };
#pragma unroll 1
    for (i32 place = 0, i = first; place < kBatch && i < num_items; ++place, i += worker.count) {
      if (w.num_rows[place] < 0) continue;
      send_item(a, worker, share, step, slot, chunk, place, a.item(num_items, i), settle);
    }
    worker.sync();  // the next batch takes the place of this one
  }
}

// --- rows of y that are written meanwhile ---
// The caller's kernel raises counters on other multiprocessors. Which rows come first is its own
// affair, so a worker looks at many items in turns and sends those that are complete. No thread
// waits for a counter while other ranks wait for something that it could send: late weights are
// pushed before, and sums of the node, which wait for neighbours, come behind all other items.

// Whether the gateway adds up what its neighbours push for this item.
__device__ __forceinline__ bool waits_for_node(const Adder& a, const Item& item, u64 ranks) {
  return kOthers > 0 && !a.self.same_node(item.source) && item.source % kLocal == a.self.local &&
         ranks != u64{1} << a.self.local;
}

// Looks up the batch that begins with item i, and which of its rows are not written. Called by all
// threads of the worker.
__device__ inline void look_up_unready(const Adder& a, const SendWorker& worker, u64 step,
                                       i32 chunk, i32 num_items, i32 i) {
  CombineScratch& w = scratch_of(worker);
  Unready& unready = shared<CombineSendShared>().unready[worker.place];
  const i32 lane = worker.thread % kLanes, place = worker.thread / kLanes;
  look_up(a, worker, step, chunk, num_items, i, w);
  worker.sync();
  const RowCounters& ready = a.p.ready;
  bool missing = false;
  if (lane < w.num_rows[place] && !MOE_P2P_MUTATED(kRowsUnasked)) {
    const u32 want = ready.want + (ready.base ? *ready.base.get() : 0);
    // Pairs with the release of who wrote the row.
    const u32 got = ld_acquire_sys_u32(ready.counters.get() + ready.counter_of(w.row[place][lane]));
    missing = static_cast<i32>(got - want) < 0;
  }
  const u32 bits = lanes_of(worker, __ballot_sync(~0u, missing));
  if (lane == 0) unready.row[place] = bits ? w.row[place][__ffs(static_cast<int>(bits)) - 1] : -1;
  worker.sync();
}

// Returns whether to look again, for all threads of the worker. row: one that is not written.
__device__ inline bool row_may_come(const Adder& a, const SendWorker& worker, Patience& patience,
                                    u64 step, i32 row) {
  Unready& unready = shared<CombineSendShared>().unready[worker.place];
  if (worker.thread == 0) {
    const i32 counter = a.p.ready.counter_of(row);
    unready.lasts =
        lasts(a.p.comm, patience, static_cast<u32>(counter),
              ld_relaxed_sys_u32(a.p.ready.counters.get() + counter), {Phase::kCombine, -1, step});
  }
  worker.sync();
  return unready.lasts;
}

// Sends items first, first + count, ... of a window. of_node: those that wait for neighbours, and
// not the others. Returns false if rows did not come.
__device__ inline bool send_window(const Adder& a, const SendWorker& worker, const Part& share,
                                   u64 step, i32 chunk, i32 num_items, i32 begin, bool of_node) {
  const CombineScratch& w = scratch_of(worker);
  const Unready& unready = shared<CombineSendShared>().unready[worker.place];
  u32 done[(kReadyBatches * kBatch + 31) / 32] = {};  // the same in all threads
  for (Patience patience;;) {
    i32 missing = -1;
#pragma unroll 1
    for (i32 at = 0, first = begin; at < kReadyBatches * kBatch && first < num_items;
         at += kBatch, first += worker.count * kBatch) {
      look_up_unready(a, worker, step, chunk, num_items, first);
#pragma unroll 1
      for (i32 place = 0, i = first; place < kBatch && i < num_items; ++place, i += worker.count) {
        u32& word = done[(at + place) / 32];
        const u32 bit = 1u << (at + place) % 32;
        const Item item = a.item(num_items, i);
        if (w.num_rows[place] < 0 || (word & bit) ||
            waits_for_node(a, item, kOthers > 0 ? w.ranks[place] : 0) != of_node)
          continue;
        if (unready.row[place] >= 0) {
          missing = unready.row[place];
          continue;
        }
        send_item(a, worker, share, step, slot_of(step), chunk, place, item, DoNothing{});
        word |= bit;
      }
      worker.sync();  // the next batch takes the place of this one
    }
    if (missing < 0) return true;
    if (!row_may_come(a, worker, patience, step, missing)) return false;
  }
}

__device__ inline bool combine_unready_chunk(const Adder& a, const SendWorker& worker,
                                             const Part& share, u64 step, i32 chunk) {
  const i32 num_items = a.num_items(chunk);
  for (i32 pass = 0; pass < (kOthers > 0 ? 2 : 1); ++pass)
    for (i32 begin = worker.id; begin < num_items; begin += worker.count * kReadyBatches * kBatch)
      if (!send_window(a, worker, share, step, chunk, num_items, begin, pass == 1)) return false;
  return true;
}

// A combine that opens steps of its own begins each with an empty dispatch to, and from, all ranks.
// Returns false if one did not arrive. The first kSteps steps of a call use slots of earlier
// kernels.
__device__ inline bool open_solo(const CombineParams& p, u64 step, i32 chunk, i32 block) {
  const DeviceComm& comm = p.comm;
  const Self self(comm);
  if (block == 0) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    bool is_free = thread >= 32 || wait_free(comm, self, step, thread);
    if (chunk >= kSteps && thread == 32)
      is_free = wait_sums_read(comm, step - static_cast<u64>(kSteps));
    if (!__syncthreads_and(is_free)) return false;
    send_empty_dispatch(comm, self, step);
  }
  bool came = true;
#pragma unroll 1
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads) {
    if (!wait_dispatch(comm, self, step, source)) {
      came = came && is_masked(comm, source);
      continue;
    }
    const RegionHeader* header = region_header(dispatch_region(comm, self, slot_of(step), source));
    // Only one block checks the header: once it announces 'read', the source may overwrite it.
    if (block != announcer(p) || header->flags == kEmpty) continue;
    raise_fault(comm, kWrongHeader, Phase::kDispatch, source, step, 0, header->slot_bytes);
    came = false;
  }
  return __syncthreads_and(came);
}

// Release: all that was dispatched must have arrived before its source may send again.
__device__ __noinline__ void send_release(const CombineParams& p, u64 first_step) {
  const Self self(p.comm);
  for (u64 step = first_step; step < first_step + static_cast<u64>(p.num_chunks); ++step) {
    bool came = true;
#pragma unroll 1
    for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld; source += kBlockThreads)
      came = (wait_dispatch(p.comm, self, step, source) || is_masked(p.comm, source)) && came;
    if (!__syncthreads_and(came)) return;
    say_read(p.comm, self, step, static_cast<i32>(threadIdx.x), kBlockThreads, EmptyHeader{});
  }
}

// Announces that this rank has read all of the step's dispatch, tokens or not: the senders may use
// the slot again (protocol.md, section 9).
__device__ inline void say_chunk_read(const Adder& a, u64 step, i32 chunk) {
  say_read(a.p.comm, a.self, step, static_cast<i32>(threadIdx.x), kBlockThreads,
           [&](i32 source) { return a.header_of(chunk, source); });
}
// Between nodes that takes longer than a sum, so the relaying block announces it where nothing has
// to happen before it.
__device__ inline bool relay_says_read(const CombineParams& p, bool opens) {
  return has_relay(p.grid) && !opens && !p.topk_weights;
}

// Runs before the sums of a chunk. Called by the whole block. opens: a step of its own. Returns
// false if a rank did not arrive.
__device__ inline bool open_chunk(const Adder& a, bool opens, u64 step, i32 chunk, i32 block) {
  if (opens && !open_solo(a.p, step, chunk, block)) return false;
  if (a.p.topk_weights && !exchange_weights(a.p, step, chunk, block)) return false;
  if (block == announcer(a.p) && !relay_says_read(a.p, opens)) say_chunk_read(a, step, chunk);
  return true;
}

// begin(): called by every block, once; it waits for the loads of Launch::ask(). So the rows of the
// first slots are looked up before it; none is followed if the handle is not trusted.
template <typename IsTrusted, typename Begin>
__device__ inline void combine_send(const CombineParams& p, i32 block, const IsTrusted& is_trusted,
                                    const Begin& begin) {
  const Adder a{p, Self(p.comm), HandleArrays(p)};
  const SendWorker own = SendWorker::of(block, p.grid.num_send_blocks);
  const Part share = share_of_row(own);
  const SendWorker worker = share.team(own);
  LateWeight late;
  const auto look_first = [&](u64 step, i32 chunk, const auto& trusts) {
    if (!kReady && (kWeightsWhileRowsTravel || !p.topk_weights))  // or weights arrive before
      late = look_up(a, worker, step, chunk, a.num_items(chunk), worker.id, scratch_of(worker),
                     trusts);
  };
  look_first(0, 0, is_trusted);
  const Begun begun = begin();
  if (!begun.good) return;  // waits for its sums end with the fault
#pragma unroll 1
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (chunk > 0) {
      look_first(step, chunk, Trusts{});
      __syncthreads();
    }
    if (!open_chunk(a, begun.opens, step, chunk, block)) return;
    if constexpr (kReady) {
      if (!combine_unready_chunk(a, worker, share, step, chunk)) return;
    } else {
      combine_chunk(a, worker, share, step, chunk, late);
    }
    if (chunk + 1 < num_chunks_of(p))
      worker.sync();  // the next chunk's first batch takes the place of this one's last
  }
}

}  // namespace moe_p2p::device
