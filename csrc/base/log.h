// One check macro and one log macro for all of csrc. Neither belongs on the data path.
// MOE_P2P_LOG (error, warning, info, debug; default warning) chooses what is printed to stderr.
#pragma once

#include <sstream>
#include <string>

#include "base/status.h"

namespace moe_p2p::base {

enum class LogLevel { kError, kWarning, kInfo, kDebug };

bool log_enabled(LogLevel level) noexcept;
void log_line(LogLevel level, const std::string& line) noexcept;

// concat("rank ", 3, " is gone") -> "rank 3 is gone"
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace moe_p2p::base

// MOE_P2P_CHECK(bytes > 0, Code::kInvalidArgument, "bytes is ", bytes, ", must be positive")
#define MOE_P2P_CHECK(condition, code, ...)                                     \
  do {                                                                          \
    if (!(condition)) [[unlikely]]                                              \
      throw ::moe_p2p::base::Error(code, ::moe_p2p::base::concat(__VA_ARGS__)); \
  } while (false)

#define MOE_P2P_LOG(level, ...)                                               \
  do {                                                                        \
    if (::moe_p2p::base::log_enabled(level))                                  \
      ::moe_p2p::base::log_line(level, ::moe_p2p::base::concat(__VA_ARGS__)); \
  } while (false)
