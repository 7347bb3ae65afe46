// Enters an epoch of a world that changes (docs/elastic.md, section 9). One block. Kernels before
// it in the stream were of the epoch before, kernels and replays behind it are of this one. Also
// runs before the first step of a fixed world whose sums are poisoned.
#include "kernels/device/wait.cuh"

using namespace moe_p2p::device;

namespace {

inline constexpr i32 kThreads = MOE_P2P_BLOCK_THREADS;

// What only this rank's kernels use, as it was at first.
__device__ void begin_anew(const EnterParams& p) {
  const auto thread = static_cast<i32>(threadIdx.x);
  u64* words = state_words<u64>(p.comm, kWords.arrivals);
  const auto num_words = static_cast<i32>((kWords.total_bytes - kWords.arrivals) / 8);
  const auto lost_row = static_cast<i32>((kWords.lost_row - kWords.arrivals) / 8);
  const auto end_of_row = static_cast<i32>((kWords.open - kWords.arrivals) / 8);
  for (i32 i = thread; i < num_words; i += kThreads)
    words[i] = kLostSums == LostSums::kPoisoned && i >= lost_row && i < end_of_row ? ~u64{0} : 0;
  DeviceState& state = state_of(p.comm);
  auto* masks = reinterpret_cast<u32*>(state.masks);
  for (i32 rank = thread; kElastic && rank < kWorld; rank += kThreads)
    st_relaxed_sys_u32(masks + rank, static_cast<u32>(p.absent[rank / 64] >> (rank % 64) & 1));
  if (thread < 2) st_relaxed_sys_u64(&state.next_step[thread], 0);
  if (thread == 2) state.lost_tokens = 0;
  if (thread == 3) {
    state.num_absent = 0;
    for (const u64 bits : p.absent) state.num_absent += static_cast<u32>(__popcll(bits));
  }
}

}  // namespace

namespace moe_p2p {  // profilers show moe_p2p::enter

__global__ void __launch_bounds__(kThreads, 1) enter(const __grid_constant__ EnterParams p) {
  const auto thread = static_cast<i32>(threadIdx.x);
  DeviceState& state = state_of(p.comm);
  EpochTable* table = table_of(p.comm);
  const bool alone = ld_relaxed_sys_u32(&state.begun) == ld_relaxed_sys_u32(&state.ended);
  if (alone) {
    const auto* from = reinterpret_cast<const u64*>(&p.table);
    for (i32 i = thread; kElastic && i < static_cast<i32>(sizeof(EpochTable) / 8); i += kThreads)
      reinterpret_cast<u64*>(table)[i] = from[i];
    begin_anew(p);
  }
  __syncthreads();
  if (thread != 0) return;
  atomicExch(&state.aborted, 0u);  // faults of the epoch before are over
  if (alone) return;
  // A graph of a stream that the host does not know still runs. It goes on in the epoch before; no
  // kernel makes a step in this one.
  table->communicator = p.table.communicator;
  raise_fault(p.comm, kTwoAtOnce, Phase::kDispatch, p.comm.rank, 0,
              ld_relaxed_sys_u32(&state.ended), ld_relaxed_sys_u32(&state.begun));
}

}  // namespace moe_p2p
