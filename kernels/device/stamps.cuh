// Time stamps of kernels that are compiled with MOE_P2P_STAMPS: for traces (moe_p2p/tools/trace/),
// and for `bench`, which takes a pair of calls apart into hops (benchmarks/bench/hops.py). In other
// kernels nothing of this is left.
#pragma once

#include "kernels/device/shape.cuh"

#ifndef MOE_P2P_STAMPS
#define MOE_P2P_STAMPS 0
#endif
// A statement of kernels that have stamps. Were it a call of an empty function, the compiler would
// inline in another order elsewhere, and kernels without stamps would have other machine code.
#if MOE_P2P_STAMPS
#define MOE_P2P_STAMPED(...) __VA_ARGS__
#else
#define MOE_P2P_STAMPED(...)
#endif

namespace moe_p2p::device {

// In the order of a phase; several threads store each, and the last one counts. begun: the kernel
// before it had ended. sent: a sending worker has nothing left to do. rings, rung: a bell's fence
// is ahead, its words are stored. arrived: the relaying block has passed on an arrival. ended: a
// receiving worker has nothing left to do.
enum class Stamp : i32 { kBegun, kSent, kRings, kRung, kArrived, kEnded };

__device__ __forceinline__ u64 stamp_time() { return MOE_P2P_STAMPS ? globaltimer_ns() : 0; }
__device__ __forceinline__ void stamp(const DeviceComm& comm, Phase phase, u64 step, Stamp which,
                                      u64 time) {
  if constexpr (MOE_P2P_STAMPS) {
    auto* stamps = reinterpret_cast<StepStamps*>(state_words<DeviceState>(comm, 0)->stamps);
    StepStamps& of = stamps[step % kStampedSteps];
    of.step = step + 1;
    of.time[static_cast<i32>(phase)][static_cast<i32>(which)] = time;
  }
}

// Of a block's workers. A call of several chunks begins with its first step and ends with its last.
struct BlockStamps {
  const DeviceComm& comm;
  const Phase phase;
  const u64 begun_at = stamp_time();
  u64 last = 0;

  __device__ void begin(u64 first, i32 num_chunks, bool opens) {
    last = first + static_cast<u64>(num_chunks - 1);
    if (opens) stamp(comm, phase, first, Stamp::kBegun, begun_at);
  }
  // One warp of a worker stores: thousands of warps that store to one word take microseconds. In
  // bulk each warp has its own work (kernels/device/bulk.cuh).
  template <typename AnyWorker>
  __device__ void end(Stamp which) const {
    constexpr u32 kThreads = MOE_P2P_BULK ? 32 : AnyWorker::kThreads;
    if (threadIdx.x % kThreads == 0) stamp(comm, phase, last, which, stamp_time());
  }
};

}  // namespace moe_p2p::device
