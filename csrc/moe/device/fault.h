// The error text of what a kernel reported.
#pragma once

#include <string>

#include "base/log.h"
#include "kernels/abi/params.h"
#include "moe/plan/plan.h"

namespace moe_p2p::moe {

// Of any fault but kAborted; `rank` is the kernel's. Of a timeout, `gone`: why the rank that it
// waited for will not come, if that is known; `progress`: what came of it so far.
base::Error error_of(const abi::Fault& fault, const Plan& plan, int rank, const std::string& gone,
                     const std::string& progress);

}  // namespace moe_p2p::moe
