// fp8 in blocks, the arithmetic of hosts and kernels: kScaleBlock values share a scale. Of a block
// with amax = max(|x|, kLeastAmax), values are e4m3(x * (448 / amax)) and the scale is amax / 448;
// or this scale rounded up to a power of two, and values e4m3(x / scale). A block that holds an inf
// or a NaN has amax = inf. moe_p2p/machine/fp8.py is the same in torch, kernels/triton/e4m3.py in
// Triton; tests/package/test_e4m3.py compares them.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

inline constexpr float kMaxE4M3 = 448.0f;      // the largest finite one
inline constexpr float kLeastAmax = 1e-4f;     // keeps the scale of a block of zeros from being 0
inline constexpr u32 kInfinity = 0x7f800000u;  // as fp32, as all bits below
inline constexpr u32 kMantissa = 0x007fffffu;

MOE_P2P_HD constexpr u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
MOE_P2P_HD constexpr float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// To nearest, whatever NVRTC is told of divisions. quotient(amax, kMaxE4M3) is a block's scale,
// quotient(kMaxE4M3, amax) what its values are multiplied by.
MOE_P2P_HD float quotient(float over, float under) {
#if defined(__CUDACC_RTC__)
  return __fdiv_rn(over, under);
#else
  return over / under;
#endif
}
// The smallest power of two that is not less than x; x is positive and normal, or inf. below: other
// than kMantissa only in a mutation (kernels/device/mutation.cuh).
MOE_P2P_HD constexpr float power_of_two_from(float x, u32 below = kMantissa) {
  return float_of((bits_of(x) + below) & kInfinity);
}
// 1 / x for a power of two from 2^-126 to 2^126; 0 for inf.
MOE_P2P_HD constexpr float inverse_of_power_of_two(float x) {
  const i32 bits = 0x7f000000 - static_cast<i32>(bits_of(x));
  return float_of(static_cast<u32>(bits > 0 ? bits : 0));
}

// x rounded to nearest even, saturating; a NaN is 0x7f. Kernels have an instruction for it.
MOE_P2P_HD constexpr u32 e4m3_of(float x) {
  const u32 bits = bits_of(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6 the format is denormal with steps of 2^-9: adding 2^14 leaves the rounded number of
  // steps in the low mantissa bits.
  const u32 denormal = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
  const u32 normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  u32 code = magnitude < 0x3c800000u ? denormal : normal;
  code = magnitude > 0x43e00000u ? 0x7eu : code;       // saturates at 448
  return magnitude > kInfinity ? 0x7fu : sign | code;  // NaN has no sign
}

}  // namespace moe_p2p::abi
