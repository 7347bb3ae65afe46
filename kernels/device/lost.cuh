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
// block.
__device__ __noinline__ const char* lost_row(const DeviceComm& comm, u64 bytes) {
  char* row = state_words<char>(comm, kWords.lost_row);
  lose(row, bytes);
  return row;
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
