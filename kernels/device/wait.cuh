// Waiting on a device: every wait has a deadline and looks at the abort word. A wait that fails is
// told once, in the communicator's Fault, and returns false; callers then leave out what they waited
// for, so the kernel ends and the context stays usable.
#pragma once

#include "kernels/abi/params.h"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

__device__ inline DeviceState& state_of(const DeviceComm& comm) {
  return *reinterpret_cast<DeviceState*>(comm.state);
}

__device__ inline void raise_fault(const DeviceComm& comm, FaultKind kind, Phase phase, i32 source,
                                   u64 step, u64 expected, u64 got) {
  atomicExch(&state_of(comm).aborted, 1u);
  auto* fault = reinterpret_cast<Fault*>(comm.fault);
  if (atom_cas_relaxed_sys_u32(&fault->raised, kNoFault, kind) != kNoFault) return;
  fault->phase = static_cast<i32>(phase);
  fault->source = source;
  fault->step = step;
  fault->expected = expected;
  fault->got = got;
  st_release_sys_u32(&fault->complete, 1);  // pairs with the host's look at the fault
}

// Until the word reaches `want`. Words are the low 32 bits of a count that only grows.
__device__ inline bool wait_word(const u32* word, u32 want, const DeviceComm& comm, Phase phase,
                                 i32 source, u64 step) {
  constexpr u32 kLooksBetweenClocks = 256;  // fewer: the clock costs as much as the look
  u64 deadline = 0;
  for (u32 looks = 0;; ++looks) {
    const u32 got = ld_acquire_sys_u32(word);
    if (static_cast<i32>(got - want) >= 0) return true;
    if (looks % kLooksBetweenClocks != kLooksBetweenClocks - 1) continue;
    if (ld_relaxed_sys_u32(&state_of(comm).aborted)) return false;
    const u64 now = globaltimer_ns();
    if (deadline == 0) deadline = now + comm.timeout_ns;
    if (now < deadline) continue;
    raise_fault(comm, kTimedOut, phase, source, step, want, got);
    return false;
  }
}

}  // namespace moe_p2p::device
