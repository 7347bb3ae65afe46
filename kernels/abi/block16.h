// Partial sums of a combine in blocks of 8 values, 16 bits each: the arithmetic of hosts and
// kernels. The letter is docs/protocol.md, section 10; moe_p2p/moe/reference/block16.py is the same
// in torch.
//
// Half j of a block's 16 bytes holds value j: bits 15 to 1 are kBlock16Zero more than the integer
// that is multiplied by the block's scale, bit 0 is one of the scale's code: its bits 1, 3, 5 and 7
// in the odd halves, 0, 2, 4 and 6 in the even ones.
#pragma once

#include "kernels/abi/e4m3.h"

namespace moe_p2p::abi {

inline constexpr i32 kBlock16 = 8;  // values that share a scale
inline constexpr u32 kBlock16Zero = 1u << 14;
// Codes are of scales in half octaves, 2^-95, 1.5 * 2^-95, 2^-94 and so on: code + kBlock16Least
// are the upper bits of a scale as of fp32, to one bit of its mantissa.
inline constexpr u32 kBlock16Least = 64;
inline constexpr u32 kBlock16Last = 253;  // code of the largest scale
inline constexpr u32 kBlock16Nan = 255;   // of a block that holds a NaN, an inf, 1.5 * 2^45 or more
// Added to the bits of the largest magnitude: carries into the next half octave where its integer
// would be rounded to 16383. So no half of a block is all ones, nor a word: one that is did not
// arrive. And a block that was rounded has the same scale again.
inline constexpr u32 kBlock16Carry = 0x5ffu;

// Code of a block whose largest magnitude has these bits: its integer is from 10922 to 16382, less
// where the code is 0. carry: other than kBlock16Carry only in a mutation
// (kernels/device/mutation.cuh).
MOE_P2P_HD constexpr u32 block16_code(u32 most, u32 carry = kBlock16Carry) {
  constexpr i32 kFirst = kBlock16Least + 27;  // 14 octaves above the scale, less a half
  const i32 code = static_cast<i32>((most + carry) >> 22) - kFirst;
  return code > static_cast<i32>(kBlock16Last) ? kBlock16Nan : code < 0 ? 0 : code;
}
MOE_P2P_HD constexpr float block16_scale(u32 code) {
  return float_of(code == kBlock16Nan ? 0x7fc00000u : (code + kBlock16Least) << 22);
}
// 1 / block16_scale(code), to nearest.
MOE_P2P_HD constexpr float block16_multiplier(u32 code) {
  return float_of(0x7f000000u - ((code + kBlock16Least) << 22) - (code & 1u) * 0x155555u);
}

}  // namespace moe_p2p::abi
