// Partial sums of a combine in blocks of 8 values, 16 bits each: the arithmetic of hosts and
// kernels. The letter is docs/protocol.md, section 10; moe_p2p/moe/reference/block16.py is the same
// in torch.
//
// Half j of a block's 16 bytes holds value j: sign in bit 15, a number of 14 bits below bit 14. The
// number has 3 bits of exponent above 11 of mantissa, from 0, denormals and all, to just under 128.
// The 8 bits 14 are one exponent, of the power of two that the block's numbers are multiplied by:
// its bits 7 to 4 in the odd halves in order, 3 to 0 in the even ones.
#pragma once

#include "kernels/abi/e4m3.h"

namespace moe_p2p::abi {

inline constexpr i32 kBlock16 = 8;             // values that share an exponent
inline constexpr u32 kBlock16Spare = 0x4000u;  // bit 14 of a half
inline constexpr u32 kBlock16Number = 0x3fffu;
inline constexpr u32 kBlock16Nan = 255;  // exponent of a block that holds a NaN, an inf, or nearly
// Added to the bits of the largest magnitude: carries into its exponent where its number would be
// rounded to 127.96875 or more. So no number has all bits set, and no half of a block: a word of
// ones is always one that did not arrive.
inline constexpr u32 kBlock16Carry = 0x1800u;

// Exponent of a block, as of fp32, whose largest magnitude has these bits. carry: other than
// kBlock16Carry only in a mutation (kernels/device/mutation.cuh).
MOE_P2P_HD constexpr u32 block16_exponent(u32 most, u32 carry = kBlock16Carry) {
  const u32 reached = most + carry;
  const u32 exponent = reached >> 23;
  return reached >= kInfinity ? kBlock16Nan : exponent > 6 ? exponent - 6 : 1;
}
// 1 / the power of two of a block of numbers.
MOE_P2P_HD constexpr float block16_multiplier(u32 exponent) {
  return float_of((254u - exponent) << 23);
}
MOE_P2P_HD constexpr float block16_scale(u32 exponent) {
  return float_of(exponent == kBlock16Nan ? 0x7fc00000u : exponent << 23);
}

// Half, bit 14 left 0, of a value that was multiplied. Rounded to nearest even.
MOE_P2P_HD constexpr u32 block16_half(float multiplied) {
  const u32 bits = bits_of(multiplied), magnitude = bits & 0x7fffffffu;
  // Below 1 in steps of 2^-11: adding 2^12 leaves their number in the low mantissa bits.
  const u32 denormal = bits_of(float_of(magnitude) + 4096.0f) - 0x45800000u;
  const u32 normal = (magnitude - (126u << 23) + 0x7ffu + (magnitude >> 12 & 1u)) >> 12;
  return (bits >> 16 & 0x8000u) | (magnitude < 0x3f800000u ? denormal : normal);
}
// Its number, whatever bit 14 is.
MOE_P2P_HD constexpr float block16_number(u32 half) {
  const u32 exponent = half >> 11 & 7u, mantissa = half & 0x7ffu;
  const u32 steps = exponent == 0 ? mantissa : (mantissa | 0x800u) << (exponent - 1);
  const float number = static_cast<float>(static_cast<i32>(steps)) * 0x1p-11f;
  return half & 0x8000u ? -number : number;
}

}  // namespace moe_p2p::abi
