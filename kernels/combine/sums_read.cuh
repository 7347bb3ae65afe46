// Combines of more chunks than steps in flight: receivers announce that they have read the sums of
// a step, senders wait for that before they use its slot again.
#pragma once

#include "kernels/device/wait.cuh"
#include "kernels/device/worker.cuh"

namespace moe_p2p::device {

// Holds e + 1 once a combine of several chunks has read the sums of step e.
__device__ inline u64* read_word(const DeviceComm& comm, u64 step) {
  return state_words<u64>(comm, kWords.read) + slot_of(step);
}

__device__ inline bool wait_sums_read(const DeviceComm& comm, u64 step) {
  if (MOE_P2P_MUTATED(kSumsOverwritten)) return true;
  return wait_word(comm, read_word(comm, step), step + 1, {Phase::kCombine, comm.rank, step});
}

// Announces that all workers have read the sums of a step: the first sending block may open the
// slot's next one, and the workers may count for it; one without tokens would otherwise be far
// ahead.
__device__ inline void say_sums_read(const CombineParams& p, const RecvWorker& worker, u64 step) {
  u32* received = state_words<u32>(p.comm, kWords.received) + slot_of(step);
  const auto last = static_cast<u32>(worker.count - 1);
  worker.sync();
  // Pairs with wait_sums_read().
  if (worker.thread == 0 && atom_inc_acq_rel_gpu_u32(received, last) == last)
    st_release_gpu_u64(read_word(p.comm, step), step + 1);
}

}  // namespace moe_p2p::device
