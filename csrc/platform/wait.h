// Waits without occupying a core that others need: spin, then yield, then sleep on a futex.
// EventCount is a plain zero-initialised pair of words that may lie in memory shared between
// processes. Call notify_all() after changing a word that others wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace moe_p2p::platform {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct EventCount {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> num_waiters;
};
static_assert(sizeof(EventCount) == 8 && std::atomic<uint32_t>::is_always_lock_free);

enum class WaitMode : int32_t {
  kSpin,   // never leaves the core: lowest latency, needs a core per waiter
  kYield,  // yields the core between looks, never sleeps
  kSleep,  // spins and yields for a moment, then sleeps until notified
};

// A nap is no longer, however far the deadline is: a dead peer cannot notify.
#if defined(MOE_P2P_TESTING)
inline std::atomic<std::chrono::milliseconds> longest_nap{std::chrono::milliseconds(100)};
#else
inline constexpr std::chrono::milliseconds longest_nap{100};
#endif

struct WaitPolicy {
  WaitMode mode = WaitMode::kSleep;
  // Too small: a futex round trip (about 5 us and a wake-up by the peer) per short wait. Too large:
  // ranks that share a core take each other's time.
  std::chrono::microseconds spin{2};
  std::chrono::microseconds yield{50};
};

// Wakes every sleeper of `event`. One atomic add when there is none. Safe in any thread or process.
void notify_all(EventCount& event) noexcept;

// One wait of one waiter: call pause() after each look that found nothing. It returns false once
// the deadline has passed. prepare() must come before the look that precedes a pause(), so that a
// notification between look and sleep is not lost.
class Waiter {
 public:
  Waiter(EventCount& event, const WaitPolicy& policy, Deadline deadline) noexcept;
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  void prepare() noexcept;
  bool pause() noexcept;

 private:
  EventCount& event_;
  const WaitPolicy& policy_;
  const Deadline deadline_;
  const Clock::time_point start_;
  uint32_t seen_ = 0;
  bool sleeping_ = false;  // counted in event_.num_waiters
};

// Returns true once ready() holds, false when the deadline passed first.
template <typename Ready>
bool wait_until(EventCount& event, const WaitPolicy& policy, Deadline deadline, Ready&& ready) {
  if (ready()) return true;
  Waiter waiter(event, policy, deadline);
  for (;;) {
    waiter.prepare();
    if (ready()) return true;
    if (!waiter.pause()) return ready();
  }
}

}  // namespace moe_p2p::platform
