// A peer's event count, mapped from the shared memory object that begins with it. Opened with three
// system calls and without the heap, so that a poll may do it once for a new peer.
#pragma once

#include <utility>

#include "platform/wait.h"

namespace moe_p2p::provider::loopback {

class Waker {
 public:
  Waker() = default;
  // Empty when `name` is empty or does not exist; notify() then does nothing.
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
