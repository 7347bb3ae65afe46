// What the control side and the polling thread of a NIC tell each other, in words that only grow.
#pragma once

#include <atomic>
#include <cstdint>

#include "platform/wait.h"

namespace moe_p2p::provider::verbs {

class Changes {
 public:
  // `waker` is the polling thread's; null when it never sleeps.
  explicit Changes(platform::EventCount* waker) noexcept : waker_(waker) {}

  // Control side: the polling thread is to look at its peers and at drain_wanted.
  void announce() noexcept {
    num_.fetch_add(1, std::memory_order_release);  // pairs with num()
    if (waker_) platform::notify_all(*waker_);
  }
  // Polling thread; acquire: pairs with announce().
  uint64_t num() const noexcept { return num_.load(std::memory_order_acquire); }

  // Tickets for emptying the completion queue. What was in it when the control side drew a ticket
  // (release) has been polled once the polling thread has stored that ticket as done (release).
  std::atomic<uint64_t> drain_wanted{0};
  std::atomic<uint64_t> drain_done{0};
  // Why this NIC takes no receives any more: an errno of its driver, stored by the polling thread
  // (release; acquire in Control). 0: it does.
  std::atomic<int> receive_error{0};

 private:
  std::atomic<uint64_t> num_{0};
  platform::EventCount* const waker_;
};

}  // namespace moe_p2p::provider::verbs
