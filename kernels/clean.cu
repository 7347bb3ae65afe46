// Takes lost ranks back: begins a new round of steps on the same memory (docs/failure.md, "Masks").
// One block. No other kernel of the communicator runs on this rank meanwhile, and those before it
// have stored all that they will ever store: so nothing of an earlier round comes behind what this
// one stores in the memory of others.
#include "kernels/device/wait.cuh"
#include "kernels/device/worker.cuh"

using namespace moe_p2p::device;

namespace {

// Of the slots and rows that this rank sends to rank l, with flags that count from S + 1 in each
// round: without this a flag of an earlier round could pass for one of this round.
__device__ void clear_flags(const DeviceComm& comm, const Self& self, i32 l) {
  const auto thread = static_cast<i32>(threadIdx.x);
  for (i32 slot = 0; slot < kSteps; ++slot)
    for (i32 i = thread; i < kChunk; i += kBlockThreads) {
      st_relaxed_sys_u32(inbox_flags_at(comm.data[l], slot, self.local) + i, 0);
      st_relaxed_sys_u32(partial_flags_at(comm.data[l], slot, self.local) + i, 0);
    }
}

// What only this rank's kernels use.
__device__ void begin_round(const DeviceComm& comm, u64 first) {
  const auto thread = static_cast<i32>(threadIdx.x);
  u64* words = state_words<u64>(comm, kWords.arrivals);
  const auto num_words = static_cast<i32>((kWords.total_bytes - kWords.arrivals) / 8);
  for (i32 i = thread; i < num_words; i += kBlockThreads) words[i] = 0;
  auto* masks = reinterpret_cast<u32*>(state_of(comm).masks);
  for (i32 rank = thread; rank < kWorld; rank += kBlockThreads)
    st_relaxed_sys_u32(masks + rank, 0);
  if (thread < 2) st_relaxed_sys_u64(&state_of(comm).next_step[thread], first + kSteps);
}

}  // namespace

namespace moe_p2p {  // profilers show moe_p2p::clean

__global__ void __launch_bounds__(kBlockThreads, 1) clean(const __grid_constant__ CleanParams p) {
  const Self self(p.comm);
  const DeviceState& state = state_of(p.comm);
  const u32 begun = ld_relaxed_sys_u32(&state.begun), ended = ld_relaxed_sys_u32(&state.ended);
  if (is_aborted(p.comm)) return;
  if (begun != ended) {  // of graphs on streams that the host does not know
    if (threadIdx.x == 0)
      raise_fault(p.comm, kTwoAtOnce, Phase::kDispatch, p.comm.rank, 0, ended, begun);
    return;
  }
  const u64 first = p.round << kRoundBit;
  for (i32 l = 0; l < kLocal; ++l)
    if ((p.gone >> l & 1) == 0) clear_flags(p.comm, self, l);
  begin_round(p.comm, first);
  __syncthreads();
  // "This rank will never read what others have sent in earlier rounds": what they wait for before
  // they use a slot in the new one (R1). Behind the flags.
  for (auto i = static_cast<i32>(threadIdx.x); i < kLocal * kSteps; i += kBlockThreads) {
    const u64 step = first + static_cast<u64>(i / kLocal);
    const i32 l = i % kLocal;
    if (p.gone >> l & 1) continue;
    u64* word = header_word(partial_at(p.comm.data[l], slot_of(step), self.local));
    st_release_sys_u64(word, step + 1);  // pairs with wait_combine() there
  }
}

}  // namespace moe_p2p
