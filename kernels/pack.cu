// Small rows of KV pages, gathered into one packed run or scattered from it: what
// csrc/ops/row_ops.cpp does in host memory, and launches in a GPU's. Few blocks have to keep a NIC
// busy, so each thread has kItemsAtOnce items under way, and finds the next by adding: a division
// for each would take longer than its bytes.
#include "kernels/abi/pack.h"
#include "kernels/device/items.cuh"

namespace moe_p2p::device {

constexpr u32 kItemsAtOnce = 8;  // of a thread

// A packed item: `item` of row `row` of unit `unit`; also how far two of them are apart.
struct Place {
  u64 unit;
  u32 row, item;
};

__device__ __forceinline__ Place place_of(u64 item, u32 of_row, u32 num_rows) {
  const u64 row = item / of_row;
  return {row / num_rows, static_cast<u32>(row % num_rows), static_cast<u32>(item % of_row)};
}

__device__ __forceinline__ void advance(Place& place, const Place& by, u32 of_row, u32 num_rows) {
  place.item += by.item;
  const bool next_row = place.item >= of_row;
  if (next_row) place.item -= of_row;
  place.row += by.row + next_row;
  const bool next_unit = place.row >= num_rows;
  if (next_unit) place.row -= num_rows;
  place.unit += by.unit + next_unit;
}

template <typename Item>
__device__ __forceinline__ void pack(const PackParams& p) {
  constexpr u32 kSize = sizeof(Item);
  const u32 of_row = p.row_bytes / kSize, step = gridDim.x * kPackThreads;
  const Place apart = place_of(step, of_row, p.num_rows);
  u64 item = blockIdx.x * kPackThreads + threadIdx.x;
  Place place = place_of(static_cast<u64>(p.first_row) * of_row + item, of_row, p.num_rows);
  char* const memory = p.memory.get() + p.offset;
  while (item < p.num_items) {
    char* at[kItemsAtOnce];
    Item value[kItemsAtOnce] = {};
#pragma unroll
    for (u32 j = 0; j < kItemsAtOnce; ++j) {
      if (item + j * static_cast<u64>(step) >= p.num_items) break;
      at[j] = memory + __ldg(p.units.get() + place.unit) * p.unit + place.row * p.row_stride +
              place.item * kSize;
      advance(place, apart, of_row, p.num_rows);
    }
    char* const run = p.packed.get() + item * kSize;
#pragma unroll
    for (u32 j = 0; j < kItemsAtOnce; ++j) {
      const u64 far = j * static_cast<u64>(step);
      if (item + far < p.num_items)
        value[j] = load_item<Item>(p.gather ? at[j] : run + far * kSize);
    }
#pragma unroll
    for (u32 j = 0; j < kItemsAtOnce; ++j) {
      const u64 far = j * static_cast<u64>(step);
      if (item + far < p.num_items) store_item(p.gather ? run + far * kSize : at[j], value[j]);
    }
    item += kItemsAtOnce * static_cast<u64>(step);
  }
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kPackThreads, 1)
    moe_p2p_pack(const __grid_constant__ PackParams p) {
  switch (p.item_bytes) {
    case sizeof(Vec): return pack<Vec>(p);
    case sizeof(Pair): return pack<Pair>(p);
    case sizeof(u32): return pack<u32>(p);
    default: return pack<char>(p);
  }
}
