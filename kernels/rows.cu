// Many copies within GPU memory, or to a peer's, by one launch (csrc/platform/row_copies.h): where
// rows are short, the driver's calls for each would take longer than their bytes. A warp takes
// whole rows; the first rows of a batch go to different blocks. Sources are the GPU's own memory
// and stores wait for nothing, so one row under way in each warp keeps NVLink busy.
#include "kernels/abi/rows.h"
#include "kernels/device/items.cuh"

namespace moe_p2p::device {

constexpr u32 kItemsAtOnce = 8;  // of a lane

// Copies num items; both places are multiples of an item. A lane's items lie at constant distances,
// and are zero before they are loaded: a value that only some turns load would stay in its
// registers all the time, in each of the four ways to copy, and with an address for each the kernel
// had 440 bytes of spilled registers.
template <typename Item>
__device__ __forceinline__ void copy_items(char* to, const char* from, u32 num, u32 lane) {
  constexpr u32 kApart = 32 * sizeof(Item);
  to += lane * sizeof(Item), from += lane * sizeof(Item);
#pragma unroll 1
  for (u32 at = lane; at < num; at += 32 * kItemsAtOnce) {
    Item item[kItemsAtOnce] = {};
#pragma unroll
    for (u32 j = 0; j < kItemsAtOnce; ++j)
      if (at + 32 * j < num) item[j] = load_item<Item>(from + j * kApart);
#pragma unroll
    for (u32 j = 0; j < kItemsAtOnce; ++j)
      if (at + 32 * j < num) store_item(to + j * kApart, item[j]);
    to += kItemsAtOnce * kApart, from += kItemsAtOnce * kApart;
  }
}

// Places that are equally far from a multiple of an item: bytes before and behind go one by one.
template <typename Item>
__device__ __forceinline__ void copy_aligned(char* to, const char* from, u32 bytes, u32 lane) {
  constexpr u32 kSize = sizeof(Item);
  const u32 before = (kSize - static_cast<u32>(reinterpret_cast<u64>(to)) % kSize) % kSize;
  const u32 head = before < bytes ? before : bytes;
  const u32 num = (bytes - head) / kSize, middle = head + num * kSize;
  if (lane < head) to[lane] = from[lane];
  copy_items<Item>(to + head, from + head, num, lane);
  if (lane < bytes - middle) to[middle + lane] = from[middle + lane];
}

__device__ __forceinline__ void copy_row(u64 to, u64 from, u32 bytes, u32 lane) {
  auto* target = reinterpret_cast<char*>(to);
  const auto* source = reinterpret_cast<const char*>(from);
  const u64 apart = to ^ from;  // the lowest bit says what both are equally far from
  if (apart % sizeof(Vec) == 0) {
    copy_aligned<Vec>(target, source, bytes, lane);
  } else if (apart % sizeof(Pair) == 0) {
    copy_aligned<Pair>(target, source, bytes, lane);
  } else if (apart % sizeof(u32) == 0) {
    copy_aligned<u32>(target, source, bytes, lane);
  } else {
    copy_items<char>(target, source, bytes, lane);
  }
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kRowThreads, 2)
    moe_p2p_rows(const __grid_constant__ RowsParams p) {
  const auto thread = static_cast<i32>(threadIdx.x);
  const auto lane = static_cast<u32>(thread) % 32;
  const auto* rows = reinterpret_cast<const RowCopy*>(p.rows);
  const u64 num_warps = static_cast<u64>(gridDim.x) * (kRowThreads / 32);
  const u64 warp = static_cast<u64>(thread / 32) * gridDim.x + blockIdx.x;
  // A lane reads one of the warp's next 32 rows: all reads over the bus are under way together.
  for (u64 next = warp; next < p.count; next += 32 * num_warps) {
    const u64 mine = next + static_cast<u64>(lane) * num_warps;
    u64 to = 0, from = 0;
    u32 bytes = 0;         // at most kRowBytes
    if (mine < p.count) {  // written by the host before the launch
      const RowCopy& row = rows[(p.first + mine) % kRowCopies];
      to = ld_relaxed_sys_u64(&row.to);
      from = ld_relaxed_sys_u64(&row.from);
      bytes = static_cast<u32>(ld_relaxed_sys_u64(&row.bytes));
    }
#pragma unroll 1
    for (i32 i = 0; i < 32 && next + static_cast<u64>(i) * num_warps < p.count; ++i)
      copy_row(__shfl_sync(~0u, to, i), __shfl_sync(~0u, from, i), __shfl_sync(~0u, bytes, i),
               lane);
  }
  __syncthreads();
  // Behind the stores of all threads of the block; pairs with RowCopies::num_done() and, at the
  // owner of the target, with LentCopies::ended().
  auto& words = *reinterpret_cast<CopyWords*>(p.words);
  const auto blocks = static_cast<i32>(gridDim.x);
  if (thread < kMaxRowBlocks && thread % blocks == static_cast<i32>(blockIdx.x))
    st_release_sys_u64(&words.rows_done[thread], p.batch);
}
