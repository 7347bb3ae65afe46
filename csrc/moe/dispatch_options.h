// Options of a dispatch beside its tensors and sizes: one struct from the ops down to the kernels
// of the host, made of the one int that ops take. moe_p2p/moe/options.py makes that int with the
// same bits; change both together.
#pragma once

#include <cstdint>

#include "kernels/abi/layout.h"

namespace moe_p2p::moe {

inline constexpr int64_t kLayoutMask = 3;  // of the number: abi::RowLayout

struct DispatchOptions {
  abi::RowLayout layout = abi::RowLayout::kPadded;
  abi::ScaleFormat scale_format = abi::ScaleFormat::kFloat32;  // of quantize
  bool quantize = false;       // x to fp8 e4m3 with one fp32 scale per 128 values
  bool column_scales = false;  // scales lie column by column: see DispatchRecv::scale_stride
  bool zero_padding = false;   // rows that hold no token become zero; else they keep what they held
  bool solo = false;           // no combine follows while other calls are under way
  bool with_source = false;
  bool with_ranges = false;
  bool with_wait_ticks = false;
  bool copy_topk = false;
  // grouped: rows past the capacity are left out without an error, and the last offset says how
  // many would have been enough
  bool drop = false;
  int64_t alignment = 1;  // grouped: each expert starts at a multiple of this

  abi::LayoutFacts rows() const noexcept { return abi::facts_of(layout); }
};

// Throws Error{kInvalidArgument} for a number that options.py never makes.
DispatchOptions dispatch_options_from(int64_t number);
// The layout alone. The number may be a combine's.
abi::RowLayout layout_from(int64_t number);
// The order in which the combine adds that is given this number.
abi::SumOrder sum_order_from(int64_t number);
// The types of the partial sums of such a combine.
abi::Partials partials_from(int64_t number);
abi::Partials partials_of(int64_t partials);  // of their own number

}  // namespace moe_p2p::moe
