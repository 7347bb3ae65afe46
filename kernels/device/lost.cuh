// Output that a kernel leaves out after a failure cannot pass for a result: all its bits are ones,
// which is a NaN in every format of rows, scales and weights, and -1 in counts and indices.
#pragma once

#include "kernels/device/wait.cuh"

namespace moe_p2p::device {

// Called by one thread.
__device__ __noinline__ void lose(char* to, u64 bytes) {
  u64 at = 0;
  if (reinterpret_cast<u64>(to) % sizeof(Vec) == 0)
#pragma unroll 1
    for (; at + sizeof(Vec) <= bytes; at += sizeof(Vec)) st_na_v4(to + at, {~0u, ~0u, ~0u, ~0u});
#pragma unroll 1
  for (; at < bytes; ++at) to[at] = static_cast<char>(-1);
}

// Returns a lost row of a combine, of `bytes`. The caller writes it, for the threads of its own
// block; where sums are poisoned it was written before the first step (kernels/enter.cu).
__device__ __noinline__ const char* lost_row(const DeviceComm& comm, u64 bytes) {
  char* row = state_words<char>(comm, kWords.lost_row);
  if constexpr (kLostSums != LostSums::kPoisoned) lose(row, bytes);
  return row;
}

// Counts a token whose sum lacks what a masked rank had to send. Called by one thread. The host
// finds the total in its own memory, which it may read while kernels wait.
__device__ __noinline__ void count_lost(const DeviceComm& comm, u64 step, i32 rank) {
  Fault* fault = comm.fault.get();
  u64* counted = &state_of(comm).lost_tokens;
  const u64 mark = u64{epoch_mark(communicator_of(comm))} << kMarkBit;
  fence_sc_sys();
  st_relaxed_sys_u64(&fault->lost_step, step);
  st_relaxed_sys_u64(reinterpret_cast<u64*>(&fault->lost_rank), static_cast<u64>(rank));
  // Not every bus carries atomics to the host's memory, so threads store totals, in any order: who
  // finds that another has counted since its store stores again. Fences pair with each other: of
  // two threads the later one to count stores behind the other, or the other finds its count.
  u64 total = atomicAdd(counted, 1) + 1;
  for (u64 stored = 0; stored != total; total = ld_relaxed_sys_u64(counted)) {
    fence_sc_sys();
    st_relaxed_sys_u64(&fault->lost_tokens, mark + total);  // pairs with DeviceBackend::lost()
    stored = total;
    fence_sc_sys();
  }
}

// Returns the next row to poison of a dispatch's rows, which all threads that find something lost
// share; -1: a later step has taken over. In a call of several steps the last lost step counts.
__device__ inline i64 take_lost(const DeviceComm& comm, u64 step) {
  u64* taken = state_words<u64>(comm, kWords.lost) + slot_of(step);
  const u64 none = (step + 1) << 32;
  atomicMax(taken, none);
  const u64 row = atomicAdd(taken, 1);
  return row >> 32 == none >> 32 ? static_cast<i64>(row & 0xffffffff) : -1;
}

}  // namespace moe_p2p::device
