// Values in registers: 16 bytes of a row to fp32 and back, and the fp8 quantizer, with the
// arithmetic of kernels/abi/block16.h and kernels/abi/e4m3.h.
#pragma once

#include "kernels/abi/block16.h"
#include "kernels/abi/e4m3.h"
#include "kernels/device/mutation.cuh"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

// Conversion of one Vec. The general form is for types that are only copied.
template <DType kType>
struct Values {
  static constexpr i32 kCount = 16;
  __device__ static void load(const Vec&, float*) {}
};

template <>
struct Values<DType::kBFloat16> {
  static constexpr i32 kCount = 8;
  __device__ static void load(const Vec& v, float* f) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      f[2 * i] = __uint_as_float(v.word[i] << 16);
      f[2 * i + 1] = __uint_as_float(v.word[i] & 0xffff0000u);
    }
  }
  __device__ static Vec store(const float* f) {
    Vec v;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) v.word[i] = cvt_rn_bf16x2(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<DType::kFloat16> {
  static constexpr i32 kCount = 8;
  __device__ static void load(const Vec& v, float* f) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      f[2 * i] = cvt_f32_f16(static_cast<u16>(v.word[i]));
      f[2 * i + 1] = cvt_f32_f16(static_cast<u16>(v.word[i] >> 16));
    }
  }
  __device__ static Vec store(const float* f) {
    Vec v;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) v.word[i] = cvt_rn_f16x2(f[2 * i], f[2 * i + 1]);
    return v;
  }
};

template <>
struct Values<DType::kFloat32> {
  static constexpr i32 kCount = 4;
  __device__ static void load(const Vec& v, float* f) {
#pragma unroll
    for (i32 i = 0; i < 4; ++i) f[i] = __uint_as_float(v.word[i]);
  }
  __device__ static Vec store(const float* f) {
    Vec v;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) v.word[i] = __float_as_uint(f[i]);
    return v;
  }
};

// One block is one Vec.
template <>
struct Values<DType::kBlock16> {
  static constexpr i32 kCount = kBlock16;
  // Adds its values; products with a scale are exact.
  __device__ static void add(const Vec& v, float* acc) {
    const float scale = scale_of(v);
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const float low = float_of((v.word[i] & 0xfffeu) | kLow);
      const float high = float_of(__funnelshift_r(v.word[i], kHigh >> 15, 17));
      acc[2 * i] =
          __fmaf_rn(__fadd_rn(low, -float_of(kLow | kBlock16Zero << 1)), scale, acc[2 * i]);
      acc[2 * i + 1] =
          __fmaf_rn(__fadd_rn(high, -float_of(kHigh | kBlock16Zero)), scale, acc[2 * i + 1]);
    }
  }
  __device__ static Vec store(const float* f) {
    constexpr float kMagic = 0x1p23f + kBlock16Zero;  // x + it: x + kBlock16Zero in the low bits
    float most = 0.0f;
#pragma unroll
    for (i32 j = 0; j < kCount; ++j) most = max_nan_f32(most, fabsf(f[j]));
    const u32 code = block16_code(
        bits_of(most), MOE_P2P_MUTATED(kBlockOfOnes) ? kBlock16Carry / 3 : kBlock16Carry);
    const float multiplier = block16_multiplier(code);
    const u32 spare = code | code << 15;
    Vec v;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const u32 low = bits_of(__fmaf_rn(f[2 * i], multiplier, kMagic));
      const u32 high = bits_of(__fmaf_rn(f[2 * i + 1], multiplier, kMagic));
      // The exponent of kMagic is shifted out of `high`, and taken away of `low`.
      const u32 mine = (spare >> 2 * i & 0x10001u) | (0u - (bits_of(0x1p23f) << 1));
      v.word[i] = code == kBlock16Nan ? 0x80018001u : (high << 17) + (low << 1) + mine;
    }
    return v;
  }

 private:
  // Exponents of the integers as they are loaded, 2^-96 times their size: so a scale that is 2^96
  // times its size is NaN by itself where the code is kBlock16Nan.
  static constexpr u32 kHigh = 54u << 23, kLow = 53u << 23;
  static_assert(float_of(kHigh) == 0x1p-73f && float_of(kLow) == 0x1p-74f);

  __device__ static float scale_of(const Vec& v) {
    u32 spare = 0;
#pragma unroll
    for (i32 i = 3; i >= 0; --i) spare = (spare << 2) + (v.word[i] & 0x10001u);
    const u32 code = spare + (spare >> 15);  // in the low 8 bits
    return float_of((code << 22) + ((kBlock16Least + 2 * 96) << 22));
  }
};

// Returns the largest magnitude in kNum Vecs; NaN if there is one.
template <DType kType, i32 kNum>
__device__ __forceinline__ float max_magnitude(const Vec* v) {
  float most = 0.0f;
  if constexpr (kType == DType::kBFloat16) {  // pairs as they are
    u32 pair = 0;
#pragma unroll
    for (i32 i = 0; i < 4 * kNum; ++i)
      pair = max_nan_bf16x2(pair, abs_bf16x2(v[i / 4].word[i % 4]));
    most = max_nan_f32(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  } else {
    constexpr i32 kCount = Values<kType>::kCount;
#pragma unroll
    for (i32 i = 0; i < kNum; ++i) {
      float f[kCount];
      Values<kType>::load(v[i], f);
#pragma unroll
      for (i32 j = 0; j < kCount; ++j) most = max_nan_f32(most, fabsf(f[j]));
    }
  }
  return most;
}

// For kNum blocks of 128 values, each held by the same 8 neighbouring threads: amax[j] is the
// largest magnitude of this thread's values of block j, and becomes their multiplier. A thread
// divides once: of the eight, thread j for block j's multiplier, and thread 4 + j for its scale,
// which it returns. Called by all 32 threads of a warp.
template <ScaleFormat kFormat, i32 kNum>
__device__ __forceinline__ float find_scales(float (&amax)[kNum]) {
  static_assert(kNum == 1 || kNum == 2 || kNum == 4);
#pragma unroll
  for (i32 lane = 4; lane > 0; lane >>= 1)
#pragma unroll
    for (i32 j = 0; j < kNum; ++j)
      amax[j] = max_nan_f32(amax[j], __shfl_xor_sync(~0u, amax[j], lane));
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const float even = lane & 2 ? amax[2 % kNum] : amax[0];
  const float odd = lane & 2 ? amax[3 % kNum] : amax[1 % kNum];
  // fminf() drops a NaN: a block that holds one has the scale of a block that holds an inf, inf.
  const float mine = fminf(max_nan_f32(lane & 1 ? odd : even, kLeastAmax), float_of(kInfinity));
  const bool multiplies = lane % 8 < 4;
  float found;
  if constexpr (kFormat == ScaleFormat::kFloat32) {
    found = quotient(multiplies ? kMaxE4M3 : mine, multiplies ? mine : kMaxE4M3);
  } else {
    const u32 below = MOE_P2P_MUTATED(kScaleRoundedDown) ? kMantissa - 16 : kMantissa;
    found = power_of_two_from(quotient(mine, kMaxE4M3), below);
    if (multiplies) found = inverse_of_power_of_two(found);
  }
#pragma unroll
  for (i32 j = 0; j < kNum; ++j) amax[j] = __shfl_sync(~0u, found, lane / 8 * 8 + j);
  return found;
}

// Converts 16 values, in Vecs of their type, to 16 e4m3.
template <DType kType>
__device__ __forceinline__ Vec to_e4m3(const Vec* from, float multiplier) {
  constexpr i32 kCount = Values<kType>::kCount;
  float f[16];
#pragma unroll
  for (i32 i = 0; i < 16 / kCount; ++i) Values<kType>::load(from[i], f + i * kCount);
  Vec v;
#pragma unroll
  for (i32 i = 0; i < 4; ++i) {
    const u32 low = cvt_rn_satfinite_e4m3x2(f[4 * i] * multiplier, f[4 * i + 1] * multiplier);
    const u32 high = cvt_rn_satfinite_e4m3x2(f[4 * i + 2] * multiplier, f[4 * i + 3] * multiplier);
    v.word[i] = low | high << 16;
  }
  return v;
}

}  // namespace moe_p2p::device
