// A link of finite speed: fragments of one NIC leave one after the other at `gbps`, and arrive
// `latency_us` after they have left. A write also costs `post_us` before it may leave, and takes
// the link for `message_us` at least. Pure arithmetic on a time that the caller passes in, so tests
// need no clock.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

#include "platform/wait.h"

namespace moe_p2p::provider::loopback {

// CLOCK_MONOTONIC: the same for all processes of the host.
inline int64_t now_ns() noexcept {
  return std::chrono::nanoseconds(platform::Clock::now().time_since_epoch()).count();
}

// The time that a NIC's link model goes by; tests put a clock of their own in its place.
class TimeSource {
 public:
  int64_t now_ns() const noexcept { return now_.load(std::memory_order_relaxed)(); }
  void use(int64_t (*now)()) noexcept { now_.store(now, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t (*)()> now_{loopback::now_ns};
};

class LinkModel {
 public:
  LinkModel(double gbps, double latency_us, double post_us = 0, double message_us = 0) noexcept
      : on_(gbps > 0 || latency_us > 0 || post_us > 0 || message_us > 0),
        ns_per_byte_(gbps > 0 ? 8 / gbps : 0),
        latency_ns_(static_cast<int64_t>(latency_us * 1e3)),
        post_ns_(post_us * 1e3),
        message_ns_(message_us * 1e3) {}

  bool on() const noexcept { return on_; }
  int64_t latency_ns() const noexcept { return latency_ns_; }

  // Returns when `bytes` handed over at `now` arrive. Call it in the order of transmission.
  // first: they begin a write.
  int64_t transmit(int64_t now, uint64_t bytes, bool first = true) noexcept {
    const auto at = static_cast<double>(now - origin(now));
    if (first) posted_at_ = std::max(at, posted_at_) + post_ns_;
    const double start = std::max({at, first ? posted_at_ : at, busy_until_});
    const double took = static_cast<double>(bytes) * ns_per_byte_;
    busy_until_ = start + (first ? std::max(took, message_ns_) : took);
    return origin_ + static_cast<int64_t>(busy_until_) + latency_ns_;
  }
  uint64_t bytes_in(int64_t ns) const noexcept {
    return ns_per_byte_ > 0 ? static_cast<uint64_t>(static_cast<double>(ns) / ns_per_byte_)
                            : std::numeric_limits<uint64_t>::max();
  }
  // How long what was handed over before `now` still takes to leave.
  int64_t backlog_ns(int64_t now) noexcept {
    return static_cast<int64_t>(busy_until_) - (now - origin(now));
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
  double post_ns_, message_ns_;
  int64_t origin_ = 0;
  double posted_at_ = 0, busy_until_ = 0;
};

}  // namespace moe_p2p::provider::loopback
