// The error text of a fault that a kernel reported.
#pragma once

#include <string>

#include "base/log.h"
#include "kernels/abi/params.h"
#include "moe/plan/plan.h"

namespace moe_p2p::moe {

// For any fault but kAborted; `rank` is the kernel's. For a timeout, `gone`: why the rank that it
// waited for will not arrive, if known; `progress`: what has arrived from it so far.
base::Error error_of(const abi::Fault& fault, const Plan& plan, int rank, const std::string& gone,
                     const std::string& progress);

}  // namespace moe_p2p::moe
