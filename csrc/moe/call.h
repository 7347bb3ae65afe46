// Arguments of a call: plain pointers to its inputs and outputs, in the communicator's kind of
// memory. Filled by ops and tests; checked by the backend (moe/backend.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/abi/shape.h"
#include "moe/dispatch_options.h"
#include "platform/stream_order.h"

namespace moe_p2p::moe {

// Rows of opaque bytes that travel with the tokens.
struct ExtraPart {
  const void* data;  // [T, row_bytes] at the sender
  uint64_t row_bytes;
};
struct ExtraOutput {
  void* data;  // [rows, row_bytes] at the receiver
  uint64_t row_bytes;
};

struct Handle {
  int32_t* words;  // [handle_words(num_rows, max_tokens)]
  int64_t num_words;
};

struct DispatchSend {
  const void* x = nullptr;  // [T, H] of x_dtype, contiguous
  abi::DType x_dtype{};
  uint64_t x_bytes = 0;  // of a row of x that is the caller's bytes; 0: H values
  DispatchOptions options;
  const void* scales = nullptr;  // [T, scale_bytes] for x of fp8; null: fp8 without scales
  uint64_t scale_bytes = 0;      // bytes of one token's given scales, a multiple of 4
  bool opaque_scales = false;    // scales may hold any words: not ceil(H / 128) fp32 numbers
  std::vector<ExtraPart> extras;
  const void* topk_idx = nullptr;  // [T, K] int32 or int64, -1 = none
  bool topk_is_int64 = true;
  void* topk_copy = nullptr;  // on a GPU: a copy of topk_idx, which the caller may then overwrite
  const float* topk_weights = nullptr;      // [T, K]; null: 1
  int64_t num_rows = 0;                     // T
  int64_t num_tokens = 0;                   // rows that count, <= T
  const void* device_num_tokens = nullptr;  // on a GPU: instead of num_tokens, read by the kernel
  bool num_tokens_is_int64 = false;
  int64_t max_tokens = 0;  // bound for every rank in this call, equal on all ranks
  Handle handle{};
  // Owns the handle's words, if the ledger releases dispatches without a combine; else null.
  std::shared_ptr<const void> handle_owner;
  platform::Stream stream{};  // on a GPU: the stream of the call
};

struct DispatchRecv {
  Handle handle{};
  DispatchOptions options;  // the sender's, but for what lies only here: zeros and columns
  int64_t capacity = 0;     // padded: rows per expert, else rows in all
  abi::DType x_dtype{};     // of `x` below: the payload type on the wire
  uint64_t x_bytes = 0;     // the sender's
  void* x = nullptr;
  void* scales = nullptr;    // [rows, scale_bytes]; null when the dispatch has none
  uint64_t scale_bytes = 0;  // of one row: kUe8m0 4 * ceil(H / 512), else the bytes that travel
  // With column_scales the 4-byte scale i of row r of an expert lies at [i * scale_stride + r]; the
  // scales of the next expert follow.
  int64_t scale_stride = 0;
  std::vector<ExtraOutput> extras;
  float* row_weights = nullptr;  // [rows], per token [rows, K]
  int32_t* counts = nullptr;     // [E_local] tokens of each expert
  int32_t* offsets =
      nullptr;  // [E_local + 1] first row of each expert, per token [W + 1] of each source
  void* row_topk = nullptr;   // per token: [rows, K] local expert ids, -1 = none of this rank
  bool topk_is_int64 = true;  // the type of row_topk
  // null: not wanted
  int32_t* source = nullptr;  // [rows, 2] source rank and its token
  int64_t* ranges = nullptr;  // [E_local, W] first row of the source there << 32 | number of rows
  int64_t* wait_ticks = nullptr;  // [W] wait for each source: ns, on a GPU clock cycles
  // [E_local, abi::arrival_counters(capacity)], padded: raised as rows arrive.
  uint32_t* ready = nullptr;
  int32_t num_sms = 0;  // with `ready`, on a GPU: most blocks
  platform::Stream stream{};
};

// Counters of rows of y (kernels/abi/params.h, RowCounters), and who may wait for them.
struct ReadyRows {
  const uint32_t* counters = nullptr;  // [E_local, per_expert]; null: y is complete
  const uint32_t* base = nullptr;
  uint32_t want = 0;
  int32_t rows = 1;
  int32_t per_expert = 1;
  int32_t num_sms = 0;  // on a GPU: most blocks of the sending half
};

struct CombineSend {
  Handle handle{};
  const void* y = nullptr;  // [y_rows, H] of y_dtype, laid out as x was received
  abi::DType y_dtype{};
  int64_t y_rows = 0;
  ReadyRows ready{};
  int64_t capacity = 0;                // of an expert, with `ready`
  abi::RowLayout layout{};             // of y; kPadded also where it is not known
  const float* row_weights = nullptr;  // [y_rows]; null: plain sum
  // [y_rows]: returned to their (token, k); [y_rows, K]: all K are added up; null: none
  const float* row_scalars = nullptr;
  bool topk_scalars = false;  // the latter
  // [T, K] of this rank's tokens, pushed to the experts with this call; null: row_weights are used
  const float* topk_weights = nullptr;
  int64_t num_rows = 0;    // T, with topk_weights
  abi::DType out_dtype{};  // of the result, and of partial sums unless `partials` says otherwise
  abi::SumOrder order{};   // alike on all ranks, as partials
  abi::Partials partials{};
  int64_t max_tokens = 0;  // on a GPU: max_tokens of the dispatch
  platform::Stream stream{};
};

struct CombineRecv {
  Handle handle{};
  int64_t num_rows = 0;  // T
  void* out = nullptr;   // [T, H]; rows past num_tokens become zero
  abi::DType out_dtype{};
  abi::SumOrder order{};           // as CombineSend's
  abi::Partials partials{};        // likewise
  const void* topk_idx = nullptr;  // [T, K] of the dispatch, int32 or int64; null for kRanks
  bool topk_is_int64 = true;
  float* out_scalars = nullptr;   // [T, K]
  const void* bias[2]{};          // [T, H] of out_dtype, the first addends; null: none
  int64_t* wait_ticks = nullptr;  // as in dispatch
  platform::Stream stream{};
};

// What combines of this rank have lacked, because a rank was lost between a dispatch and its end.
struct Lost {
  uint64_t num_tokens = 0;  // of all steps
  uint64_t step = 0;        // the last
  int rank = -1;
};

}  // namespace moe_p2p::moe
