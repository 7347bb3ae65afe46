// The error text of what a kernel reported.
#pragma once

#include <string>

#include "base/log.h"
#include "kernels/abi/params.h"

namespace moe_p2p::moe {

// `rank`: of the kernel. `gone`: why the rank that it waited for will not come, if that is known.
base::Error error_of(const abi::Fault& fault, int rank, int num_experts, const std::string& gone);

}  // namespace moe_p2p::moe
