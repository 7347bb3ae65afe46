#include "engine/poller_call.h"

#include <utility>

namespace moe_p2p::engine {

void PollerCall::run() noexcept {
  State expected = State::kWaiting;
  // acquire: pairs with the release in CallPool::take(). wait() exchanges kWaiting for kCancelled:
  // exactly one of the two exchanges succeeds.
  if (!state_.compare_exchange_strong(expected, State::kRunning, std::memory_order_acquire)) {
    state_.store(State::kFree, std::memory_order_release);  // pairs with the acquire in take()
    return;
  }
  try {
    (*closure_)();
  } catch (...) {
    error_ = std::current_exception();
  }
  state_.store(State::kDone, std::memory_order_release);  // pairs with the acquire in finished()
  platform::notify_all(event_);
}

bool PollerCall::finished() const noexcept {
  return state_.load(std::memory_order_acquire) == State::kDone;  // pairs with run()
}

bool PollerCall::wait(platform::Deadline deadline) {
  const platform::WaitPolicy policy;
  const auto done = [this] { return finished(); };
  if (!platform::wait_until(event_, policy, deadline, done)) {
    State expected = State::kWaiting;
    // relaxed: the poller reads nothing of ours when its exchange fails.
    if (state_.compare_exchange_strong(expected, State::kCancelled, std::memory_order_relaxed))
      return false;
    while (!platform::wait_until(event_, policy, platform::Clock::now() + std::chrono::seconds(1),
                                 done)) {
    }
  }
  const std::exception_ptr error = std::exchange(error_, nullptr);
  state_.store(State::kFree, std::memory_order_release);  // pairs with the acquire in take()
  if (error) std::rethrow_exception(error);
  return true;
}

PollerCall& CallPool::take(const Closure& closure) {
  const std::lock_guard lock(mutex_);
  PollerCall* free = nullptr;
  for (const auto& call : calls_) {
    // acquire: pairs with the release that freed it, in run() or wait().
    if (call->state_.load(std::memory_order_acquire) == PollerCall::State::kFree) {
      free = call.get();
      break;
    }
  }
  if (free == nullptr) free = calls_.emplace_back(std::make_unique<PollerCall>()).get();
  free->closure_ = &closure;
  // release: pairs with the acquire in run().
  free->state_.store(PollerCall::State::kWaiting, std::memory_order_release);
  return *free;
}

}  // namespace moe_p2p::engine
