// What a communicator is made with, as it crosses from Python: one "key=value,..." text of
// moe_p2p/config.py (AllToAllConfig.settings). `plan` takes the part of it that sizes memory.
#pragma once

#include <string>

#include "moe/all_to_all.h"

namespace moe_p2p::ops {

// Throw Error{kInvalidArgument} for a key that is not known and a value that is no number or out of
// range. What the numbers must be together is checked by moe::make_plan.
moe::PlanInput plan_input_from(const std::string& settings);
// Without masks.
moe::AllToAllOptions communicator_options_from(const std::string& settings);

}  // namespace moe_p2p::ops
