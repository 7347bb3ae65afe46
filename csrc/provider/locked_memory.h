// NICs lock what they register. What to add to a system error that may come of the limit on that.
#pragma once

#include <string>

namespace moe_p2p::provider {

// "; this process may lock 64 KiB of memory only (ulimit -l): raise it to unlimited", or nothing
// where the error is of another kind or there is no limit. Takes an errno.
std::string locked_memory_hint(int error);

}  // namespace moe_p2p::provider
