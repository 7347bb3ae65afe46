// Dispatch by rank, receiving half, on few multiprocessors, another way than bulk_recv.cuh: one
// warp of a block places slots, a lane for each, and stores what is short; others copy payload and
// scales from the slot to the row, through shared memory.
//
// Why no wait here can last: the placing warp waits for slots, with a deadline for each, and for
// room among its jobs. Copying warps hold jobs and images only until copies have moved, and wait
// for nothing but copies and the next job; all jobs are published before the placing warp waits for
// room again. So there is always one who can go on: the copying warps where there are jobs, the
// placing warp where there are none. No lane leaves its loop before the others, and the barriers of
// the block come behind both loops.
#pragma once

#include "kernels/dispatch/bulk_given.cuh"
#include "kernels/dispatch/recv.cuh"

namespace moe_p2p::device::bulk {

static_assert(kRowGroups == 1, "a slot fills one row");
inline constexpr i32 kCopiers = MOE_P2P_COPIERS, kCopierImages = MOE_P2P_COPIER_IMAGES;
inline constexpr i32 kCopiedBytes = kImageBytes - kHeadBytes;
inline constexpr i32 kAhead = kCopierImages - 2;  // images of a warp that are loaded or loading
inline constexpr i32 kUnread = kCopierImages - kAhead;  // whose stores may be under way
inline constexpr i32 kJobs = 64;                        // a power of two; two rounds of a warp
static_assert(kCopiers < 32 && (kCopiers + 1) * 32 <= kBlockThreads && kAhead >= 1);

// A row to copy.
struct Job {
  const char* payload;  // in a slot, whose scales and extras follow, or as the caller gave it
  const char* scales;   // if `given`
  i32 row;
  bool given;
};
struct CopierShared {
  alignas(kBulkAlign) char image[kCopierImages][kCopiedBytes];
  u64 full[kCopierImages];
  u32 next;  // its first job that is not taken yet
};
struct PlaceShared {
  RecvShared places;
  CopierShared copier[kCopiers];
  Job job[kJobs];
  u32 num_placed;  // jobs, of all chunks
  u32 num_ended;   // chunks whose jobs are all placed
};

// --- the placing warp ---

// The words of a slot's head, by 16 bytes: all are under way together.
struct Head {
  static constexpr i32 kPositions = static_cast<i32>(positions_offset(kTopk) / 4);
  static constexpr i32 kWeights = static_cast<i32>(weights_offset(kTopk) / 4);
  static constexpr i32 kVecs = (kWeights + kTopk + 3) / 4;
  static_assert(kVecs * 16 <= kHeadBytes && positions_offset(kTopk) % 4 == 0);
  Vec vec[kVecs];

  __device__ __forceinline__ void load(const char* slot) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = ld_na_v4(slot + i * 16);
  }
  // i: a constant of an unrolled loop.
  __device__ __forceinline__ u32 word(i32 i) const { return vec[i / 4].word[i % 4]; }
  __device__ __forceinline__ u32 token() const { return word(1); }
  __device__ __forceinline__ i32 expert(i32 k) const {
    return static_cast<i32>(word(2 + k / 2) >> (k % 2 * 16) & 0xffff);
  }
  __device__ __forceinline__ i32 position(i32 k) const {
    return static_cast<i32>(word(kPositions + k));
  }
  __device__ __forceinline__ u32 weight(i32 k) const { return word(kWeights + k); }
};

// Stores words, by 16 bytes where they begin at 16 bytes.
template <i32 kCount>
__device__ __forceinline__ void store_words(void* to, const u32 (&word)[kCount]) {
  if (kCount % 4 == 0 && reinterpret_cast<u64>(to) % 16 == 0) {
#pragma unroll
    for (i32 i = 0; i + 3 < kCount; i += 4)
      st_na_v4(values_at<u32>(static_cast<char*>(to)) + i,
               Vec{{word[i], word[i + 1], word[i + 2], word[i + 3]}});
  } else {
#pragma unroll
    for (i32 i = 0; i < kCount; ++i) values_at<u32>(static_cast<char*>(to))[i] = word[i];
  }
}

// Where a slot goes: find_rows() and ByRank::store_entries() for one lane.
struct Placed {
  i32 row = -1;
  i32 first = -1;  // the first k that names an expert of this rank
  u32 expert[kTopk];

  __device__ __forceinline__ void find(const Receiver& a, const Item& item, const Head& head) {
    i32 position = -1;
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k) {
      const i32 e = head.expert(k);
      const Owner owner =
          e < kExperts ? owner_of(a.p.comm, expert_from(item.source, e)) : Owner{-1, 0};
      const bool own = owner.rank == a.self.rank;
      expert[k] = own ? static_cast<u32>(owner.local) : ~0u;
      if (own && first < 0) first = k, position = head.position(k);
    }
    const i64 at = static_cast<i64>(a.s.first_row[0][item.source]) + position;
    // place_rows() reported the excess; a lost position is -1.
    if (first >= 0 && position >= 0 && at < a.end_of(0)) row = static_cast<i32>(at);
  }
  // Stores all of the row but payload and scales, and the row in the handle.
  __device__ __forceinline__ void store(const Receiver& a, i32 chunk, const Item& item,
                                        const Head& head) const {
    const DispatchParams& p = a.p;
    u32 rows[kTopk];
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k) rows[k] = static_cast<u32>(k == first ? row : -1);
    store_words(a.handle.rows_of(chunk, item.source, item.index), rows);
    if (row < 0) return;
    const i64 entries = static_cast<i64>(row) * kTopk;
    if (p.topk_is_int64) {
      u32 wide[2 * kTopk];
#pragma unroll
      for (i32 k = 0; k < kTopk; ++k)
        wide[2 * k] = expert[k], wide[2 * k + 1] = expert[k] == ~0u ? ~0u : 0;
      store_words(p.row_topk.as<i64>() + entries, wide);
    } else {
      store_words(p.row_topk.as<i32>() + entries, expert);
    }
    u32 weights[kTopk];
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k) weights[k] = expert[k] == ~0u ? 0 : head.weight(k);
    store_words(p.row_weights.get() + entries, weights);
    if (p.source)
      st_na_v2(p.source.get() + 2 * static_cast<i64>(row),
               Pair{{static_cast<u32>(item.source), head.token()}});
  }
};

struct Placer {
  const Receiver& a;
  PlaceShared& s;
  const i32 lane;
  u32 num_placed = 0;

  // Waits until the ring has room up to job `end`. Pairs with the release in Copier::take().
  __device__ void wait_room(u32 end) const {
    while (!__all_sync(
        ~0u, lane >= kCopiers ||
                 static_cast<i32>(end - ld_acquire_cta_u32(&s.copier[lane].next)) <= kJobs)) {
    }
    __syncwarp();  // all lanes have what these have acquired
  }

  // Places the slots of the lanes for which `arrived`, whose flags they have acquired.
  __device__ void place(u64 step, i32 chunk, const Item& item, bool arrived) {
    const char* slot = slot_at(a, step, item);
    Head head;
    Placed placed;
    if (arrived) {
      head.load(slot);
      placed.find(a, item, head);
    }
    const u32 with_rows = __ballot_sync(~0u, placed.row >= 0);
    const u32 end = num_placed + static_cast<u32>(__popc(with_rows));
    wait_room(end);
    if (placed.row >= 0) {
      const u32 at = num_placed + static_cast<u32>(__popc(with_rows & ((1u << lane) - 1)));
      const bool given = own_stays(a.p) && item.source == a.self.rank;
      const GivenRow from =
          given ? GivenRow::of(a.p, head.token()) : GivenRow{slot + kHeadBytes, nullptr};
      s.job[at % kJobs] = {from.payload, from.scales, placed.row, given};
    }
    num_placed = end;
    __syncwarp();  // the first lane passes on what all have stored and acquired
    if (lane == 0) st_release_cta_u32(&s.num_placed, num_placed);
    if (arrived) placed.store(a, chunk, item, head);
  }

  // Slots first, first + stride, ... before `end`, about in the order of arrival: each lane looks
  // at every 32nd.
  __device__ void run(u64 step, i32 chunk, i32 first, i32 end, i32 stride) {
    const DeviceComm& comm = a.p.comm;
    const u32 want = flag_of(step);
    const i32* num_slots = a.s.num_slots[chunk % 2];
    i32 i = first + (lane - 32) * stride;
    Item mine{};
    const u32* flag = nullptr;
    Patience patience;  // with the lane's slot
    const auto look_for_next = [&] {
      do {
        i += 32 * stride;
        mine = item_of(a.self, i);
      } while (i < end && mine.index >= num_slots[mine.source]);
      flag = inbox_flags_at(comm, comm.data[a.self.local], slot_of(step), mine.source) + mine.index;
      patience = {};
    };
    look_for_next();
    for (u32 left; (left = __ballot_sync(~0u, i < end)) != 0;) {
      const u32 got = i < end ? ld_relaxed_sys_u32(flag) : 0;
      const bool arrived = i < end && got == want;
      if (__any_sync(~0u, arrived)) {
        // Once something has arrived: an acquire takes longer than a look.
        if (arrived) ld_acquire_sys_u32(flag);
        place(step, chunk, mine, arrived);
        if (arrived) look_for_next();
        continue;
      }
      // The first lane that waits has the patience of all, so others' slots are still looked at.
      const bool lost = lane == __ffs(left) - 1 &&
                        !lasts(comm, patience, want, got, {Phase::kDispatch, mine.source, step});
      if (!__any_sync(~0u, lost)) continue;
      if (lost) {
        a.s.lost = true;
        Placed{}.store(a, chunk, mine, Head{});  // no row
        look_for_next();
      }
    }
    __syncwarp();
    if (lane == 0) st_release_cta_u32(&s.num_ended, static_cast<u32>(chunk + 1));
  }
};

// --- the copying warps ---

// Whether copies can store the scales of a row: word for word, one row's behind each other.
__device__ __forceinline__ bool stores_scales(const DispatchParams& p) {
  return kScaled && kScaleFormat != ScaleFormat::kUe8m0 && p.scale_place.word == 1 &&
         (p.out_scales.address | p.parts.bytes[1]) % 16 == 0 && p.scale_place.row % 4 == 0;
}

struct Copier {
  const Receiver& a;
  PlaceShared& s;
  CopierShared& own;
  const i32 lane;
  u32 next, taken;  // jobs: to ask for, to store
  Turn<kCopierImages> loaded, stored;
  u32 seen = 0;

  __device__ Copier(const Receiver& receiver, PlaceShared& all, i32 index, i32 lane_of_warp)
      : a(receiver),
        s(all),
        own(all.copier[index]),
        lane(lane_of_warp),
        next(static_cast<u32>(index)),
        taken(static_cast<u32>(index)) {}

  __device__ void load() {
    bulk_wait_read<kUnread>();  // the copies out of the image that is next
    __syncwarp();
    if (lane == 0) {
      const Job& job = s.job[next % kJobs];
      const auto bytes =
          job.given ? given_bytes(a.p) : static_cast<u32>(a.p.parts.slot_bytes) - kHeadBytes;
      char* image = own.image[loaded.at];
      barrier_expect(&own.full[loaded.at], bytes);
      if (job.given) {
        load_given(a.p, {job.payload, job.scales}, image, &own.full[loaded.at]);
      } else {
        bulk_load(image, job.payload, bytes, &own.full[loaded.at]);
      }
    }
    loaded.next();
    next += kCopiers;
  }

  __device__ void take() {
    const DispatchParams& p = a.p;
    barrier_wait(&own.full[stored.at], stored.parity);
    const i64 row = s.job[taken % kJobs].row;
    const char* image = own.image[stored.at];
    const char* scales = image + (p.parts.offset[1] - kHeadBytes);
    const bool by_copy = stores_scales(p);
    if (lane == 0) {
      bulk_store(p.out_x.as<char>() + row * kPayloadBytes, image, kPayloadBytes);
      if (const auto bytes = static_cast<u32>(p.parts.bytes[1]); by_copy && bytes > 0)
        bulk_store(p.out_scales.as<u32>() + scales_of(p, row, 0), scales, bytes);
    }
    bulk_commit();
    if constexpr (kScaled)
      if (!by_copy) store_scales(p, Threads<32>{lane}, scales_of(p, row, 0), scales, lane);
    copy_extras(p, Threads<32>{lane}, static_cast<u64>(row), image - kHeadBytes);
    stored.next();
    taken += kCopiers;
    __syncwarp();  // all have read the job
    if (lane == 0) st_release_cta_u32(&own.next, taken);
  }

  __device__ void run(i32 chunk) {
    for (;;) {
      // In this order: where the chunk has ended, all of its jobs are placed.
      u32 ended = ld_acquire_cta_u32(&s.num_ended);
      u32 placed = ld_acquire_cta_u32(&s.num_placed);
      ended = __shfl_sync(~0u, ended, 0);  // lanes may have read at different times
      placed = __shfl_sync(~0u, placed, 0);
      if (placed != seen) fence_global_for_bulk();
      seen = placed;
      __syncwarp();
      while (next != taken + kAhead * kCopiers && static_cast<i32>(placed - next) > 0) load();
      if (next != taken) {
        take();
      } else if (ended == static_cast<u32>(chunk + 1)) {
        break;
      }
    }
    bulk_wait<0>();
  }
};

__device__ inline void dispatch_recv(const DispatchParams& p, const Begun& begun, i32 block) {
  auto& s = shared<PlaceShared>();
  const i32 warp = static_cast<i32>(threadIdx.x) / 32, lane = static_cast<i32>(threadIdx.x) % 32;
  const Receiver a{p, Self(p.comm), HandleArrays(p), block == 0, s.places};
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
  const bool places = warp == 0, copies = warp >= 1 && warp <= kCopiers;
  if (places && lane == 0) s.num_placed = s.num_ended = 0;
  if (copies && lane == 0) {
    CopierShared& own = s.copier[warp - 1];
    for (i32 i = 0; i < kCopierImages; ++i) barrier_init(&own.full[i], 1);
    own.next = static_cast<u32>(warp - 1);
    fence_barrier_init();
  }
  Placer placer{a, s, lane};
  Copier copier(a, s, copies ? warp - 1 : 0, lane);
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (!begin_chunk(a, worker, begun.good, step, chunk)) return;
    const i32* num_slots = s.places.num_slots[chunk % 2];
    if (places) {
      i32 most = 0;
      for (i32 source = 0; source < kWorld; ++source) most = max(most, num_slots[source]);
      placer.run(step, chunk, block, most * kWorld, p.grid.num_recv_blocks);
    } else if (copies) {
      copier.run(chunk);
    }
    __syncthreads();
    if (s.places.lost) lose_rows(p, step);
    if (is_solo(p)) acknowledge(p.comm, s.places, worker, step);
    __syncthreads();  // the next chunk's headers take the place of this one's
  }
}

}  // namespace moe_p2p::device::bulk
