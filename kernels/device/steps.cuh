// Steps that kernels open, and what they send without tokens: empty halves, doorbells.
#pragma once

#include "kernels/device/stamps.cuh"
#include "kernels/device/wait.cuh"

namespace moe_p2p::device {

// Which kernel of its communicator this one is, and the step that it may open first. Every thread
// calls ask() before its block calls join(). The words are kept as loaded: a caller waits for them
// only when it uses what follows from them, and has other loads under way by then.
struct Launch {
  u64 even, odd, launches;
  u32 aborted, ended;
  u32 begun;  // known to the thread that opens

  __device__ static bool opens() { return blockIdx.x == 0 && threadIdx.x == 0; }
  __device__ static Launch ask(const DeviceComm& comm) {
    DeviceState& state = state_of(comm);
    // Loads under way together; another block may be writing one of the words. All warps of a GPU
    // load at once: from one line the second-level cache would take microseconds to answer them
    // all.
    Launch launch;
    launch.begun = opens() ? atom_add_relaxed_gpu_u32(&state.begun, 1) : 0;
    launch.even = ld_relaxed_cta_u64(&state.next_step[0]);
    launch.odd = ld_relaxed_cta_u64(&state.next_step[1]);
    launch.launches = ld_relaxed_cta_u64(&state.launches);
    launch.aborted = ld_relaxed_cta_u32(&state.aborted);
    launch.ended = ld_relaxed_cta_u32(&state.ended);
    return launch;
  }
  __device__ u64 number() const { return launches / kLaunch; }
  __device__ u64 next_step() const {
    return number() % 2 && !MOE_P2P_MUTATED(kStepOfOneWord) ? odd : even;
  }
  // True when an earlier kernel raised a fault, or has not ended although all its blocks have
  // begun. A fault of this kernel may be seen or not. Work that is no longer allowed is left out
  // and poisoned (kernels/device/lost.cuh).
  __device__ bool is_late() const {
    // The first block of this kernel may have ended before another one calls ask().
    return aborted || static_cast<i32>(ended - static_cast<u32>(number())) < 0;
  }
  // Called by the thread that opens.
  __device__ void open(const DeviceComm& comm, i32 num_steps) const {
    st_relaxed_sys_u64(
        &state_of(comm).next_step[MOE_P2P_MUTATED(kStepOfOneWord) ? 0 : (number() + 1) % 2],
        next_step() + static_cast<u64>(num_steps));
  }
  // Called by all blocks. The last one to add makes it the next kernel's turn, so no block has to
  // find out which is last. Not at the end of a kernel, which would last until all have added; and
  // behind the first loads of a block, which would wait for the words above. Returns false if some
  // thread of the block is not `good`.
  __device__ bool join(const DeviceComm& comm, Phase phase, bool good) const {
    good = __syncthreads_and(good);  // all threads have called ask()
    if (threadIdx.x == 0)
      red_add_relaxed_gpu_u64(&state_of(comm).launches,
                              blockIdx.x == 0 ? kLaunch - (gridDim.x - 1) : 1);
    // Another kernel that has begun and not ended takes the same steps. Checked last: an atomic
    // takes longest.
    if (opens() && begun != ended)
      raise_fault(comm, kTwoAtOnce, phase, comm.rank, next_step(), ended, begun);
    return good;
  }
  // Called by the first block, when it has nothing left to do.
  __device__ static void end(const DeviceComm& comm) {
    if (opens()) atom_add_relaxed_gpu_u32(&state_of(comm).ended, 1);
  }
};

// What a block finds as it joins.
struct Begun {
  bool good;  // it may send and receive
  u64 first_step;
  bool opens;  // of a combine: steps of its own
};

__device__ inline OpenStep* open_steps(const DeviceComm& comm) {
  return state_words<OpenStep>(comm, kWords.open);
}

// The open steps, as they were read.
struct OpenSteps {
  u64 step[kSteps], closer[kSteps];

  __device__ static OpenSteps ask(const DeviceComm& comm) {
    OpenSteps open;
#pragma unroll
    for (i32 slot = 0; slot < kSteps; ++slot) {
      open.step[slot] = open_steps(comm)[slot].step;
      open.closer[slot] = ld_relaxed_cta_u64(&open_steps(comm)[slot].closer);
    }
    return open;
  }
  // Whether kernel `number` closes the dispatch of `first_step`. Its first block stores that while
  // others may not have read it yet, which makes no difference to them.
  __device__ bool closed_by(u64 number, u64 first_step) const {
    bool found = false;
#pragma unroll
    for (i32 slot = 0; slot < kSteps; ++slot)
      found = found ||
              (step[slot] == first_step + 1 && (closer[slot] == 0 || closer[slot] == number + 1));
    return found && first_step + 1 != 0;  // in a slot that was never used, `step` is 0
  }
};

// Part `index` of a region whose `num_slots` slots lie behind `front` bytes.
__device__ inline RegionPart region_part(u64 front, u64 stride, i32 num_slots, i32 index) {
  const Shape shape = kShape;  // a constant of the compiler has no address on the device
  return RegionPart::make(shape, front, stride, num_slots, index);
}

// Whether each slot of what goes to a node in a step rings for itself, so that no worker has to
// find out which is last.
__device__ inline bool rings_by_slot(const RegionPart& part) {
  return part.num_parts == 1 && part.num_slots <= kOwnBells;
}
// Rings for one slot or row; pairs with the acquire in Exchange::take(): it is written. Called by
// one thread, behind the stores of its worker.
__device__ inline void ring_slot(const DeviceComm& comm, Phase phase, u64 step, i32 gateway,
                                 i32 node, i32 index) {
  const Signals signals = kSignals;
  auto* bell = reinterpret_cast<u32*>(signals_of(comm, gateway) +
                                      signals.slot_bell(phase, slot_of(step), node, index));
  stamp(comm, phase, step, Stamp::kRings, stamp_time());
  st_release_sys_u32(bell, bell_tag_of(static_cast<u32>(step + 1)));
  stamp(comm, phase, step, Stamp::kRung, stamp_time());
}

// Pairs with the acquire in Exchange::bell(): the part is complete, but for slots that ring for
// themselves.
__device__ inline void ring(const DeviceComm& comm, Phase phase, u64 step, i32 gateway, i32 node,
                            const RegionPart& part, i32 own_bells = 0) {
  const Signals signals = kSignals;
  auto* bell = reinterpret_cast<Doorbell*>(signals_of(comm, gateway) +
                                           signals.bell(phase, slot_of(step), node));
  const BellWords words = BellWords::make(step, part, own_bells);
  stamp(comm, phase, step, Stamp::kRings, stamp_time());
  fence_acq_rel_sys();
  st_relaxed_sys_u64(&bell->part[part.index].size, words.size);
  st_relaxed_sys_u64(&bell->part[part.index].place, words.place);
  if (part.index == 0) {
    const u64 own = signals_of(comm, gateway);
    st_relaxed_sys_u32(reinterpret_cast<u32*>(own + signals.bell_tag(phase, slot_of(step), node)),
                       static_cast<u32>(step + 1));
    st_relaxed_sys_u64(reinterpret_cast<u64*>(own + signals.rung_word(phase, slot_of(step))),
                       step + 1);
  }
  stamp(comm, phase, step, Stamp::kRung, stamp_time());
}

// Hands in row `row` of this rank's combine_outbox for another node, or -1: the permission to write
// its header, which goes with the first part. Rows of short steps ring for themselves, and the
// header's bell says how many there are. Of other parts everything is counted, and the last one
// rings. The header is written once all ranks of the node have announced that they have read the
// dispatch: the destination may then overwrite it.
struct CombineHeader {
  u32 num_tokens;
  u32 flags;
  u64 stride;
};
__device__ inline void hand_in(const DeviceComm& comm, const Self& self, u64 step, i32 other,
                               const CombineHeader& header, i32 row) {
  const i32 slot = slot_of(step), node = other_node(other, self.node);
  const i32 index = row < 0 ? 0 : part_of_slot(header.stride, row);
  const RegionPart part = region_part(combine_slots_offset(), header.stride,
                                      static_cast<i32>(header.num_tokens), index);
  const bool by_slot = rings_by_slot(part);
  if (by_slot && row >= 0) return ring_slot(comm, Phase::kCombine, step, self.local, node, row);
  const auto last = static_cast<u32>(part.num_slots - (index == 0 ? 0 : 1));
  u32* words = state_words<u32>(comm, kWords.combine_outbox);
  u32* word = &words[(slot * kNodes + node) * kMaxParts + index];
  // Release: what this worker stored; acquire, for the last one: what all others stored.
  if (!by_slot && atom_inc_acq_rel_gpu_u32(word, last) != last) return;
  if (index == 0) {
    for (i32 l = 0; l < kLocal && !MOE_P2P_MUTATED(kRingWithoutNode); ++l)
      if (!wait_combine(comm, self, step, l)) return;
    char* region = combine_outbox_of(comm, self, slot, other);
    region_header(region)->describe(header.num_tokens, header.flags, header.stride);
    *header_word(region) = step + 1;
  }
  ring(comm, Phase::kCombine, step, self.local, node, part, by_slot ? part.num_slots : 0);
}

// Announces "this rank has read the dispatch of this step" to all ranks that sent some.
// `header_of(source)` goes with it: nothing but flags for an empty half. Called by all threads of a
// block or of a worker, each with its number.
template <typename HeaderOf>
__device__ inline void say_read(const DeviceComm& comm, const Self& self, u64 step, i32 thread,
                                i32 num_threads, const HeaderOf& header_of) {
  const i32 slot = slot_of(step);
#pragma unroll 1
  for (i32 l = thread; l < kLocal; l += num_threads) {
    if constexpr (kMasks)
      if (is_masked(comm, self.node * kLocal + l)) continue;
    char* region = partial_at(comm, data_of(comm, l), slot, self.index_at(l));
    const CombineHeader header = header_of(self.node * kLocal + l);
    region_header(region)->describe(header.num_tokens, header.flags, header.stride);
    st_release_sys_u64(header_word(region), step + 1);  // pairs with wait_combine() there
  }
  // Done by other threads, if there are any: hand_in() takes as long as the fence before that word.
  if constexpr (kOthers > 0)
    for (i32 other = num_threads - 1 - thread; other < kOthers; other += num_threads) {
      const i32 source = other_node(other, self.node) * kLocal + self.local;
      if constexpr (kMasks)
        if (is_masked(comm, source)) continue;
      hand_in(comm, self, step, other, header_of(source), -1);
    }
}

struct EmptyHeader {
  __device__ CombineHeader operator()(i32) const { return {0, kEmpty, 0}; }
};

// Sends the dispatch of a step that carries no tokens. Called by one block.
__device__ __noinline__ void send_empty_dispatch(const DeviceComm& comm, const Self& self,
                                                 u64 step) {
  const i32 slot = slot_of(step);
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += static_cast<i32>(blockDim.x)) {
    if constexpr (kMasks)
      if (speaker_masked(comm, self, i)) continue;
    char* region = i < kLocal ? inbox_at(comm, data_of(comm, i), slot, self.index_at(i))
                              : outbox_of(comm, self, slot, i - kLocal);
    region_header(region)->describe(0, kEmpty, 0);
    st_release_sys_u64(header_word(region), step + 1);  // pairs with wait_dispatch() there
    if (i >= kLocal)
      ring(comm, Phase::kDispatch, step, self.local, other_node(i - kLocal, self.node),
           region_part(sizeof(RegionHeader), 0, 0, 0));
  }
}

}  // namespace moe_p2p::device
