// Adds the limit on locked memory to system errors that it may cause: NICs lock what they register.
#pragma once

#include <string>

namespace moe_p2p::provider {

// "; this process may lock 64 KiB of memory only (ulimit -l): raise it to unlimited", or "" when
// the error is of another kind or there is no limit. Takes an errno.
std::string locked_memory_hint(int error);

}  // namespace moe_p2p::provider
