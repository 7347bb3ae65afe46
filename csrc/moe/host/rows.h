// Arithmetic on rows of values: the number formats, sums in fp32 and the fp8 quantizer. The one
// definition of rounding on the host; moe_p2p/moe/reference/routing.py has the same in torch. Built
// without contraction of multiply and add, because the order of rounding is part of the result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/abi/shape.h"

namespace moe_p2p::moe {

// One addend of a sum of rows.
struct Addend {
  const std::byte* row;
  float weight;
  abi::DType dtype;
};

// out[i] = round(0 + w0 * row0[i] + w1 * row1[i] + ...), each product rounded to fp32 before it is
// added, in the order given; `weighted` false adds the rows themselves. Formats: bf16, fp16, fp32,
// and for rows of whole blocks int10 (kernels/abi/shape.h) and block16 (kernels/abi/block16.h).
void sum_rows(std::byte* out, abi::DType out_dtype, const Addend* addends, size_t num_addends,
              bool weighted, size_t length) noexcept;

// e4m3 values and one fp32 scale per kScaleBlock of them (the last block may be shorter):
// scale = max(|x|, 1e-4) / 448, value = round_to_nearest_even(x * (448 / max(|x|, 1e-4))).
// `power_of_two`: the scale is rounded up to one, and value = round_to_nearest_even(x / scale).
// A block that holds an inf or a NaN has max(|x|) = inf: scale inf, and values +-0 and NaN (0x7f).
void quantize_row(const std::byte* row, abi::DType dtype, bool power_of_two, std::byte* values,
                  float* scales, size_t length) noexcept;

// The exponent bytes of up to 4 powers of two, the first one lowest.
uint32_t pack_ue8m0(const float* scales, size_t count) noexcept;

}  // namespace moe_p2p::moe
