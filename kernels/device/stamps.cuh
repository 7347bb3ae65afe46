// Time stamps of what other parts of a step between nodes wait for: `bench` splits a step into hops
// with them (benchmarks/bench/hops.py). Only in kernels compiled with MOE_P2P_STAMPS.
#pragma once

#include "kernels/device/shape.cuh"

#ifndef MOE_P2P_STAMPS
#define MOE_P2P_STAMPS 0
#endif

namespace moe_p2p::device {

// In the order of a phase. begun: the kernel before it had ended. rings, rung: the last bell's
// fence is ahead, its words are stored. arrived: the relaying block has passed on the last arrival.
enum class Stamp : i32 { kBegun, kRings, kRung, kArrived };

__device__ __forceinline__ u64 stamp_time() { return MOE_P2P_STAMPS ? globaltimer_ns() : 0; }
__device__ __forceinline__ void stamp(const DeviceComm& comm, Phase phase, u64 step, Stamp which,
                                      u64 time) {
  if constexpr (MOE_P2P_STAMPS)
    state_words<StepStamps>(comm, kWords.stamps)[step % kStampedSteps]
        .time[static_cast<i32>(phase)][static_cast<i32>(which)] = time;
}

}  // namespace moe_p2p::device
