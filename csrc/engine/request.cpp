#include "engine/request.h"

#include <sched.h>

namespace moe_p2p::engine {

bool Request::active() const noexcept {
  const Phase phase = phase_.load(std::memory_order_acquire);  // pairs with finish()
  return phase == Phase::kActive || phase == Phase::kFinishing;
}

void Request::start() noexcept {
  status_ = {};
  // relaxed: the push into the mailbox publishes the Request to the polling thread.
  phase_.store(Phase::kActive, std::memory_order_relaxed);
}

void Request::finish() noexcept {
  // release, twice: pair with the acquires in wait() and done(), which make status_ visible.
  phase_.store(Phase::kFinishing, std::memory_order_release);
  platform::notify_all(event_);
  phase_.store(Phase::kDone, std::memory_order_release);
}

bool Request::wait(platform::Deadline deadline, const platform::WaitPolicy& policy) {
  const auto finishing = [this] {
    return phase_.load(std::memory_order_acquire) >= Phase::kFinishing;  // pairs with finish()
  };
  if (!platform::wait_until(event_, policy, deadline, finishing)) return false;
  // The polling thread is between the two stores of finish() and uses the Request until the second.
  while (!done()) sched_yield();
  return true;
}

}  // namespace moe_p2p::engine
