// Waiting on a device: every wait has a deadline and looks at the abort words. A failed wait is
// reported once, in the communicator's Fault, and returns false; callers then leave out what they
// waited for, so the kernel ends and the context stays usable. With masks nothing is reported: the
// late rank is masked, and callers go on without it.
#pragma once

#include "kernels/abi/params.h"
#include "kernels/device/mutation.cuh"
#include "kernels/device/shape.cuh"
#include "kernels/device/stamps.cuh"

namespace moe_p2p::device {

__device__ inline DeviceState& state_of(const DeviceComm& comm) {
  return *state_words<DeviceState>(comm, 0);
}

__device__ __noinline__ void raise_fault(const DeviceComm& comm, FaultKind kind, Phase phase,
                                         i32 source, u64 step, u64 expected, u64 got) {
  // Not by a word of the fault: not every bus carries atomics to the host's memory.
  if (atomicExch(&state_of(comm).aborted, 1u) != 0) return;
  Fault* fault = comm.fault.get();
  fault->raised = kind;
  fault->phase = static_cast<i32>(phase);
  fault->source = source;
  fault->step = step;
  fault->expected = expected;
  fault->got = got;
  // Pairs with the host's read of the fault.
  st_release_sys_u32(&fault->complete, kElastic ? epoch_mark(communicator_of(comm)) : 1);
}

// Whether a fault was raised.
__device__ __forceinline__ bool is_aborted(const DeviceComm& comm) {
  return ld_relaxed_sys_u32(&state_of(comm).aborted) != 0;
}

// What a wait is waiting for; used in its error text.
struct Awaited {
  Phase phase;
  i32 source;
  u64 step;
};

// --- masks (docs/failure.md, "Masks"). A thread that has seen a mask sees it from then on. ---

__device__ inline bool is_masked(const DeviceComm& comm, i32 rank) {
  if constexpr (!kMasks) return false;
  const auto* masks = reinterpret_cast<const u32*>(state_of(comm).masks);
  return rank != comm.rank && ld_relaxed_sys_u32(masks + rank) != 0;
}

__device__ inline i32 num_missing(const DeviceComm& comm, const Awaited& what);

// Masks a rank that has not arrived by the deadline, or returns false: keep waiting. That lasts T
// (2 - 1/n) in all where n ranks are missing, as on the host (Waits::patience).
__device__ __noinline__ bool mask_late(const DeviceComm& comm, const Awaited& what, u64 late_ns) {
  if (!MOE_P2P_MUTATED(kMaskAtOnce) &&
      late_ns < comm.timeout_ns - comm.timeout_ns / static_cast<u64>(num_missing(comm, what)))
    return false;
  auto* masks = reinterpret_cast<u32*>(state_of(comm).masks);
  atomicExch(masks + what.source, 1u);
  return true;
}

// How long a wait has lasted.
struct Patience {
  u32 looks = 0;
  u64 deadline = 0;  // 0: not set yet
};
inline constexpr u32 kLooksBetweenClocks = 256;  // fewer: the clock costs as much as the look

// Called every kLooksBetweenClocks looks; returns the wait's deadline, or 0 when it is over.
__device__ __noinline__ u64 look_around(const DeviceComm& comm, u32 looks, u64 deadline, u32 want,
                                        u32 got, Awaited what) {
  if (is_aborted(comm)) return 0;
  if (is_masked(comm, what.source)) return 0;
  // The host's abort word is far: one block reads it often, and reports to the others through the
  // device's. If all blocks read it, thousands of reads would queue on the bus and every wait would
  // take as long as they do (measured: a combine of 4096 tokens 17 ms instead of 0.5).
  const u32 looks_between_aborts = blockIdx.x == 0 ? kLooksBetweenClocks : 1u << 18;
  if (looks % looks_between_aborts == 0) {
    const auto* head = reinterpret_cast<const SignalHead*>(signals_of(comm, comm.rank % kLocal));
    if (const u64 abort = ld_relaxed_sys_u64(&head->abort)) {
      raise_fault(comm, kAborted, what.phase, what.source, what.step, want, abort);
      return 0;
    }
  }
  const u64 now = globaltimer_ns();
  // This rank's own blocks are late because they wait for other ranks: those should be reported, or
  // masked.
  if (deadline == 0)
    return now + comm.timeout_ns * (what.source != comm.rank ? 1 : kMasksGrow ? 8 : 2);
  if (now < deadline) return deadline;
  if constexpr (kMasksGrow)
    if (what.source != comm.rank) return mask_late(comm, what, now - deadline) ? 0 : deadline;
  raise_fault(comm, kReady && what.source < 0 ? kRowsNotReady : kTimedOut, what.phase, what.source,
              what.step, want, got);
  return 0;
}

// Called after a failed look; returns whether to look again. want, got: the low half of a word.
__device__ __forceinline__ bool lasts(const DeviceComm& comm, Patience& patience, u32 want, u32 got,
                                      const Awaited& what) {
  if (++patience.looks % kLooksBetweenClocks != 0) return true;
  patience.deadline = look_around(comm, patience.looks, patience.deadline, want, got, what);
  return patience.deadline != 0;
}

// Waits until the word, a count that only grows, reaches `want`.
__device__ inline bool wait_word(const DeviceComm& comm, const u64* word, u64 want,
                                 const Awaited& what) {
  for (Patience patience;;) {
    const u64 got = ld_acquire_sys_u64(word);
    if (got >= want) return true;
    if (patience.looks == 0 && is_masked(comm, what.source)) return false;
    if (!lasts(comm, patience, static_cast<u32>(want), static_cast<u32>(got), what)) return false;
  }
}
// Waits until the flag of a slot or a row is the step's. A seldom used flag may be from any earlier
// step, and 32 bits cannot order steps: only one value is right.
__device__ inline bool wait_flag(const DeviceComm& comm, const u32* flag, const Awaited& what) {
  const u32 want = flag_of(what.step);
  for (Patience patience;;) {
    const u32 got = ld_acquire_sys_u32(flag);
    if (got == want) return true;
    if (patience.looks == 0 && is_masked(comm, what.source)) return false;
    if (!lasts(comm, patience, want, got, what)) return false;
  }
}

// --- words of own-node ranks: the step in a region's header ---

__device__ inline u64* header_word(char* region) { return &region_header(region)->step; }

// --- words of other nodes: flags in the node's signal memory, which one block relays to this
// device. Reads of one word of host memory are served one after the other, a microsecond each. ---

__device__ inline u64* arrival_word(const DeviceComm& comm, Phase phase, i32 slot, i32 source) {
  const i32 index = (static_cast<i32>(phase) * kSteps + slot) * kWorld + source;
  return state_words<u64>(comm, kWords.arrivals) + index;
}

// Arrivals that this rank sees by itself, in its own memory (kernels/abi/region.h): of what its
// partners send it, not its neighbours'.
__device__ inline bool sees_arrivals(const DeviceComm& comm, Phase phase, i32 source) {
  return MOE_P2P_ARRIVAL_FLAGS && kOthers > 0 && phase != Phase::kWeights &&
         source % kLocal == comm.rank % kLocal;
}
__device__ inline const u64* arrival_flags(const DeviceComm& comm, Phase phase, u64 step,
                                           i32 source, i32 part) {
  const i32 other = other_index(source / kLocal, comm.rank / kLocal);
  return reinterpret_cast<const u64*>(data_of(comm, comm.rank % kLocal) + kArrivals +
                                      arrival_flags_at(kShape, phase, slot_of(step), other, part));
}
// For one part, or with the last number there can be for all of them. Each NIC orders its flag
// behind its own share alone. All flags of the last part say that it is.
__device__ __noinline__ bool wait_flags(const DeviceComm& comm, Phase phase, u64 step, i32 source,
                                        i32 part) {
  const i32 num_flags = MOE_P2P_MUTATED(kFlagOfOneNic) ? 1 : comm.flag_words;
  for (i32 i = part + 1 < kMaxParts ? part : 0; i <= part; ++i) {
    const u64* flags = arrival_flags(comm, phase, step, source, i);
    const u64 want = arrival_flag(step, i, false);
    for (i32 nic = 0; nic < num_flags; ++nic)
      if (!wait_word(comm, flags + nic, want, {phase, source, step})) return false;
    if (ld_relaxed_sys_u64(flags) >= come(step)) break;
  }
  return true;
}
// Whether all of them are here, in no order with anything.
__device__ inline bool has_flags(const DeviceComm& comm, const Awaited& what) {
  for (i32 i = 0; i < kMaxParts; ++i) {
    const u64* flags = arrival_flags(comm, what.phase, what.step, what.source, i);
    for (i32 nic = 0; nic < comm.flag_words; ++nic)
      if (ld_relaxed_sys_u64(flags + nic) < arrival_flag(what.step, i, false)) return false;
    if (ld_relaxed_sys_u64(flags) >= come(what.step)) break;
  }
  return true;
}

// Waits for part `part` of what `source` sends in a phase of `step`; where arrivals are relayed,
// also for all parts before it.
__device__ inline bool wait_part(const DeviceComm& comm, Phase phase, u64 step, i32 source,
                                 i32 part) {
  if (sees_arrivals(comm, phase, source)) return wait_flags(comm, phase, step, source, part);
  const u64 want = step * kMaxParts + static_cast<u64>(part) + 1;
  return wait_word(comm, arrival_word(comm, phase, slot_of(step), source), want,
                   {phase, source, step});
}
// The same for all parts.
__device__ inline bool wait_arrival(const DeviceComm& comm, Phase phase, u64 step, i32 source) {
  return wait_part(comm, phase, step, source, kMaxParts - 1);
}

// The word that `source` stores when it has reached a phase.
__device__ inline const u64* word_of(const DeviceComm& comm, const Self& self, Phase phase,
                                     i32 slot, i32 source) {
  if (!self.same_node(source)) return arrival_word(comm, phase, slot, source);
  const u64 own = data_of(comm, self.local);
  return header_word(phase == Phase::kDispatch ? inbox_at(comm, own, slot, source % kLocal)
                     : phase == Phase::kCombine
                         ? partial_at(comm, own, slot, source % kLocal)
                         : weights_inbox_at(comm, own, slot, source % kLocal));
}

// Number of ranks that have not reached this phase, masked or not; at least 1.
__device__ inline i32 num_missing(const DeviceComm& comm, const Awaited& what) {
  const Self self(comm);
  i32 missing = 0;
  for (i32 source = 0; source < kWorld; ++source) {
    if (!self.same_node(source) && sees_arrivals(comm, what.phase, source)) {
      missing += !has_flags(comm, {what.phase, source, what.step});
      continue;
    }
    const u64* word = word_of(comm, self, what.phase, slot_of(what.step), source);
    const u64 want = self.same_node(source) ? what.step + 1 : come(what.step);
    missing += ld_relaxed_sys_u64(word) < want;
  }
  return max(missing - static_cast<i32>(state_of(comm).num_absent), 1);  // they send nothing
}

// Waits for what `source` dispatches to this rank or its node in `step`.
__device__ inline bool wait_dispatch(const DeviceComm& comm, const Self& self, u64 step,
                                     i32 source) {
  if (!self.same_node(source)) return wait_arrival(comm, Phase::kDispatch, step, source);
  return wait_word(
      comm, header_word(inbox_at(comm, data_of(comm, self.local), slot_of(step), source % kLocal)),
      step + 1, {Phase::kDispatch, source, step});
}
// Speaker i: a rank of this node, or after those the rank with our local index on another node. For
// own-node ranks wait_combine() only means that they have read the dispatch; rows have flags of
// their own.
inline constexpr i32 kSpeakers = kLocal + kOthers;
__device__ inline i32 speaker_rank(const Self& self, i32 i) {
  return i < kLocal ? self.node * kLocal + i
                    : other_node(i - kLocal, self.node) * kLocal + self.local;
}
__device__ inline bool speaker_masked(const DeviceComm& comm, const Self& self, i32 i) {
  if constexpr (!kMasks) return false;
  return is_masked(comm, speaker_rank(self, i));
}
__device__ inline bool wait_combine(const DeviceComm& comm, const Self& self, u64 step, i32 i) {
  const i32 source = speaker_rank(self, i);
  if (i >= kLocal) return wait_arrival(comm, Phase::kCombine, step, source);
  return wait_word(comm, header_word(partial_at(comm, data_of(comm, self.local), slot_of(step), i)),
                   step + 1, {Phase::kCombine, source, step});
}
// Waits for the weights that `source` sends with its combine of `step`.
__device__ inline bool wait_weights(const DeviceComm& comm, const Self& self, u64 step,
                                    i32 source) {
  if (!self.same_node(source)) return wait_arrival(comm, Phase::kWeights, step, source);
  return wait_word(comm, header_word(weights_region(comm, self, slot_of(step), source)), step + 1,
                   {Phase::kWeights, source, step});
}

// Rule (R1) of docs/protocol.md: the slot of `step` is free once the combine of its last use has
// arrived from all ranks. The lanes of one warp share the looks.
__device__ inline bool wait_free(const DeviceComm& comm, const Self& self, u64 step, i32 lane) {
  bool is_free = true;
  if (!MOE_P2P_MUTATED(kReuseSlotEarly) && step >= static_cast<u64>(kSteps))
    for (i32 i = lane; i < kSpeakers; i += 32) {
      const bool arrived = wait_combine(comm, self, step - static_cast<u64>(kSteps), i);
      if constexpr (kMasks) {
        is_free = (arrived || speaker_masked(comm, self, i)) && is_free;
      } else {
        is_free = arrived && is_free;
      }
    }
  return is_free;
}

// Which arrivals the blocks of a kernel wait for.
struct Relayed {
  bool free = false;  // the combine of each slot's last use
  bool dispatch = false;
  bool weights = false;
  bool combine = false;
};

// Relays the arrivals from all ranks of other nodes in a phase of `step`, part by part; in combine,
// from the speakers of this rank. Threads of a warp end their waits together, so each passes on
// what it finds while it waits. With masks, a waiting block masks the rank, which ends this too.
__device__ inline void relay_phase(const DeviceComm& comm, const Self& self, Phase phase,
                                   u64 step) {
  const Signals signals = kSignals;
  const i32 slot = slot_of(step);
  const u64 want = come(step);
  for (i32 source = static_cast<i32>(threadIdx.x); source < kWorld;
       source += static_cast<i32>(blockDim.x)) {
    if (self.same_node(source) || sees_arrivals(comm, phase, source)) continue;
    if (phase == Phase::kCombine && source % kLocal != self.local) continue;
    if constexpr (kMasks && !kMasksGrow)
      if (is_masked(comm, source)) continue;
    const u64 there = signals_of(comm, source % kLocal) + signals.flag(phase, slot, source);
    u64* here = arrival_word(comm, phase, slot, source);  // only this thread writes it
    u64 seen = *here;
    for (Patience patience; seen < want;) {
      // Pairs with Exchange::publish(); the release, with wait_part().
      const u64 word = ld_acquire_sys_u64(reinterpret_cast<const u64*>(there));
      if (word > seen) {
        st_release_gpu_u64(here, word);
        seen = word;
        if (word >= want) stamp(comm, phase, step, Stamp::kArrived, stamp_time());
      } else if constexpr (kMasksGrow) {
        if (is_masked(comm, source) || is_aborted(comm)) break;
      } else if (!lasts(comm, patience, static_cast<u32>(want), static_cast<u32>(word),
                        {phase, source, step})) {
        break;
      }
    }
  }
}

__device__ inline void relay(const DeviceComm& comm, u64 first_step, i32 num_chunks,
                             const Relayed& what) {
  const Self self(comm);
  for (u64 step = first_step; step < first_step + static_cast<u64>(num_chunks); ++step) {
    if (what.free && step >= static_cast<u64>(kSteps))
      relay_phase(comm, self, Phase::kCombine, step - static_cast<u64>(kSteps));
    if (what.dispatch) relay_phase(comm, self, Phase::kDispatch, step);
    if (what.weights) relay_phase(comm, self, Phase::kWeights, step);
    if (what.combine) relay_phase(comm, self, Phase::kCombine, step);
  }
}

}  // namespace moe_p2p::device
