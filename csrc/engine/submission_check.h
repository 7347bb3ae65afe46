// Checks an operation against the memory it names, before anything is sent. Runs on the submitter's
// thread. Reads every page index once. Operations set up once and submitted from the polling thread
// skip it.
#pragma once

#include <string>

#include "engine/request.h"

namespace moe_p2p::engine {

// Throws Error{kInvalidArgument} that names the operation, the side, its range and the registered
// range.
void check_priority(int priority, const std::string& label);
void check_operation(const Operation& operation, int num_nics, const std::string& label);

}  // namespace moe_p2p::engine
