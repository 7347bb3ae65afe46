// A dispatch that makes its results: for the ops that return them.
#pragma once

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

}  // namespace moe_p2p::ops
