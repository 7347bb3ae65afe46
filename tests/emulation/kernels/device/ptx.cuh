// kernels/device/ptx.cuh for a CPU: the same names, on the machine of tests/emulation.
#pragma once

#include <chrono>
#include <source_location>

#include "kernels/abi/shape.h"
#include "tests/emulation/cuda.h"

namespace moe_p2p::device {

using namespace abi;

struct alignas(16) Vec {
  u32 word[4];
};

// Returns p, at which a GPU accesses so many bytes at once, and the code below some of them.
template <u64 kBytes, typename T>
T* aligned(T* p) {
  if (reinterpret_cast<u64>(p) % kBytes != 0) emulation::moe_p2p_misaligned(p, kBytes);
  return p;
}

// --- what orders memory. Any line of a kernel that calls it can be left out, as a mutation. ---

using Site = std::source_location;
inline bool orders(const Site& site) { return emulation::moe_p2p_orders(site); }
// Called before the word is written.
inline void release(const void* word, bool to_system, const Site& site) {
  if (orders(site)) {
    emulation::moe_p2p_release(word, to_system);
  } else {
    emulation::moe_p2p_marked(word);
  }
}
// Called after it is read.
inline void acquire(const void* word, const Site& site) {
  if (orders(site)) emulation::moe_p2p_acquire(word);
}

// --- words shared between devices and the host. A thread that reads one lets others go on. ---

template <typename T>
T ld_word(const T* p) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
template <typename T>
void st_word(T* p, T v) {
  __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
}
template <typename T>
T ld_relaxed(const T* p) {
  emulation::moe_p2p_pause();
  const T v = ld_word(p);
  emulation::moe_p2p_saw(p);
  return v;
}
inline void st_release_sys_u32(u32* p, u32 v, Site site = Site::current()) {
  release(p, true, site);
  emulation::moe_p2p_signal_host(p);
  st_word(p, v);
}
inline void st_release_sys_u64(u64* p, u64 v, Site site = Site::current()) {
  release(p, true, site);
  emulation::moe_p2p_signal_host(p);
  st_word(p, v);
}
inline void st_release_gpu_u64(u64* p, u64 v, Site site = Site::current()) {
  release(p, false, site);
  st_word(p, v);
}
inline void st_relaxed_sys_u32(u32* p, u32 v) {
  emulation::moe_p2p_marked(p);
  st_word(p, v);
}
inline void st_relaxed_sys_u64(u64* p, u64 v) {
  emulation::moe_p2p_signal_host(p);
  emulation::moe_p2p_marked(p);
  st_word(p, v);
}
inline void fence_acq_rel_sys(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_fence();
}
inline void fence_sc_sys() {
  emulation::moe_p2p_fence();
  asm volatile("mfence" ::: "memory");
}
inline u32 ld_relaxed_sys_u32(const u32* p) { return ld_relaxed(p); }
inline u64 ld_relaxed_sys_u64(const u64* p) { return ld_relaxed(p); }
inline u32 ld_relaxed_cta_u32(const u32* p) { return ld_relaxed(p); }
inline u64 ld_relaxed_cta_u64(const u64* p) { return ld_relaxed(p); }
inline u32 ld_acquire_sys_u32(const u32* p, Site site = Site::current()) {
  const u32 v = ld_relaxed(p);
  acquire(p, site);
  return v;
}
inline u64 ld_acquire_sys_u64(const u64* p, Site site = Site::current()) {
  const u64 v = ld_relaxed(p);
  acquire(p, site);
  return v;
}
inline void st_release_cta_u32(u32* p, u32 v, Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_arrive(p);
  emulation::moe_p2p_st_block(p, v);
}
inline u32 ld_acquire_cta_u32(const u32* p, Site site = Site::current()) {
  emulation::moe_p2p_pause();
  const u32 v = emulation::moe_p2p_ld_block(p);
  if (orders(site)) emulation::moe_p2p_depart(p);
  return v;
}
inline void red_add_relaxed_gpu_u64(u64* p, u64 v) { __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); }
inline void red_add_release_gpu_u32(u32* p, u32 v, Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_release_too(p);
  __atomic_fetch_add(aligned<4>(p), v, __ATOMIC_SEQ_CST);
}
inline u32 atom_add_relaxed_gpu_u32(u32* p, u32 v) {
  return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);
}
inline u32 atom_inc_acq_rel_gpu_u32(u32* p, u32 last, Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_release_too(p);
  u32 old = ld_word(p);
  while (!__atomic_compare_exchange_n(p, &old, old >= last ? 0 : old + 1, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST)) {
  }
  acquire(p, site);
  return old;
}

// --- rows ---

inline Vec ld_nc_v4(const void* p) { return *static_cast<const Vec*>(p); }
inline Vec ld_na_v4(const void* p) { return *static_cast<const Vec*>(p); }
inline void st_na_v4(void* p, const Vec& v) { *static_cast<Vec*>(p) = v; }

struct alignas(8) Pair {
  u32 word[2];
};
inline Pair ld_na_v2(const void* p) { return *static_cast<const Pair*>(p); }
inline void st_na_v2(void* p, const Pair& v) { *static_cast<Pair*>(p) = v; }
inline u32 ld_na_u32(const void* p) { return *static_cast<const u32*>(p); }
inline void st_na_u32(void* p, u32 v) { *static_cast<u32*>(p) = v; }
inline Pair ld_relaxed_sys_v2(const void* p) {
  const auto* words = static_cast<const u32*>(aligned<8>(p));
  emulation::moe_p2p_pause();
  return {{ld_word(words), ld_word(words + 1)}};
}
inline void st_relaxed_sys_v2(void* p, const Pair& v) {
  auto* const words = static_cast<u32*>(aligned<8>(p));
  for (int i = 0; i < 2; ++i) st_word(words + i, v.word[i]);
}

inline Vec ld_relaxed_sys_v4(const void* p) {
  const auto* words = static_cast<const u32*>(aligned<16>(p));
  emulation::moe_p2p_pause();
  return {{ld_word(words), ld_word(words + 1), ld_word(words + 2), ld_word(words + 3)}};
}
inline Vec ld_acquire_sys_v4(const void* p, Site site = Site::current()) {
  const Vec v = ld_relaxed_sys_v4(p);
  acquire(p, site);
  return v;
}
inline void st_relaxed_sys_v4(void* p, const Vec& v) {
  auto* const words = static_cast<u32*>(aligned<16>(p));
  for (int i = 0; i < 4; ++i) st_word(words + i, v.word[i]);
}

// --- time, and kernels that overlap ---

inline u64 globaltimer_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::nanoseconds(now).count());
}
inline void griddepcontrol_wait(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_wait_for_kernels();
}
inline void use(u32) {}
inline void griddepcontrol_launch_dependents() { emulation::moe_p2p_let_next_begin(); }
inline void bar_sync(i32 id, i32 num_threads) {
  emulation::moe_p2p_meet(id, static_cast<unsigned>(num_threads), true);
}

// --- numbers ---

// Rounds |x| to `bits` bits of mantissa behind the first, to nearest even, no finer than 2^least.
inline float round_to(float x, int bits, int least) {
  int exponent;
  std::frexp(x, &exponent);
  const int unit = max(exponent - 1 - bits, least);
  return std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
}
inline u32 to_e4m3(float x) {
  const u32 sign = __float_as_uint(x) >> 24 & 0x80;
  if (std::isnan(x)) return 0x7f;
  const float size = min(round_to(std::fabs(x), 3, -9), 448.0f);
  if (size < 0x1p-6f) return sign | static_cast<u32>(size * 0x1p9f);
  const u32 bits = __float_as_uint(size);
  return sign | ((bits >> 20) - (120 << 3));
}
inline u16 cvt_rn_satfinite_e4m3x2(float low, float high) {
  return static_cast<u16>(to_e4m3(low) | to_e4m3(high) << 8);
}
inline u32 to_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 abs_bf16x2(u32 x) { return x & 0x7fff7fff; }
inline float max_nan_f32(float a, float b) {
  return std::isnan(a) || std::isnan(b) ? __uint_as_float(0x7fffffff) : std::fmax(a, b);
}
inline u32 max_nan_bf16x2(u32 a, u32 b) {
  const auto most = [](u32 x, u32 y) {
    return __float_as_uint(max_nan_f32(__uint_as_float(x), __uint_as_float(y))) & 0xffff0000;
  };
  return most(a & 0xffff0000, b & 0xffff0000) | most(a << 16, b << 16) >> 16;
}
inline u32 cvt_rn_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline u32 to_f16(float x) { return std::bit_cast<u16>(static_cast<_Float16>(x)); }
inline u32 cvt_rn_f16x2(float low, float high) { return to_f16(low) | to_f16(high) << 16; }
inline float cvt_f32_f16(u16 x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }

// --- shared memory of a block ---

inline char* shared_memory() { return emulation::moe_p2p_thread().shared; }

// --- barriers ---

inline void barrier_init(u64* barrier, u32 num_arrivals) {
  emulation::moe_p2p_barrier_init(barrier, num_arrivals);
}
inline void barrier_expect(u64* barrier, u32 bytes) {
  emulation::moe_p2p_barrier_expect(barrier, bytes);
}
inline void barrier_arrive(u64* barrier, u32 num_arrivals = 1) {
  for (u32 i = 0; i < num_arrivals; ++i) barrier_expect(barrier, 0);
}
inline bool barrier_test(u64* barrier, u32 parity) {
  emulation::moe_p2p_pause();
  return emulation::moe_p2p_barrier_test(barrier, parity != 0);
}
inline void barrier_wait(u64* barrier, u32 parity) {
  while (!barrier_test(barrier, parity)) {
  }
}

// --- copies ---

inline void check_aligned(const void* to, const void* from, u32 bytes) {
  aligned<16>(to);
  aligned<16>(from);
  aligned<16>(static_cast<const char*>(to) + bytes);  // as long
}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  check_aligned(to, from, bytes);
  emulation::moe_p2p_load(to, from, bytes, barrier);
}
inline void bulk_store(void* to, const void* from, u32 bytes) {
  check_aligned(to, from, bytes);
  emulation::moe_p2p_store(to, from, bytes);
}
inline void bulk_commit() { emulation::moe_p2p_commit(); }
template <i32 kNumLeft>
void bulk_wait(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_wait_stores(kNumLeft, /*written=*/true);
}
template <i32 kNumLeft>
void bulk_wait_read(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_wait_stores(kNumLeft, /*written=*/false);
}
inline void fence_shared_for_bulk(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_fence_shared();
}
inline void fence_global_for_bulk(Site site = Site::current()) {
  if (orders(site)) emulation::moe_p2p_fence_global();
}
inline void fence_barrier_init() {}

}  // namespace moe_p2p::device
