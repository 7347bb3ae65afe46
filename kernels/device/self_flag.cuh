// Self-flagging words: 0 means not arrived, as memory is at the start, so no flag has to follow
// behind a fence (docs/gpu.md, "Rows that flag themselves"). Senders store the complement of the
// value; the reader resets the word to 0 after reading it. All ones, a NaN in every format of rows,
// would become 0: another NaN is sent in its place.
#pragma once

#include "kernels/device/wait.cuh"

namespace moe_p2p::device {

__device__ __forceinline__ u32 flagged(u32 word) { return word == ~0u ? 1u << 31 : ~word; }
__device__ __forceinline__ bool has_come(const Vec& v) {
  return v.word[0] != 0 && v.word[1] != 0 && v.word[2] != 0 && v.word[3] != 0;
}

__device__ __forceinline__ void st_flagged_u32(void* to, u32 word) {
  st_relaxed_sys_u32(static_cast<u32*>(to), flagged(word));
}
__device__ __forceinline__ void st_flagged_v4(void* to, const Vec& v) {
  st_relaxed_sys_v4(
      to, {flagged(v.word[0]), flagged(v.word[1]), flagged(v.word[2]), flagged(v.word[3])});
}

// Waits until again(), which reads missing words again, returns that none was missing.
template <typename Again>
__device__ __forceinline__ bool wait_flagged(const DeviceComm& comm, const Again& again,
                                             const Awaited& what) {
  for (Patience patience; again();)
    if (!lasts(comm, patience, static_cast<u32>(what.step + 1), 0, what)) return false;
  return true;
}

// Resets the words that `v` was read from; returns their values.
__device__ __forceinline__ Vec take_vec(void* from, const Vec& v) {
  st_relaxed_sys_v4(from, Vec{});
  return {~v.word[0], ~v.word[1], ~v.word[2], ~v.word[3]};
}
// A word that does not arrive is taken as all ones, which are never sent as such.
__device__ __forceinline__ u32 take_word(const DeviceComm& comm, u32* from, u32 word,
                                         const Awaited& what, bool* lost = nullptr) {
  const auto again = [&] {
    if (word != 0) return false;
    word = ld_relaxed_sys_u32(from);
    return true;
  };
  if (!wait_flagged(comm, again, what) && lost) *lost = true;
  st_relaxed_sys_u32(from, 0);
  return ~word;
}

// --- words with many readers: never cleared, with the step number in the upper half ---

__device__ __forceinline__ void st_tagged(u64* to, u64 step, u32 value) {
  st_relaxed_sys_u64(to, (step + 1) << 32 | value);
}
__device__ __forceinline__ bool is_tagged(u64 word, u64 step) {
  return static_cast<u32>(word >> 32) == static_cast<u32>(step + 1);
}
// `word`: its value when it was read before.
__device__ __forceinline__ bool wait_tagged(const DeviceComm& comm, const u64* from, u64& word,
                                            const Awaited& what) {
  const auto again = [&] {
    if (is_tagged(word, what.step)) return false;
    word = ld_relaxed_sys_u64(from);
    return true;
  };
  return wait_flagged(comm, again, what);
}

}  // namespace moe_p2p::device
