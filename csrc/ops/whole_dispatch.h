// Calls that make their results: for the ops that return them, and for direct calls (ops/direct/).
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "ops/all_to_all_object.h"

namespace moe_p2p::ops {

// Rows, their scales (empty: none), row weights, counts, offsets, handle, and what the schema of
// dispatch calls `more`.
using Dispatched = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>>;

// beside: where all but rows and extras are made, scales if there is room; null: each is an
// allocation of its own.
Dispatched dispatch_into_new(AllToAllObject* comm, const DispatchArguments& in, int64_t capacity,
                             Arena* beside = nullptr);
// The bytes that such an arena needs for up to `capacity` rows.
int64_t bytes_beside_rows(AllToAllObject& comm, const DispatchArguments& in, int64_t capacity);

// The rows that can arrive of a call whose ranks have up to max_tokens, of each expert if they lie
// apart. most_rows in moe_p2p/moe/arguments.py is Python's.
int64_t most_rows(const AllToAllObject& comm, const moe::DispatchOptions& options,
                  int64_t max_tokens, int64_t alignment);

// dispatch_inference, combine_inference and combine_out of eager calls, with the arguments that
// most give: they make no results for a compiler, so all but rows, and scales in columns, share an
// allocation if that is small. They throw Error{kUnavailable}, and have done nothing, where Python
// decides what to do (ops/direct/direct_calls.cpp): DeepEP's calls take inputs with gaps, and copy.
struct DirectDispatch {
  Dispatched results;
  moe::DispatchOptions options;
  int64_t max_tokens, capacity;
  bool has_scales;
};
// max_tokens: none: the configuration's. capacity: none: most_rows().
DirectDispatch dispatch_directly(int64_t comm_id, int64_t options_number,
                                 std::optional<int64_t> max_tokens, std::optional<int64_t> capacity,
                                 const Tensor& x, const Tensor& topk_idx,
                                 std::optional<Tensor> topk_weights, std::optional<Tensor> scales,
                                 std::vector<int64_t> others);
// dispatched, combined: numbers of the options of both calls. out: none: a new one is returned.
std::optional<Tensor> combine_directly(int64_t comm_id, int64_t dispatched, int64_t combined,
                                       int64_t max_tokens, const Tensor& handle, const Tensor& y,
                                       const Tensor& topk_idx, std::optional<Tensor> row_weights,
                                       std::optional<Tensor> topk_weights,
                                       std::optional<Tensor> out);
// Dispatched, and what the counts of all ranks gave.
using Counted = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>,
                           Tensor, Tensor, int64_t, int64_t, int64_t>;
Counted dispatch_counted(int64_t comm_id, int64_t options_number, const Tensor& x,
                         std::optional<Tensor> scales, const Tensor& topk_idx,
                         std::optional<Tensor> topk_weights, int64_t max_tokens, int64_t alignment,
                         int64_t kernel, int64_t host, int64_t call);

}  // namespace moe_p2p::ops
