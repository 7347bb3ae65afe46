#include "moe/host/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/abi/block16.h"

// The loops below are plain so that the compiler can vectorise them; the x86 build carries a
// version for machines with AVX-512 and AVX2 beside the baseline, chosen when the library is
// loaded. Sanitizers cannot instrument that choice.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MOE_P2P_VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MOE_P2P_VECTOR
#endif

namespace moe_p2p::moe {

using abi::DType;

namespace {

#if defined(__aarch64__)
using Half = __fp16;  // g++ has _Float16 there from version 13 on
#else
using Half = _Float16;
#endif
constexpr size_t kBlock = 512;  // floats of accumulator: stays in the first-level cache

// Sums begin at 0.0f, as specified: -0.0 alone gives +0.0.
MOE_P2P_VECTOR void add_bf16(float* acc, const uint16_t* x, float w, bool weighted, size_t n) {
  if (weighted) {
    for (size_t i = 0; i < n; ++i) acc[i] += w * std::bit_cast<float>(uint32_t{x[i]} << 16);
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] += std::bit_cast<float>(uint32_t{x[i]} << 16);
  }
}

MOE_P2P_VECTOR void add_f16(float* acc, const Half* x, float w, bool weighted, size_t n) {
  if (weighted) {
    for (size_t i = 0; i < n; ++i) acc[i] += w * static_cast<float>(x[i]);
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] += static_cast<float>(x[i]);
  }
}

MOE_P2P_VECTOR void add_f32(float* acc, const float* x, float w, bool weighted, size_t n) {
  if (weighted) {
    for (size_t i = 0; i < n; ++i) acc[i] += w * x[i];
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] += x[i];
  }
}

// Round to nearest even; NaN stays NaN (quiet).
MOE_P2P_VECTOR void store_bf16(uint16_t* out, const float* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t u = std::bit_cast<uint32_t>(acc[i]);
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    out[i] = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
}

MOE_P2P_VECTOR void store_f16(Half* out, const float* acc, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<Half>(acc[i]);
}

// --- int10: kernels/abi/shape.h, docs/protocol.md, section 10 ---

constexpr size_t kUnit = abi::kInt10Unit, kGroup = abi::kInt10Group, kInt10 = abi::kInt10Block;

// The planes of a row.
template <typename Byte>
struct Planes {
  Byte *codes, *rest, *scales;

  Planes(Byte* row, size_t length)
      : codes(row),
        rest(row + abi::int10_units(length) * abi::kInt10UnitCodes),
        scales(rest + abi::int10_units(length) * abi::kInt10UnitRest) {}
};

// Adds n values from number `from` on, both multiples of a block.
MOE_P2P_VECTOR void add_int10(float* acc, const std::byte* row, size_t length, size_t from, float w,
                              bool weighted, size_t n) {
  const Planes planes(row, length);
  for (size_t g = 0; g < n / kGroup; ++g) {
    const size_t group = from / kGroup + g;
    uint64_t low;
    uint16_t high, scale_bits;
    std::memcpy(&low, planes.codes + group * sizeof low, sizeof low);
    std::memcpy(&high, planes.rest + group * sizeof high, sizeof high);
    std::memcpy(&scale_bits, planes.scales + group * kGroup / kInt10 * sizeof scale_bits,
                sizeof scale_bits);
    const float scale = std::bit_cast<float>(uint32_t{scale_bits} << 16);
    uint32_t codes[kGroup];
    for (size_t j = 0; j < 6; ++j) codes[j] = static_cast<uint32_t>(low >> (10 * j));
    codes[6] = static_cast<uint32_t>(low >> 60) | uint32_t{high} << 4;
    codes[7] = uint32_t{high} >> 6;
    for (size_t j = 0; j < kGroup; ++j) {
      const auto number =
          static_cast<int32_t>(codes[j] & abi::kInt10Mask) - static_cast<int32_t>(abi::kInt10Zero);
      const float value = static_cast<float>(number) * scale;
      acc[g * kGroup + j] += weighted ? w * value : value;
    }
  }
}

// Of one block: codes and, returned, the bits of the scale.
uint32_t quantize_int10(const float* x, uint32_t* codes) noexcept {
  uint32_t most = 0;  // magnitudes order like their bits, NaN above inf
  for (size_t i = 0; i < kInt10; ++i)
    most = std::max(most, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  if (most >= 0x7f800000u) {
    std::fill_n(codes, kInt10, abi::kInt10Zero);
    return abi::kInt10NanScale;
  }
  const uint32_t least = std::bit_cast<uint32_t>(std::bit_cast<float>(most) * abi::kInt10Step);
  const uint32_t scale = std::max((least + 0xffffu) & 0xffff0000u, abi::kInt10LeastScale);
  const float multiplier = 1.0f / std::bit_cast<float>(scale);
  for (size_t i = 0; i < kInt10; ++i)
    codes[i] = std::bit_cast<uint32_t>(x[i] * multiplier + abi::kInt10Magic) & abi::kInt10Mask;
  return scale;
}

// Stores n values from number `from` on; up to the end of the row whole units.
MOE_P2P_VECTOR void store_int10(std::byte* row, size_t length, size_t from, const float* acc,
                                size_t n) {
  const Planes planes(row, length);
  const size_t end = from + n == length ? (length + kUnit - 1) / kUnit * kUnit : from + n;
  constexpr float kNothing[kInt10] = {};
  for (size_t at = from; at < end; at += kInt10) {
    uint32_t codes[kInt10];
    const uint32_t scale = quantize_int10(at < length ? acc + (at - from) : kNothing, codes);
    const auto scale_bits = static_cast<uint16_t>(scale >> 16);
    std::memcpy(planes.scales + at / kInt10 * sizeof scale_bits, &scale_bits, sizeof scale_bits);
    for (size_t g = 0; g < kInt10 / kGroup; ++g) {
      const uint32_t* code = codes + g * kGroup;
      uint64_t low = 0;
      for (size_t j = 0; j < 7; ++j) low |= uint64_t{code[j]} << (10 * j);
      const auto high = static_cast<uint16_t>(code[6] >> 4 | code[7] << 6);
      const size_t group = at / kGroup + g;
      std::memcpy(planes.codes + group * sizeof low, &low, sizeof low);
      std::memcpy(planes.rest + group * sizeof high, &high, sizeof high);
    }
  }
}

// --- block16: kernels/abi/block16.h ---

using Halves = uint16_t[abi::kBlock16];  // half j has bit j of the code
constexpr int32_t kZero = static_cast<int32_t>(abi::kBlock16Zero);
// x + it has x, rounded to nearest even, in its lowest bits.
constexpr double kMagic = 0x1.8p52;

MOE_P2P_VECTOR void add_block16(float* acc, const std::byte* blocks, float w, bool weighted,
                                size_t n) {
  for (size_t at = 0; at < n; at += abi::kBlock16) {
    Halves halves;
    std::memcpy(halves, blocks + at * sizeof *halves, sizeof halves);
    uint32_t code = 0;
    for (size_t j = 0; j < abi::kBlock16; ++j) code |= (halves[j] & 1u) << j;
    const float scale = abi::block16_scale(code);
    for (size_t j = 0; j < abi::kBlock16; ++j) {
      const float value = static_cast<float>((halves[j] >> 1) - kZero) * scale;
      acc[at + j] += weighted ? w * value : value;
    }
  }
}

MOE_P2P_VECTOR void store_block16(std::byte* blocks, const float* acc, size_t n) {
  for (size_t at = 0; at < n; at += abi::kBlock16) {
    const float* x = acc + at;
    uint32_t most = 0;  // magnitudes order like their bits, NaN above inf
    for (size_t j = 0; j < abi::kBlock16; ++j)
      most = std::max(most, std::bit_cast<uint32_t>(x[j]) & 0x7fffffffu);
    const uint32_t code = abi::block16_code(most);
    const double multiplier = abi::block16_multiplier(code);
    Halves halves;
    for (size_t j = 0; j < abi::kBlock16; ++j) {
      const double number = code == abi::kBlock16Nan ? 0.0 : x[j] * multiplier;  // exact
      const auto integer = static_cast<int32_t>(std::bit_cast<int64_t>(number + kMagic));
      halves[j] = static_cast<uint16_t>((integer + kZero) << 1 | (code >> j & 1));
    }
    std::memcpy(blocks + at * sizeof *halves, halves, sizeof halves);
  }
}

void add(float* acc, const std::byte* row, DType dtype, size_t length, size_t from, float w,
         bool weighted, size_t n) noexcept {
  switch (dtype) {
    case DType::kInt10: return add_int10(acc, row, length, from, w, weighted, n);
    case DType::kBlock16: return add_block16(acc, row + from * 2, w, weighted, n);
    case DType::kBFloat16:
      return add_bf16(acc, reinterpret_cast<const uint16_t*>(row) + from, w, weighted, n);
    case DType::kFloat16:
      return add_f16(acc, reinterpret_cast<const Half*>(row) + from, w, weighted, n);
    default: return add_f32(acc, reinterpret_cast<const float*>(row) + from, w, weighted, n);
  }
}

void store(std::byte* out, DType dtype, size_t length, size_t from, const float* acc,
           size_t n) noexcept {
  switch (dtype) {
    case DType::kInt10: return store_int10(out, length, from, acc, n);
    case DType::kBlock16: return store_block16(out + from * 2, acc, n);
    case DType::kBFloat16: return store_bf16(reinterpret_cast<uint16_t*>(out) + from, acc, n);
    case DType::kFloat16: return store_f16(reinterpret_cast<Half*>(out) + from, acc, n);
    default: std::memcpy(reinterpret_cast<float*>(out) + from, acc, n * sizeof(float));
  }
}

MOE_P2P_VECTOR void quantize_block(const float* x, float multiplier, uint8_t* out, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<uint8_t>(abi::e4m3_of(x[i] * multiplier));
}

// Returns inf for a NaN.
MOE_P2P_VECTOR float absolute_max(const float* x, size_t n) {
  uint32_t largest = 0;  // magnitudes order like their bits, NaN above inf
  for (size_t i = 0; i < n; ++i)
    largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return std::bit_cast<float>(std::min(largest, abi::kInfinity));
}

}  // namespace

void sum_rows(std::byte* out, DType out_dtype, const Addend* addends, size_t num_addends,
              bool weighted, size_t length) noexcept {
  float acc[kBlock];
  for (size_t from = 0; from < length; from += kBlock) {
    const size_t n = std::min(kBlock, length - from);
    std::memset(acc, 0, n * sizeof(float));
    for (size_t a = 0; a < num_addends; ++a)
      add(acc, addends[a].row, addends[a].dtype, length, from, addends[a].weight, weighted, n);
    store(out, out_dtype, length, from, acc, n);
  }
}

void quantize_row(const std::byte* row, DType dtype, bool power_of_two, std::byte* values,
                  float* scales, size_t length) noexcept {
  float x[abi::kScaleBlock];
  for (size_t from = 0; from < length; from += abi::kScaleBlock) {
    const size_t n = std::min<size_t>(abi::kScaleBlock, length - from);
    std::fill_n(x, n,
                -0.0f);  // the one number whose sum with any x is x: with 0.0f, -0.0 would turn
    add(x, row, dtype, length, from, 1.0f, false, n);
    const float amax = std::max(absolute_max(x, n), abi::kLeastAmax);
    float scale = abi::quotient(amax, abi::kMaxE4M3);
    float multiplier = abi::quotient(abi::kMaxE4M3, amax);
    if (power_of_two) {
      scale = abi::power_of_two_from(scale);
      multiplier = abi::inverse_of_power_of_two(scale);
    }
    scales[from / abi::kScaleBlock] = scale;
    quantize_block(x, multiplier, reinterpret_cast<uint8_t*>(values) + from, n);
  }
}

uint32_t pack_ue8m0(const float* scales, size_t count) noexcept {
  uint32_t word = 0;
  for (size_t i = 0; i < count; ++i) word |= std::bit_cast<uint32_t>(scales[i]) >> 23 << (8 * i);
  return word;
}

}  // namespace moe_p2p::moe
