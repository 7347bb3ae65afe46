// torch.ops.moe_p2p.copy_rows: small rows that are strided in host memory, to or from one packed
// run. moe_p2p/kv/packing.py calls it; kernels/triton/kv_rows.py does the same on a GPU.
#include <algorithm>
#include <cstring>

#include "ops/tensor_checks.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

// Row r of unit u begins at offset + units[u] * unit + r * row_stride. Rows are numbered across
// units; `packed` takes, or gives, as many as it has room for, from number first_row on.
struct Rows {
  const int64_t* units;
  int64_t offset, unit, row_bytes, num_rows, row_stride;

  int64_t place(int64_t row) const {
    return offset + units[row / num_rows] * unit + row % num_rows * row_stride;
  }
};

// Before any byte is copied: a target's rows must be whole or untouched.
void check_inside(const Rows& rows, int64_t first, int64_t last, int64_t bytes) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = rows.place(row);
    MOE_P2P_CHECK(at >= 0 && at <= bytes - rows.row_bytes, Code::kInvalidArgument,
                  "copy_rows: row ", row, " lies at byte ", at, " of memory of ", bytes,
                  " bytes; it has ", rows.row_bytes);
  }
}

void copy_rows(const Tensor& memory, const Tensor& packed, const Tensor& units, int64_t offset,
               int64_t unit, int64_t row_bytes, int64_t num_rows, int64_t row_stride,
               int64_t first_row, bool gather) {
  auto* const strided = output<char>(memory, {"memory", {ScalarType::Byte}, {kAny}});
  auto* run = output<char>(packed, {"packed", {ScalarType::Byte}, {kAny}});
  const auto* index = input<int64_t>(units, {"units", {ScalarType::Long}, {kAny}});
  MOE_P2P_CHECK(row_bytes > 0 && num_rows > 0 && packed.numel() % row_bytes == 0,
                Code::kInvalidArgument, "copy_rows: ", packed.numel(),
                " packed bytes are not rows of ", row_bytes, " bytes, ", num_rows, " a unit");
  const int64_t last = first_row + packed.numel() / row_bytes;
  MOE_P2P_CHECK(first_row >= 0 && last <= units.numel() * num_rows, Code::kInvalidArgument,
                "copy_rows: rows ", first_row, " to ", last, " of ", units.numel() * num_rows);
  const Rows rows{index, offset, unit, row_bytes, num_rows, row_stride};
  check_inside(rows, first_row, last, memory.numel());
  for (int64_t row = first_row; row < last; ++row, run += row_bytes) {
    char* const place = strided + rows.place(row);
    std::memcpy(gather ? run : place, gather ? place : run, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("copy_rows", TORCH_BOX(&copy_rows));
}

}  // namespace moe_p2p::ops
