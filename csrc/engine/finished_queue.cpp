#include "engine/finished_queue.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace moe_p2p::engine {

FinishedQueue::FinishedQueue() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  MOE_P2P_CHECK(fd_ >= 0, base::Code::kResourceExhausted,
                "no eventfd for finished requests: ", std::strerror(errno));
}

FinishedQueue::~FinishedQueue() { close(fd_); }

// The system call is made for the first Request only: who takes it takes all that follow.
void FinishedQueue::push(MailboxNode& request) noexcept {
  if (ended_.push(request)) signal();
}

// Neither can fail but for a full or an empty counter, which changes nothing.
void FinishedQueue::signal() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
}

// Before the list is taken: what is pushed afterwards signals again.
void FinishedQueue::clear() noexcept {
  uint64_t count = 0;
  [[maybe_unused]] const auto read_bytes = read(fd_, &count, sizeof count);
}

}  // namespace moe_p2p::engine
