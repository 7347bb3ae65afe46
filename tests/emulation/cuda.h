// CUDA's language and functions, as far as kernels/ use them, for a C++ compiler. Included ahead of
// a kernel's source.
#pragma once

// A name that is not in kernels/device/mutation.cuh does not compile.
#define MOE_P2P_MUTATED(name) \
  (static_cast<void>(moe_p2p::device::Mutation::name), moe_p2p::emulation::moe_p2p_mutated(#name))

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/device/mutation.cuh"
#include "tests/emulation/machine.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

#define threadIdx (moe_p2p::emulation::moe_p2p_thread().thread)
#define blockIdx (moe_p2p::emulation::moe_p2p_thread().block)
#define blockDim (moe_p2p::emulation::moe_p2p_thread().block_dim)
#define gridDim (moe_p2p::emulation::moe_p2p_thread().grid_dim)

namespace moe_p2p::emulation {

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof value <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
inline unsigned lane() { return threadIdx.x % 32; }

}  // namespace moe_p2p::emulation

template <typename A, typename B>
constexpr auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }  // compiled without contraction
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline int __ffsll(unsigned long long x) { return x ? std::countr_zero(x) + 1 : 0; }
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
template <typename T>
T __ldg(const T* p) {
  return *p;
}

// --- a warp ---

inline void __syncwarp(unsigned mask = ~0u) { moe_p2p::emulation::moe_p2p_warp(mask, 0, true); }
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* votes = moe_p2p::emulation::moe_p2p_warp(mask, vote, false);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && votes[lane]) bits |= 1u << lane;
  return bits;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == mask; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t mine = moe_p2p::emulation::to_bits(value);
  const uint64_t* values = moe_p2p::emulation::moe_p2p_warp(mask, mine, false);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && values[lane] == mine) bits |= 1u << lane;
  return bits;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  const uint64_t bits = moe_p2p::emulation::to_bits(value);
  return moe_p2p::emulation::from_bits<T>(
      moe_p2p::emulation::moe_p2p_warp(mask, bits, false)[from % 32]);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return __shfl_sync(mask, value, static_cast<int>(moe_p2p::emulation::lane()) ^ distance);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
  const int lane = static_cast<int>(moe_p2p::emulation::lane());
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}

// --- a block ---

inline void __syncthreads() { moe_p2p::emulation::moe_p2p_meet(0, 0, true); }
inline int __syncthreads_and(bool vote) { return moe_p2p::emulation::moe_p2p_meet(0, 0, vote).all; }
inline int __syncthreads_or(bool vote) {
  return moe_p2p::emulation::moe_p2p_meet(0, 0, vote).count != 0;
}
inline int __syncthreads_count(bool vote) {
  return static_cast<int>(moe_p2p::emulation::moe_p2p_meet(0, 0, vote).count);
}

// --- atomics: visible to all ranks' threads ---

template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> value) {
  return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> value) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old < value &&
         !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
template <typename T>
T atomicOr(T* p, std::type_identity_t<T> value) {
  return __atomic_fetch_or(p, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> value) {
  return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);
}
