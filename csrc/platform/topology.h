// The identity of the host, which decides which ranks share memory.
#pragma once

#include <string>

namespace moe_p2p::platform {

// Equal for two processes exactly when POSIX shared memory made by one can be opened by the other:
// the kernel's boot id plus the identity of the /dev/shm mount (containers have their own).
std::string host_identity();

}  // namespace moe_p2p::platform
