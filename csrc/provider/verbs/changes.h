// Words between the control side and the polling thread of a NIC; all but receive_error only grow.
#pragma once

#include <atomic>
#include <cstdint>

#include "platform/wait.h"

namespace moe_p2p::provider::verbs {

class Changes {
 public:
  // `waker` is the polling thread's; null when it never sleeps.
  explicit Changes(platform::EventCount* waker) noexcept : waker_(waker) {}

  // Control side: makes the polling thread check its peers and drain_wanted.
  void announce() noexcept {
    num_.fetch_add(1, std::memory_order_release);  // pairs with num()
    if (waker_) platform::notify_all(*waker_);
  }
  // Polling thread; acquire: pairs with announce().
  uint64_t num() const noexcept { return num_.load(std::memory_order_acquire); }

  // Tickets for draining the completion queue. Once drain_done reaches a ticket (release, polling
  // thread), what was in the queue when the control side drew it (release) has been polled.
  std::atomic<uint64_t> drain_wanted{0};
  std::atomic<uint64_t> drain_done{0};
  // The driver's errno with which this NIC stopped taking receives; 0: it takes them. Stored by the
  // polling thread (release; acquire in Control::look and VerbsDomain::failure).
  std::atomic<int> receive_error{0};

 private:
  std::atomic<uint64_t> num_{0};
  platform::EventCount* const waker_;
};

}  // namespace moe_p2p::provider::verbs
