#include "base/log.h"

#include <strings.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace moe_p2p::base {
namespace {

constexpr const char* kLevelNames[] = {"error", "warning", "info", "debug"};

// Of another name moe_p2p/log.py warns.
LogLevel level_from_environment() noexcept {
  const char* value = std::getenv("MOE_P2P_LOG");
  for (const LogLevel level : {LogLevel::kError, LogLevel::kInfo, LogLevel::kDebug})
    if (value && strcasecmp(value, kLevelNames[static_cast<int>(level)]) == 0) return level;
  return LogLevel::kWarning;
}

}  // namespace

bool log_enabled(LogLevel level) noexcept {
  static const LogLevel threshold = level_from_environment();
  return level <= threshold;
}

void log_line(LogLevel level, const std::string& line) noexcept {
  std::fprintf(stderr, "moe_p2p %s [pid %d] %s\n", kLevelNames[static_cast<int>(level)],
               static_cast<int>(getpid()), line.c_str());
}

}  // namespace moe_p2p::base
