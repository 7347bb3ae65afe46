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

// Bytes from one combined row to the next.
uint64_t partial_stride(const Plan& plan, abi::DType dtype, bool scalars) noexcept;
// Throws Error{kInvalidArgument} when such a row is larger than the communicator was made for.
void check_partial(const Plan& plan, abi::DType dtype, bool scalars);

}  // namespace moe_p2p::moe
