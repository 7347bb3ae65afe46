// Bulk copies: a thread asks, the multiprocessor's copy unit moves up to a whole row between global and
// shared memory, and a barrier in shared memory tells when it is there. So a few multiprocessors keep as
// much under way as their shared memory holds, which registers would not.
//
// A buffer goes round between one who fills it and those who use it: a Ring of barriers, `full` and
// `empty`. Both sides count the same turns, so nothing is ever reset.
#pragma once

#include "kernels/device/worker.cuh"

namespace moe_p2p::device {

// Rows go through shared memory. Nodes with neighbours keep to the other way: their gateways add rows
// that several ranks hand in.
static_assert(kOthers == 0);
static_assert(!kSelfFlagged);  // copies put no mark on words

// The more ranks, the longer copies take until they are written, and a fence with them: figures are in
// docs/tuning.md.
inline constexpr bool kManyRanks = kLocal > 4;

// --- rings ---

template <i32 kCount>
struct Ring {
  u64 full[kCount];
  u64 empty[kCount];

  // By one thread, before the block meets.
  __device__ void init(u32 num_fillers, u32 num_users) {
    for (i32 i = 0; i < kCount; ++i) {
      barrier_init(&full[i], num_fillers);
      barrier_init(&empty[i], num_users);
    }
  }
};

// Whose turn it is in a Ring, as one side counts it.
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

// --- flags that go up late ---

// A fence for the whole system takes longer than a row, so flags go up several at a time: those of one
// batch once the copies of the next are on their way, or all when nothing else is to be done. Of one
// thread, which has stored what they are for; kGroups groups of copies for each flag.
template <i32 kBatch, i32 kGroups>
struct LateFlags {
  static constexpr i32 kMost = 2 * kBatch;
  u32** flag;  // [kMost], null: none
  i32 num = 0, num_raised = 0;

  __device__ void raise(i32 count, u32 word) {
    fence_acq_rel_sys();
    for (; count > 0; --count, ++num_raised)
      if (u32* one = flag[num_raised % kMost]) st_relaxed_sys_u32(one, word);
  }
  __device__ void add(u32* one, u32 word) {
    flag[num++ % kMost] = one;
    if (num - num_raised < kMost) return;
    bulk_wait<kBatch * kGroups>();
    raise(kBatch, word);
  }
  __device__ void raise_all(u32 word) {
    if (num == num_raised) return;
    bulk_wait<0>();
    raise(num - num_raised, word);
  }
};

// --- a worker of three parts: one warp loads, one stores, and the others compute ---

inline constexpr i32 kComputeThreads = 128;
inline constexpr i32 kComputeWarps = kComputeThreads / 32;
inline constexpr i32 kPipeThreads = kComputeThreads + 64;

struct PipeRole {
  i32 place;   // of the worker in its block
  i32 thread;  // among the computing threads, or of the warp
  bool loads, stores;

  __device__ static PipeRole of() {
    const i32 thread = static_cast<i32>(threadIdx.x) % kPipeThreads;
    const bool computes = thread < kComputeThreads;
    return {static_cast<i32>(threadIdx.x) / kPipeThreads, computes ? thread : thread % 32,
            !computes && thread < kComputeThreads + 32, thread >= kComputeThreads + 32};
  }
  // Of the computing threads.
  __device__ __forceinline__ void sync() const { bar_sync(place + 1, kComputeThreads); }
};

// One arrival for each computing warp, after all of its threads, or as many as its first thread says.
__device__ __forceinline__ void arrive_warp(u64* barrier, i32 thread, u32 num_arrivals = 1) {
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(barrier, num_arrivals);
}

}  // namespace moe_p2p::device
