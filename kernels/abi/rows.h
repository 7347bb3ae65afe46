// Copies of many rows by one launch (kernels/rows.cu, csrc/platform/row_copies.h), and the words
// from which an owner of memory learns that a peer's copies into it have ended.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

// In pinned memory. At most kRowBytes, so that long ones are shared by many warps.
struct RowCopy {
  u64 to, from, bytes, padding;
};
static_assert(sizeof(RowCopy) == 32, "read by two loads");

inline constexpr u64 kRowBytes = 16 << 10;
// Too small: long copies wait for room. Row number n, counted from 0, is row n mod kRowCopies.
inline constexpr u64 kRowCopies = 8192;
inline constexpr i32 kRowThreads = 512, kMaxRowBlocks = 16;

// In memory that the copying process, its GPU and the owners of the targets share. Numbers of
// batches, or of copies by the engines, count from 1.
struct CopyWords {
  // Stored by the host before anything of the batch, or the copy, may begin.
  u64 rows_begun, engine_begun;
  u64 padding[14];
  // Stored by the GPU behind all that the batch wrote; every batch stores all words.
  u64 rows_done[kMaxRowBlocks];
  u64 engine_done;
  u64 more_padding[15];
};
static_assert(sizeof(CopyWords) == 3 * kLine);

struct RowsParams {
  u64 rows;   // RowCopy [kRowCopies], device address
  u64 words;  // CopyWords, likewise
  u64 first;  // number of the first row
  u64 count;
  u64 batch;  // number of this launch
};

}  // namespace moe_p2p::abi
