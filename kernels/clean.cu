// Takes lost ranks back: begins a new round of steps on the same memory (docs/failure.md, "Masks").
// One block. No other kernel of the communicator runs on this rank meanwhile, and those before it
// have read and stored all that they ever will.
#include "kernels/device/wait.cuh"

using namespace moe_p2p::device;

namespace {

inline constexpr i32 kThreads = MOE_P2P_BLOCK_THREADS;

// Words of `source` at the rank with this memory.
__device__ RegionHeader* words_at(const DeviceComm& comm, u64 data, i32 source) {
  return region_header(partial_at(comm, data, 0, source));
}

// Flags of the slots and rows that `source` sends to the rank with this memory.
__device__ void clear_flags(const DeviceComm& comm, u64 data, i32 source) {
  for (i32 slot = 0; slot < kSteps; ++slot)
    for (auto i = static_cast<i32>(threadIdx.x); i < chunk_of(comm); i += kThreads) {
      st_relaxed_sys_u32(inbox_flags_at(comm, data, slot, source) + i, 0);
      st_relaxed_sys_u32(partial_flags_at(comm, data, slot, source) + i, 0);
    }
}

// What only this rank's kernels use.
__device__ void begin_round(const DeviceComm& comm, u64 first) {
  const auto thread = static_cast<i32>(threadIdx.x);
  u64* words = state_words<u64>(comm, kWords.arrivals);
  const auto num_words = static_cast<i32>((kWords.total_bytes - kWords.arrivals) / 8);
  for (i32 i = thread; i < num_words; i += kThreads) words[i] = 0;
  auto* masks = reinterpret_cast<u32*>(state_of(comm).masks);
  for (i32 rank = thread; rank < kWorld; rank += kThreads) st_relaxed_sys_u32(masks + rank, 0);
  if (thread < 2) st_relaxed_sys_u64(&state_of(comm).next_step[thread], first + kSteps);
}

}  // namespace

namespace moe_p2p {  // profilers show moe_p2p::clean

__global__ void __launch_bounds__(kThreads, 1) clean(const __grid_constant__ CleanParams p) {
  const Self self(p.comm);
  const auto thread = static_cast<i32>(threadIdx.x);
  const DeviceState& state = state_of(p.comm);
  const u32 begun = ld_relaxed_sys_u32(&state.begun), ended = ld_relaxed_sys_u32(&state.ended);
  if (is_aborted(p.comm)) return;
  if (begun != ended) {  // of graphs on streams that the host does not know
    __syncthreads();     // all threads have looked at `aborted`
    if (thread == 0)
      raise_fault(p.comm, kTwoAtOnce, Phase::kDispatch, p.comm.rank, 0, ended, begun);
    return;
  }
  const u64 own = data_of(p.comm, self.local), first = p.round << kRoundBit;
  const auto is_here = [&](i32 l) { return (p.gone >> l & 1) == 0; };
  // Flags are low halves of steps, and begin anew in each round: flags of earlier rounds must not
  // pass for later ones. But while one of two ranks has not cleaned, its kernels may still read or
  // store them. So the later one clears what both have at each other; at once, both do.
  for (i32 l = thread; l < kLocal; l += kThreads)
    if (is_here(l))
      st_release_sys_u64(&words_at(p.comm, data_of(p.comm, l), self.local)->cleaning, p.round);
  fence_sc_sys();
  __syncthreads();
  fence_sc_sys();
  for (i32 l = 0; l < kLocal; ++l) {
    const bool later = ld_acquire_sys_u64(&words_at(p.comm, own, l)->cleaning) >= p.round;
    if (!is_here(l) || !__syncthreads_or(later)) continue;
    clear_flags(p.comm, own, l);
    clear_flags(p.comm, data_of(p.comm, l), self.local);
  }
  begin_round(p.comm, first);
  __syncthreads();
  // "This rank reads nothing more of earlier rounds, and its memory is cleared": others wait for it
  // before they use a slot in this round (R1).
  for (i32 i = thread; i < kLocal * kSteps; i += kThreads) {
    const u64 step = first + static_cast<u64>(i / kLocal);
    if (!is_here(i % kLocal)) continue;
    u64* word =
        header_word(partial_at(p.comm, data_of(p.comm, i % kLocal), slot_of(step), self.local));
    st_release_sys_u64(word, step + 1);  // pairs with wait_combine() there
  }
}

}  // namespace moe_p2p
