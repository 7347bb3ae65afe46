#include "base/log.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace moe_p2p::base {
namespace {

LogLevel level_from_environment() noexcept {
  const char* value = std::getenv("MOE_P2P_LOG");
  const std::string_view name = value ? value : "warning";
  if (name == "error") return LogLevel::kError;
  if (name == "info") return LogLevel::kInfo;
  if (name == "debug") return LogLevel::kDebug;
  return LogLevel::kWarning;
}

constexpr const char* kLevelNames[] = {"error", "warning", "info", "debug"};

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
