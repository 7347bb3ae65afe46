// Combine, sending half: adds up this rank's experts for each received slot. For a token of the own
// node the partial row goes to its source. For a token of another node it goes to the gateway,
// which adds up the partials of its node and rings with the last row of a part. Sums are in fp32 in
// a fixed order (docs/protocol.md, section 10), so the order of arrival does not matter.
#pragma once

#include "kernels/combine/sum.cuh"
#include "kernels/combine/sums_read.cuh"
#include "kernels/combine/topk_order.cuh"
#include "kernels/combine/weights.cuh"
#include "kernels/device/lost.cuh"
#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

inline constexpr i32 kBatch = SendWorker::kThreads / kLanes;
using CombineScratch = Rows<kBatch>;
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
    return {static_cast<u32>(handle.slot_count(chunk, source)),
            combine_flags(kOutType, p.with_scalars), p.stride};
  }
};

// Returns the weight of row `row` of y, which is the k-th expert of a slot.
__device__ __forceinline__ float weight_of_row(const Adder& a, u64 step, i32 source, i32 index,
                                               i32 k, i32 row) {
  if (a.p.topk_weights) return slot_weights(a.p.comm, a.self, slot_of(step), source, index)[k];
  return a.p.row_weights ? a.p.row_weights[row] : 1.0f;
}

struct Trusts {
  __device__ bool operator()() const { return true; }
};

// Finds the rows and weights of items i, i + count, ...: of each slot the rows of this rank. All
// words of the handle are asked for at once, needed or not. If the handle is not trusted, nothing
// is found.
template <typename W, i32 kItems, typename IsTrusted = Trusts>
__device__ inline void look_up(const Adder& a, const W& worker, u64 step, i32 chunk, i32 num_items,
                               i32 i, Rows<kItems>& w, const IsTrusted& is_trusted = {}) {
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
  const i32 row = mine ? found : -1;
  const u32 have = __ballot_sync(~0u, row >= 0);
  const u32 ours = kLanes == 32 ? ~0u : (1u << kLanes % 32) - 1;
  const u32 bits = have >> (worker.thread % 32 / kLanes * kLanes) & ours;
  if (row >= 0) {
    const i32 at = __popc(bits & ((1u << lane) - 1));
    w.row[place][at] = row;
    w.weight[place][at] = weight_of_row(a, step, source, index, lane, row);
  }
  if (lane == 0) w.num_rows[place] = mine ? __popc(bits) : none;
}

// Stores scalar k behind the sum at `to`, of a slot whose rows of y are `rows` and begin with
// `first`.
__device__ __forceinline__ void store_scalar(const Adder& a, char* to, bool flag, const i32* rows,
                                             i32 first, i32 k) {
  const i64 at = a.p.scalars_by_rank ? static_cast<i64>(first) * kTopk + k : rows[k];
  const float scalar = at >= 0 ? a.p.row_scalars[at] : 0.0f;
  auto* place = reinterpret_cast<float*>(to + scalars_offset(a.p)) + k;
  if (kSelfFlagged && flag) {
    st_flagged_u32(place, __float_as_uint(scalar));
  } else {
    *place = scalar;
  }
}

// Adds up this rank's rows of one slot at `to`.
__device__ inline void store_partial(const Adder& a, const SendWorker& worker, i32 part, i32 place,
                                     i32 chunk, i32 source, i32 index, char* to, bool flag) {
  const CombineScratch& w = scratch_of(worker);
  // Most tokens' rows are loaded for the latency of one, where a thread has the registers.
  constexpr i32 kMost = kGroups <= SendWorker::kThreads * kRowParts<SendWorker> ? 4 : 2;
  constexpr i32 kRowsAtOnce = kTopk < kMost ? kTopk : kMost;
  const auto row_at = [&](i32 r) {
    return a.p.y.as<const char>() + static_cast<u64>(w.row[place][r]) * kYBytes;
  };
  if (kTopkOrder && a.p.rows_apart) {
    for (i32 r = 0; r < w.num_rows[place]; ++r)
      sum_rows<kYType, Written::kBefore, 1>(
          worker, part, to + static_cast<u64>(r) * kOutBytes, flag, 1,
          [&](i32) { return row_at(r); }, false, [](i32) { return 1.0f; });
  } else {
    sum_rows<kYType, Written::kBefore, kRowsAtOnce>(worker, part, to, flag, w.num_rows[place],
                                                    row_at, a.weighted(),
                                                    [&](i32 r) { return w.weight[place][r]; });
  }
  if (a.p.with_scalars && part == 0 && worker.thread < kTopk)
    store_scalar(a, to, flag, a.handle.rows_of(chunk, source, index), w.row[place][0],
                 worker.thread);
}

// --- tokens of other nodes ---

// Adds up the node's partials of one row, which neighbours push, into this gateway's
// combine_outbox.
__device__ inline void add_partials(const Adder& a, const SendWorker& worker, u64 step, u64 ranks,
                                    i32 other, i32 index, char* to) {
  const u64 data = a.p.comm.data[a.self.local];
  const i32 slot = slot_of(step), num_ranks = __popcll(ranks);
  const u64 offset = combine_slots_offset() + static_cast<u64>(index) * a.p.stride;
  if (!kSelfFlagged) {
    if (const i32 l = worker.thread;
        l < kLocal && l != a.self.local && (ranks >> l & 1) && !MOE_P2P_MUTATED(kSumBeforeNode))
      if (!wait_flag(a.p.comm, gather_flags_at(data, slot, other, l) + index,
                     {Phase::kCombine, a.self.node * kLocal + l, step}))
        lose(gather_at(data, slot, other, l) + offset, a.p.stride);
    worker.sync();
  }
  const auto nth = [ranks](i32 n) {
    u64 left = ranks;
    for (; n > 0; --n) left &= left - 1;
    return __ffsll(static_cast<long long>(left)) - 1;
  };
  const auto row_at = [=](i32 r) {
    return static_cast<const char*>(gather_at(data, slot, other, nth(r)) + offset);
  };
  const auto source_of = [&, nth](i32 r) {
    const i32 l = nth(r);
    return l == a.self.local ? -1 : a.self.node * kLocal + l;
  };
  sum_rows<kOutType, kSelfFlagged ? Written::kNow : Written::kByPeers, 2>(
      worker, 0, to, false, num_ranks, row_at, false, [](i32) { return 1.0f; },
      settle_rows(a.p.comm, step, row_at, source_of));
  if (a.p.with_scalars && worker.thread < kTopk)
    reinterpret_cast<float*>(to + kOutBytes)[worker.thread] =
        sum_scalars<2>(a.p.comm, step, worker.thread, 0, num_ranks, row_at, source_of);
}

// Stores the partial at its gateway, if that is another rank. Otherwise the node's sum: where no
// other rank of this node holds rows for it, this rank's partial.
__device__ inline void send_to_node(const Adder& a, const SendWorker& worker, u64 step, i32 chunk,
                                    i32 place, i32 source, i32 index) {
  const CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step), gateway = source % kLocal;
  const i32 other = other_index(source / kLocal, a.self.node);
  const u64 data = a.p.comm.data[gateway], ranks = w.ranks[place];
  const u64 offset = combine_slots_offset() + static_cast<u64>(index) * a.p.stride;
  const bool pushes = gateway != a.self.local, alone = ranks == u64{1} << a.self.local;
  char* to = combine_outbox_at(data, slot, other) + offset;
  if (ranks >> a.self.local & 1)
    store_partial(a, worker, 0, place, chunk, source, index,
                  alone && !pushes ? to : gather_at(data, slot, other, a.self.local) + offset,
                  pushes);
  if (!pushes && !alone) add_partials(a, worker, step, ranks, other, index, to);
  if (pushes && kSelfFlagged) return;
  worker.sync();
  if (worker.thread != 0) return;
  if (pushes) {
    // After every thread's stores; pairs with the wait in add_partials() there.
    st_release_sys_u32(gather_flags_at(data, slot, other, a.self.local) + index, flag_of(step));
  } else {
    hand_in(a.p.comm, a.self, step, other, a.header_of(chunk, source),
            part_of_slot(a.p.stride, index));
  }
}

__device__ inline void combine_chunk(const Adder& a, const SendWorker& worker, const Part& share,
                                     u64 step, i32 chunk) {
  const CombineParams& p = a.p;
  const CombineScratch& w = scratch_of(worker);
  const i32 slot = slot_of(step);
  const i32 num_items = a.num_items(chunk);
  for (i32 first = worker.id; first < num_items; first += worker.count * kBatch) {
    // combine_send() looked up the first batch, unless weights had to arrive before.
    if (first != worker.id || p.topk_weights)
      look_up(a, worker, step, chunk, num_items, first, scratch_of(worker));
    worker.sync();
    for (i32 place = 0, i = first; place < kBatch && i < num_items; ++place, i += worker.count) {
      if (w.num_rows[place] < 0) continue;
      const auto [source, index] = a.item(num_items, i);
      if (!a.self.same_node(source)) {
        send_to_node(a, worker, step, chunk, place, source, index);
        continue;
      }
      const u64 data = p.comm.data[source % kLocal];
      char* to = partial_at(data, slot, a.self.local) + combine_slots_offset() +
                 static_cast<u64>(index) * p.stride;
      for (i32 part = share.index; part < kRowParts<SendWorker>; part += share.count)
        store_partial(a, worker, part, place, chunk, source, index, to, true);
      if constexpr (kSelfFlagged) continue;
      worker.sync();
      // The row's flag, after every thread's stores; pairs with the wait in wait_partial() there.
      if (worker.thread == 0)
        st_release_sys_u32(partial_flags_at(data, slot, a.self.local) + index, flag_of(step));
    }
    worker.sync();  // the next batch takes the place of this one
  }
}

// A combine that opens steps of its own begins each with an empty dispatch to, and from, all ranks.
// Returns false if one did not arrive. The first kSteps steps of a call use slots of earlier
// kernels.
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
    const RegionHeader* header =
        region_header(dispatch_region(comm, a.self, slot_of(step), source));
    // Only block 0 checks the header. After block 0 announces 'read', the source may overwrite it.
    if (block != 0 || header->flags == kEmpty) continue;
    raise_fault(comm, kWrongHeader, Phase::kDispatch, source, step, 0, header->slot_bytes);
    came = false;
  }
  return __syncthreads_and(came);
}

// Release: all that was dispatched must have arrived before its source may send again.
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

// Announces that this rank has read all of the step's dispatch, tokens or not: the senders may use
// the slot again (protocol.md, section 9).
__device__ inline void say_chunk_read(const Adder& a, u64 step, i32 chunk) {
  say_read(a.p.comm, a.self, step, static_cast<i32>(threadIdx.x), kBlockThreads,
           [&](i32 source) { return a.header_of(chunk, source); });
}
// Between nodes that takes longer than a sum, so the relaying block announces it where nothing has
// to happen before it.
__device__ inline bool relay_says_read(const CombineParams& p, bool opens) {
  return kOthers > 0 && !opens && !p.topk_weights;
}

// Runs before the sums of a chunk. Called by the whole block. opens: a step of its own. Returns
// false if a rank did not arrive.
__device__ inline bool open_chunk(const Adder& a, bool opens, u64 step, i32 chunk, i32 block) {
  if (opens && !open_solo(a, step, chunk, block)) return false;
  if (a.p.topk_weights && !exchange_weights(a.p, step, chunk, block)) return false;
  if (block == 0 && !relay_says_read(a.p, opens)) say_chunk_read(a, step, chunk);
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
  const auto look_first = [&](u64 step, i32 chunk, const auto& trusts) {
    if (!p.topk_weights)  // otherwise weights have to arrive before
      look_up(a, worker, step, chunk, a.num_items(chunk), worker.id, scratch_of(worker), trusts);
  };
  look_first(0, 0, is_trusted);
  const Begun begun = begin();
  if (!begun.good) return;  // waits for its sums end with the fault
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (chunk > 0) look_first(step, chunk, Trusts{});
    if (!open_chunk(a, begun.opens, step, chunk, block)) return;
    combine_chunk(a, worker, share, step, chunk);
    worker.sync();  // the next chunk's first batch takes the place of this one's last
  }
}

}  // namespace moe_p2p::device
