#include "engine/request.h"

#include <sched.h>

#include "engine/finished_queue.h"

namespace moe_p2p::engine {

bool Request::active() const noexcept {
  const Phase phase = phase_.load(std::memory_order_acquire);  // pairs with finish()
  return phase == Phase::kActive || phase == Phase::kFinishing;
}

void Request::start() noexcept {
  status_ = {};
  first_post_ = end_ = {};
  watcher_.store(0, std::memory_order_relaxed);  // as the phase
  // relaxed: the push into the mailbox publishes the Request to the polling thread.
  phase_.store(Phase::kActive, std::memory_order_relaxed);
}

void Request::finish() noexcept {
  if (timed) end_ = platform::Clock::now();
  // acq_rel: pairs with watch(), whose queue this thread then uses.
  const uintptr_t watcher = watcher_.exchange(kEnded, std::memory_order_acq_rel);
  if (watcher != 0) reinterpret_cast<FinishedQueue*>(watcher)->push(*this);
  // release, twice: pair with the acquires in wait() and done(), which make status_ visible.
  phase_.store(Phase::kFinishing, std::memory_order_release);
  platform::notify_all(event_);
  phase_.store(Phase::kDone, std::memory_order_release);
}

bool Request::watch(FinishedQueue& queue) noexcept {
  const auto own = reinterpret_cast<uintptr_t>(&queue);
  for (uintptr_t seen = 0;;) {
    // acq_rel: pairs with finish(): the polling thread uses the queue, or this one the Request.
    if (watcher_.compare_exchange_strong(seen, own, std::memory_order_acq_rel)) {
      if (seen == kEnded) queue.push(*this);
      return true;
    }
    if (seen != 0 && seen != kEnded) return seen == own;
  }
}

void Request::take_from_queue() noexcept {
  while (!done()) sched_yield();                      // as in wait()
  watcher_.store(kEnded, std::memory_order_release);  // pairs with watch()
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
