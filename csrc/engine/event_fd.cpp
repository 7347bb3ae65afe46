#include "engine/event_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/log.h"

namespace moe_p2p::engine {

EventFd::EventFd(const char* what) : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  MOE_P2P_CHECK(fd_ >= 0, base::Code::kResourceExhausted, "no eventfd for ", what, ": ",
                std::strerror(errno));
}

EventFd::~EventFd() { close(fd_); }

// Neither can fail but for a full or an empty counter, which changes nothing.
void EventFd::signal() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
}

void EventFd::clear() noexcept {
  uint64_t count = 0;
  [[maybe_unused]] const auto read_bytes = read(fd_, &count, sizeof count);
}

}  // namespace moe_p2p::engine
