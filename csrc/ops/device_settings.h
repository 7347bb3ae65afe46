// What a communicator's kernels work with, as it crosses from Python: "key=value,..." texts of
// moe_p2p/moe/gpu/kernels.py, whose keys are the fields of the structs.
#pragma once

#include <string>

#include "moe/device/backend.h"

namespace moe_p2p::ops {

// Throw Error{kInvalidArgument} for an unknown or missing key, and for a value that is out of
// range.
moe::DeviceMemory device_memory_from(const std::string& settings);
moe::DeviceKernel device_kernel_from(const std::string& settings);

}  // namespace moe_p2p::ops
