#include "provider/locked_memory.h"

#include <sys/resource.h>

#include <cerrno>

#include "base/log.h"

namespace moe_p2p::provider {

std::string locked_memory_hint(int error) {
  rlimit limit{};
  if (error != ENOMEM && error != EAGAIN && error != EPERM) return "";
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return base::concat("; this process may lock ", limit.rlim_cur / 1024,
                      " KiB of memory only (ulimit -l): raise it to unlimited");
}

}  // namespace moe_p2p::provider
