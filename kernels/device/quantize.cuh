// Values in registers: 16 bytes of a row to fp32 and back, and the fp8 quantizer (the arithmetic of
// moe_p2p/reference.py, bit for bit).
#pragma once

#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

// Of one Vec. The general form is for types that are only copied.
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

// The smallest power of two that is not less than x; x is positive and normal.
__device__ __forceinline__ float power_of_two_from(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x7fffffu) & 0x7f800000u);
}

// 16 values of a row to 16 e4m3. The 8 neighbouring threads of a warp hold one scale block; all 32
// threads must call this (with zeros past the end of the row). Returns the block's scale in `scale`.
template <ScaleFormat kFormat>
__device__ __forceinline__ Vec quantize16(const float* f, float& scale) {
  float amax = 0.0f;
#pragma unroll
  for (i32 i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(f[i]));
#pragma unroll
  for (i32 lane = 4; lane > 0; lane >>= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lane));
  amax = fmaxf(amax, 1e-4f);
  scale = __fdiv_rn(amax, 448.0f);
  if constexpr (kFormat != ScaleFormat::kFloat32) scale = power_of_two_from(scale);
  const float multiplier =
      kFormat == ScaleFormat::kFloat32
          ? __fdiv_rn(448.0f, amax)
          : __uint_as_float(0x7f000000u - __float_as_uint(scale));  // 1 / scale
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
