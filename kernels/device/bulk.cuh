// Bulk copies: a thread asks, the multiprocessor's copy unit moves up to a whole row between global
// and shared memory, and a barrier in shared memory completes when it has arrived. So a few
// multiprocessors keep as much under way as their shared memory holds, more than registers would.
//
// A buffer alternates between the thread that fills it and the threads that use it: a Ring of
// barriers, `full` and `empty`. Both sides count the same turns, so nothing is ever reset.
#pragma once

#include "kernels/device/worker.cuh"

// Warps of a block that route for its workers (kernels/dispatch/bulk_routes.cuh).
#ifndef MOE_P2P_ROUTE_WARPS
#define MOE_P2P_ROUTE_WARPS 0
#endif

namespace moe_p2p::device {

// Rows go through shared memory. Calls between nodes keep to the other way: their gateways add rows
// that several ranks push.
static_assert(kOthers == 0);
static_assert(!kSelfFlagged);  // copies put no mark on words

// Whether what a rank sends to itself stays where the caller has it, in calls of both halves. Half
// of all rows with two ranks, whose copies otherwise keep the multiprocessors busy; with more ranks
// combine waits longer for its receiving half than that saves.
inline constexpr bool kOwnStays = kLocal == 2;

// Buffers in shared memory lie at lines. Copies may begin at any 16 bytes, but are a third slower
// then.
inline constexpr i32 kBulkAlign = 128;

// --- rings ---

template <i32 kCount>
struct Ring {
  u64 full[kCount];
  u64 empty[kCount];

  // Called by one thread, before the block synchronises.
  __device__ void init(u32 num_fillers, u32 num_users) {
    for (i32 i = 0; i < kCount; ++i) {
      barrier_init(&full[i], num_fillers);
      barrier_init(&empty[i], num_users);
    }
  }
};

// The current turn in a Ring, as one side counts it.
template <i32 kCount>
struct Turn {
  i32 at = 0;
  u32 parity = 0;

  __device__ __forceinline__ void wait_full(Ring<kCount>& ring) const {
    barrier_wait(&ring.full[at], parity);
  }
  __device__ __forceinline__ bool is_full(Ring<kCount>& ring) const {
    return barrier_test(&ring.full[at], parity);
  }
  __device__ __forceinline__ void wait_empty(Ring<kCount>& ring) const {
    barrier_wait(&ring.empty[at], parity ^ 1);  // the first round finds all empty
  }
  __device__ __forceinline__ void next() {
    if (++at < kCount) return;
    at = 0;
    parity ^= 1;
  }
};

// --- flags, raised by a warp that does nothing else ---

// A fence for the whole system takes microseconds, and its thread issues no copy meanwhile. So the
// storing warps only publish how many of their items are written, and one warp of the block raises
// the flags of all written items, behind one fence: the longer fences take, the more flags share
// one.
template <i32 kFlags>  // of an item
struct Progress {
  static constexpr i32 kItems = 16;  // whose flags are noted; a power of two
  u32* flag[kItems][kFlags];         // null: none
  u32 num_written, num_raised;       // items, in their order
  u32 num_ended;                     // chunks that are written to their end

  __device__ void init() { num_written = num_raised = num_ended = 0; }
  // Called by the storing warp; waits until there is room for the flags of item number `num`. Waits
  // for its block only, as barrier_wait() and raise_flags() do.
  __device__ void wait_room(u32 num) const {
    while (num - ld_acquire_cta_u32(&num_raised) >= kItems) {
    }
  }
  // Called by one storing thread, after the copies completed; pairs with raise_flags().
  __device__ void publish(u32 num) { st_release_cta_u32(&num_written, num); }
  __device__ void publish_end(i32 chunk) {
    st_release_cta_u32(&num_ended, static_cast<u32>(chunk + 1));
  }
};

// Called by all lanes of the warp, for one chunk. progress(w): the Progress of worker w.
template <i32 kWorkers, i32 kFlags, typename ProgressOf>
__device__ inline void raise_flags(const ProgressOf& progress, i32 lane, i32 chunk, u32 word) {
  static_assert(kFlags <= 32);
  constexpr i32 kAtOnce = 32 / kFlags;  // items
  for (bool ended = false; !ended;) {
    ended = true;
    u32 num[kWorkers];
    bool any = false;
#pragma unroll
    for (i32 w = 0; w < kWorkers; ++w) {
      // In this order: a worker that has ended has published all that it wrote.
      ended = ld_acquire_cta_u32(&progress(w).num_ended) == static_cast<u32>(chunk + 1) && ended;
      num[w] = ld_acquire_cta_u32(&progress(w).num_written);
      any = num[w] != progress(w).num_raised || any;
    }
    // Lanes may have read at different times.
    ended = __all_sync(~0u, ended);
#pragma unroll
    for (i32 w = 0; w < kWorkers; ++w) num[w] = __shfl_sync(~0u, num[w], 0);
    if (!__shfl_sync(~0u, any, 0)) continue;
    __syncwarp();  // all lanes have what the first has acquired
    fence_acq_rel_sys();
#pragma unroll
    for (i32 w = 0; w < kWorkers; ++w) {
      const u32 first = progress(w).num_raised;
      for (u32 i = first + static_cast<u32>(lane / kFlags);
           lane < kAtOnce * kFlags && static_cast<i32>(num[w] - i) > 0; i += kAtOnce)
        if (u32* flag = progress(w).flag[i % Progress<kFlags>::kItems][lane % kFlags])
          st_relaxed_sys_u32(flag, word);
      __syncwarp();
      if (lane == 0 && num[w] != first) st_release_cta_u32(&progress(w).num_raised, num[w]);
    }
    __syncwarp();
  }
}

// --- a worker of three parts: one warp loads, one stores, and the others compute. Behind the
// workers one warp raises the flags of all, and another one may route. ---

inline constexpr i32 kSpareThreads = 32 * (1 + MOE_P2P_ROUTE_WARPS);
inline constexpr i32 kPipeThreads = (kBlockThreads - kSpareThreads) / SendWorker::kCount;
inline constexpr i32 kComputeThreads = kPipeThreads - 64;
inline constexpr i32 kComputeWarps = kComputeThreads / 32;
static_assert(kBlockThreads == SendWorker::kCount * kPipeThreads + kSpareThreads &&
              kPipeThreads % 32 == 0 && kPipeThreads >= kSpareThreads && kComputeWarps >= 1);

struct PipeRole {
  i32 place;   // of the worker in its block; 0 of a warp behind the workers
  i32 thread;  // among the computing threads, or of the warp
  bool loads, stores, flags, routes;

  __device__ static PipeRole of() {
    const i32 thread = static_cast<i32>(threadIdx.x) % kPipeThreads;
    const i32 place = static_cast<i32>(threadIdx.x) / kPipeThreads;
    if (place == SendWorker::kCount) {
      const bool routes = MOE_P2P_ROUTE_WARPS > 0 && thread >= 32;
      return {0, routes ? thread - 32 : thread, false, false, !routes, routes};
    }
    const bool computes = thread < kComputeThreads;
    return {place,
            computes ? thread : thread % 32,
            !computes && thread < kComputeThreads + 32,
            thread >= kComputeThreads + 32,
            false,
            false};
  }
};

// One arrival for each computing warp, after all of its threads, or as many as its first thread
// passes.
__device__ __forceinline__ void arrive_warp(u64* barrier, i32 thread, u32 num_arrivals = 1) {
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(barrier, num_arrivals);
}

}  // namespace moe_p2p::device
