// How a token lies in a slot and a partial row in a region: host and device kernels must agree on
// it for one call.
#pragma once

#include "kernels/abi/region.h"
#include "moe/call.h"
#include "moe/plan/plan.h"

namespace moe_p2p::moe {

// Throw Error{kInvalidArgument} when a token is larger than the communicator was made for.
abi::TokenParts send_parts(const Plan& plan, const DispatchSend& call);
abi::TokenParts recv_parts(const Plan& plan, const DispatchRecv& call);

// What one rank sends back for a token: a row, or with SumOrder::kRows room for a row of each of
// its experts, and K scalars behind.
struct PartialForm {
  abi::DType dtype{};  // as they travel
  bool scalars = false;
  abi::SumOrder order{};
};
uint64_t scalars_offset(const Plan& plan, const PartialForm& form) noexcept;
// Forms of partial sums within a node, and from node to node.
template <typename Call>  // CombineSend or CombineRecv
PartialForm near_form(const Call& call, bool scalars) noexcept {
  return {abi::near_type(call.out_dtype, call.partials), scalars, call.order};
}
template <typename Call>
PartialForm far_form(const Call& call, bool scalars) noexcept {
  return {abi::far_type(call.out_dtype, call.partials), scalars, call.order};
}
// Bytes from one token's to the next.
uint64_t partial_stride(const Plan& plan, const PartialForm& form) noexcept;
// Throws Error{kInvalidArgument} when it is larger than the communicator was made for, its order is
// not for so many nodes, or its type not for such rows.
void check_partial(const Plan& plan, const PartialForm& form);

}  // namespace moe_p2p::moe
