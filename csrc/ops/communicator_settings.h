// Settings of a communicator, as they cross from Python: one "key=value,..." text of
// moe_p2p/moe/config.py (AllToAllConfig.settings). `plan` takes the part that sizes memory.
#pragma once

#include <string>

#include "moe/all_to_all.h"

namespace moe_p2p::ops {

// Throw Error{kInvalidArgument} for an unknown key, and for a value that is no number or out of
// range. moe::make_plan checks the numbers against each other.
moe::PlanInput plan_input_from(const std::string& settings);
// Without masks.
moe::AllToAllOptions communicator_options_from(const std::string& settings);

}  // namespace moe_p2p::ops
