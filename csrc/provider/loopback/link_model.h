// A link of finite speed: fragments of one NIC leave one after the other at `gbps`, and arrive
// `latency_us` after they have left. Pure arithmetic on a time that the caller passes in, so tests
// need no clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "platform/wait.h"

namespace moe_p2p::provider::loopback {

// CLOCK_MONOTONIC: the same for all processes of the host.
inline int64_t now_ns() noexcept {
  return std::chrono::nanoseconds(platform::Clock::now().time_since_epoch()).count();
}

class LinkModel {
 public:
  LinkModel(double gbps, double latency_us) noexcept
      : on_(gbps > 0 || latency_us > 0),
        ns_per_byte_(gbps > 0 ? 8 / gbps : 0),
        latency_ns_(static_cast<int64_t>(latency_us * 1e3)) {}

  bool on() const noexcept { return on_; }
  int64_t latency_ns() const noexcept { return latency_ns_; }

  // Returns when `bytes` handed over at `now` arrive. Call it in the order of transmission.
  int64_t transmit(int64_t now, uint64_t bytes) noexcept {
    const double start = std::max(static_cast<double>(now - origin(now)), busy_until_);
    busy_until_ = start + static_cast<double>(bytes) * ns_per_byte_;
    return origin_ + static_cast<int64_t>(busy_until_) + latency_ns_;
  }

 private:
  // Times count from the first call: a double then keeps fractions of a nanosecond for years.
  int64_t origin(int64_t now) noexcept {
    if (origin_ == 0) origin_ = now;
    return origin_;
  }

  bool on_;
  double ns_per_byte_;
  int64_t latency_ns_;
  int64_t origin_ = 0;
  double busy_until_ = 0;
};

}  // namespace moe_p2p::provider::loopback
