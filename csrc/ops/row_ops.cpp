// torch.ops.moe_p2p.copy_rows: small rows that are strided in memory, to or from one packed run: on
// the host here, on a GPU by kernels/pack.cu. moe_p2p/kv/ring.py calls it.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "kernels/abi/pack.h"
#include "ops/tensor_checks.h"
#include "platform/cuda.h"
#include "platform/cuda_context.h"

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

// The widest item that a thread of the kernel may move.
uint32_t item_bytes(const Rows& rows, const void* memory, const void* packed) {
  uint64_t all = reinterpret_cast<uint64_t>(memory) | reinterpret_cast<uint64_t>(packed);
  for (const int64_t each : {rows.offset, rows.unit, rows.row_bytes}) all |= uint64_t(each);
  if (rows.num_rows > 1) all |= static_cast<uint64_t>(rows.row_stride);
  const uint64_t widest = std::gcd(all, uint64_t{sizeof(uint64_t) * 2});
  return widest == 2 ? 1 : static_cast<uint32_t>(widest);
}

// Where units lie on a GPU, the caller has checked that all rows are within `memory`.
struct OnGpu {
  int64_t kernel, num_blocks, stream;  // a CUfunction and a CUstream
};

void launch(const OnGpu& gpu, int device, const Rows& rows, abi::PackParams params,
            int64_t packed_bytes) {
  params.item_bytes = item_bytes(rows, params.memory.get(), params.packed.get());
  const int64_t items = packed_bytes / params.item_bytes;
  const int64_t most = std::numeric_limits<uint32_t>::max();
  MOE_P2P_CHECK(items <= most && rows.num_rows <= most && rows.row_bytes <= most,
                Code::kInvalidArgument, "copy_rows: ", packed_bytes, " bytes of ", rows.num_rows,
                " rows a unit, ", rows.row_bytes, " bytes each: a kernel takes at most ", most);
  params.units = pointer<const int64_t>(rows.units);
  params.offset = rows.offset, params.unit = rows.unit, params.row_stride = rows.row_stride;
  params.row_bytes = static_cast<uint32_t>(rows.row_bytes);
  params.num_rows = static_cast<uint32_t>(rows.num_rows);
  params.num_items = static_cast<uint32_t>(items);
  const int64_t useful = (items + abi::kPackThreads - 1) / abi::kPackThreads;
  const platform::ContextGuard current(platform::context_of(device));
  platform::launch_kernel(
      {.kernel = static_cast<uint64_t>(gpu.kernel),
       .num_blocks = static_cast<unsigned>(std::clamp<int64_t>(gpu.num_blocks, 1, useful)),
       .num_threads = abi::kPackThreads,
       .stream = reinterpret_cast<void*>(gpu.stream)},
      &params);
}

// kernel, num_blocks, stream: OnGpu; kernel 0: host memory.
void copy_rows(const Tensor& memory, const Tensor& packed, const Tensor& units, int64_t offset,
               int64_t unit, int64_t row_bytes, int64_t num_rows, int64_t row_stride,
               int64_t first_row, bool gather, int64_t kernel, int64_t num_blocks, int64_t stream) {
  const int device = device_of(memory);
  const OnDevice here(kernel == 0 ? -1 : device);
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
  if (packed.numel() == 0) return;
  if (kernel != 0) {
    abi::PackParams params{};
    params.memory = pointer<char>(strided), params.packed = pointer<char>(run);
    params.first_row = first_row, params.gather = gather;
    return launch({kernel, num_blocks, stream}, device, rows, params, packed.numel());
  }
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
