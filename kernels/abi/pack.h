// What the host passes to kernels/pack.cu.
#pragma once

#include "kernels/abi/params.h"

namespace moe_p2p::abi {

inline constexpr i32 kPackThreads = 512;

// Row r of unit u begins at offset + units[u] * unit + r * row_stride of `memory`, r < num_rows.
// Rows are numbered across units; `packed` begins with row first_row. Lengths in bytes.
struct PackParams {
  DevicePtr<char> memory;
  DevicePtr<char> packed;
  DevicePtr<const i64> units;
  i64 offset;
  i64 unit;
  i64 row_stride;
  i64 first_row;
  u32 row_bytes;
  u32 num_rows;
  u32 num_items;   // of the packed run
  u32 item_bytes;  // 1, 4, 8 or 16: all places are multiples of it
  u32 gather;      // 1: memory to packed; 0: back
  u32 reserved;
};

}  // namespace moe_p2p::abi
