// A peer's event count, mapped from the shared memory object it lies at the start of. Opened with
// three system calls and without the heap, so that a poll may do it once for a peer it has not
// seen.
#pragma once

#include <utility>

#include "platform/wait.h"

namespace moe_p2p::provider::loopback {

class Waker {
 public:
  Waker() = default;
  // Empty when `name` is empty or not there; notify() then does nothing.
  explicit Waker(const char* name) noexcept;
  Waker(Waker&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Waker& operator=(Waker&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Waker();

  explicit operator bool() const noexcept { return event_ != nullptr; }
  void notify() const noexcept {
    if (event_) platform::notify_all(*event_);
  }

 private:
  platform::EventCount* event_ = nullptr;
};

}  // namespace moe_p2p::provider::loopback
