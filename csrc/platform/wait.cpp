#include "platform/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moe_p2p::platform {
namespace {

// Shared futexes (no FUTEX_PRIVATE_FLAG): the word may be mapped by several processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t expected,
                std::chrono::nanoseconds timeout) noexcept {
  const timespec spec{static_cast<time_t>(timeout.count() / 1'000'000'000),
                      static_cast<long>(timeout.count() % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &spec, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void relax_cpu() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// seq_cst on both words, here and in Waiter::prepare(): the notifier adds to `sequence` and then
// reads `num_waiters`, the waiter adds to `num_waiters` and then reads `sequence`. With anything
// weaker both may read the old value, and the waiter sleeps through the only notification.
void notify_all(EventCount& event) noexcept {
  event.sequence.fetch_add(1, std::memory_order_seq_cst);
  if (event.num_waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(event.sequence);
}

Waiter::Waiter(EventCount& event, const WaitPolicy& policy, Deadline deadline) noexcept
    : event_(event), policy_(policy), deadline_(deadline), start_(Clock::now()) {}

Waiter::~Waiter() {
  if (sleeping_) event_.num_waiters.fetch_sub(1, std::memory_order_relaxed);
}

void Waiter::prepare() noexcept {
  if (!sleeping_ && policy_.mode == WaitMode::kSleep &&
      Clock::now() - start_ >= policy_.spin + policy_.yield) {
    event_.num_waiters.fetch_add(1, std::memory_order_seq_cst);
    sleeping_ = true;
  }
  if (sleeping_) seen_ = event_.sequence.load(std::memory_order_seq_cst);
}

bool Waiter::pause() noexcept {
  const auto now = Clock::now();
  if (now >= deadline_) return false;
  if (sleeping_) {
    futex_wait(event_.sequence, seen_,
               std::min<std::chrono::nanoseconds>(deadline_ - now,
                                                  std::chrono::milliseconds(longest_nap)));
  } else if (policy_.mode == WaitMode::kSpin || now - start_ < policy_.spin) {
    relax_cpu();
  } else {
    sched_yield();
  }
  return true;
}

}  // namespace moe_p2p::platform
