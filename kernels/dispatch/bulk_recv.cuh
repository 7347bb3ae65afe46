// Dispatch, receiving half, on few multiprocessors: one copy fetches a whole slot, and another
// takes its payload to each row. Every warp has a ring of slots of its own, as far as shared memory
// allows.
#pragma once

#include "kernels/dispatch/bulk_given.cuh"
#include "kernels/dispatch/recv.cuh"

namespace moe_p2p::device::bulk {

inline constexpr i32 kRings = MOE_P2P_RINGS, kRingImages = MOE_P2P_RING_IMAGES;
// Slots that are fetched while one is taken. Where a slot fills several rows, whose copies need the
// time of another image, launch_shape.py gives a ring one more.
inline constexpr i32 kAhead = 2;
static_assert(kAhead < kRingImages);

struct RecvRing {
  alignas(kBulkAlign) char image[kRingImages][kImageBytes];
  u64 full[kRingImages];
  Item item[kRingImages];
  FoundRows found;
};
struct BulkRecvShared {
  RecvShared places;
  RecvRing ring[kRings];
};

struct Fetcher {
  const Receiver& a;
  RecvRing& ring;
  const i32 lane;
  Turn<kRingImages> fetched, taken;
  i32 num_ahead = 0;  // fetched and not taken
  i32 buffer = 0;

  // Fetches a slot whose flag is up. Called behind a fence.
  __device__ void fetch(u64 step, i32 chunk, const Item& item) {
    if (num_ahead == kAhead) take(chunk);
    bulk_wait_read<1>();  // the copies out of the image that is next
    __syncwarp();
    if (lane == 0) {
      const bool given = own_stays(a.p) && item.source == a.self.rank;
      const char* slot = slot_at(a, step, item);
      const u32 bytes = given ? kHeadBytes : static_cast<u32>(a.p.parts.slot_bytes);
      char* image = ring.image[fetched.at];
      ring.item[fetched.at] = item;
      barrier_expect(&ring.full[fetched.at], given ? bytes + given_bytes(a.p) : bytes);
      bulk_load(image, slot, bytes, &ring.full[fetched.at]);
      if (given)
        load_given(a.p, GivenRow::of(a.p, slot_head(slot)->token), image + kHeadBytes,
                   &ring.full[fetched.at]);
    }
    fetched.next();
    ++num_ahead;
  }

  __device__ void take(i32 chunk) {
    const DispatchParams& p = a.p;
    FoundRows& w = ring.found;
    const Threads<32> worker{lane};
    barrier_wait(&ring.full[taken.at], taken.parity);
    const char* from = ring.image[taken.at];
    if (lane == 0) w.arrived[buffer] = true;
    __syncwarp();
    find_rows(a, lane, chunk, ring.item[taken.at], from, buffer, w);
    __syncwarp();
    const i32 num_rows = w.num_rows[buffer];
    for (i32 r = lane; r < num_rows; r += 32)
      bulk_store(p.out_x.as<char>() + static_cast<i64>(w.row[buffer][r]) * kPayloadBytes,
                 from + kHeadBytes, kPayloadBytes);
    bulk_commit();
    for (i32 r = 0; r < num_rows; ++r) {
      if constexpr (kScaled)
        store_scales(p, worker, w.scales[buffer][r], from + p.parts.offset[1], lane);
      copy_extras(p, worker, static_cast<u64>(w.row[buffer][r]), from);
    }
    taken.next();
    buffer ^= 1;
    --num_ahead;
  }

  __device__ void take_all(i32 chunk) {
    while (num_ahead > 0) take(chunk);
  }
};

// Notes in the handle that a slot that did not arrive fills no row.
__device__ inline void leave_out(const Receiver& a, Fetcher& fetcher, i32 chunk, const Item& item) {
  if (fetcher.lane < kTopk) a.handle.rows_of(chunk, item.source, item.index)[fetcher.lane] = -1;
}

// Slots first, first + stride, ... before `end`, about in the order of arrival: each lane looks at
// every 32nd.
__device__ inline void fetch_slots(const Receiver& a, Fetcher& fetcher, u64 step, i32 chunk,
                                   i32 first, i32 end, i32 stride) {
  const u32 want = flag_of(step);
  const i32* num_slots = a.s.num_slots[chunk % 2];
  i32 i = first + (fetcher.lane - 32) * stride;
  Item mine{};
  const u32* flag = nullptr;
  const auto look_for_next = [&] {
    do {
      i += 32 * stride;
      mine = item_of(a.self, i);
    } while (i < end && mine.index >= num_slots[mine.source]);
    flag = inbox_flags_at(a.p.comm, data_of(a.p.comm, a.self.local), slot_of(step), mine.source) +
           mine.index;
  };
  const auto of_lane = [&](i32 lane) {
    return Item{__shfl_sync(~0u, mine.source, lane), __shfl_sync(~0u, mine.index, lane)};
  };
  look_for_next();
  for (u32 looks = 0, left; (left = __ballot_sync(~0u, i < end)) != 0;) {
    const bool has_come = i < end && ld_acquire_sys_u32(flag) == want;
    const u32 ready = __ballot_sync(~0u, has_come);
    if (ready != 0) {
      __syncwarp();  // the first lane has what any has acquired, and behind the fence its copies
      if (fetcher.lane == 0) fence_global_for_bulk();
      for (u32 rest = ready; rest != 0; rest &= rest - 1)
        fetcher.fetch(step, chunk, of_lane(__ffs(rest) - 1));
      if (has_come) look_for_next();
    } else if (fetcher.num_ahead > 0) {
      fetcher.take(chunk);
    } else if (++looks % kLooksBetweenClocks == 0) {
      const i32 late = __ffs(left) - 1;
      bool came = true;
      if (fetcher.lane == late)
        came = wait_flag(a.p.comm, flag, {Phase::kDispatch, mine.source, step});
      if (__all_sync(~0u, came)) continue;
      a.s.lost = true;
      leave_out(a, fetcher, chunk, of_lane(late));
      if (fetcher.lane == late) look_for_next();
    }
  }
}

__device__ inline void dispatch_recv(const DispatchParams& p, const Begun& begun, i32 block) {
  auto& s = shared<BulkRecvShared>();
  const i32 warp = static_cast<i32>(threadIdx.x) / 32, lane = static_cast<i32>(threadIdx.x) % 32;
  const Receiver a{p, Self(p.comm), HandleArrays(p), block == 0, s.places};
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
  Fetcher fetcher{a, s.ring[warp < kRings ? warp : 0], lane};
  if (warp < kRings && lane == 0) {
    for (i32 i = 0; i < kRingImages; ++i) barrier_init(&s.ring[warp].full[i], 1);
    fence_barrier_init();
  }
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (!begin_chunk(a, worker, begun.good, step, chunk)) return;
    const i32* num_slots = s.places.num_slots[chunk % 2];
    i32 most = 0;
    for (i32 source = 0; source < kWorld; ++source) most = max(most, num_slots[source]);
    if (warp < kRings) {
      const i32 stride = p.grid.num_recv_blocks * kRings;
      fetch_slots(a, fetcher, step, chunk, block * kRings + warp, most * kWorld, stride);
      fetcher.take_all(chunk);
      bulk_wait<0>();
    }
    __syncthreads();
    if (s.places.lost) lose_rows(p, step);
    if (is_solo(p)) acknowledge(p.comm, s.places, worker, step);
    __syncthreads();  // the next chunk's headers take the place of this one's
  }
}

}  // namespace moe_p2p::device::bulk
