// Watches one wait of a host for other ranks: counts its time by the rank that is waited for, and
// names ranks that are late long before the deadline, once, in one line; another line says when
// they came. Used by Waits, in the thread that waits.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "moe/counters.h"
#include "platform/wait.h"

namespace moe_p2p::moe {

// A quarter of the deadline, so that there is time to look, and at most 5 s. Too small: ranks that
// compile, load data or write a checkpoint are named in every healthy run.
constexpr std::chrono::milliseconds straggles_after(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout / 4, std::chrono::seconds(5));
}

// "rank 3 on node17"; hosts: [W] names, or none.
std::string rank_on(const std::vector<std::string>& hosts, int rank);

class WaitWatch {
 public:
  using Arrived = std::function<bool(int source)>;
  using Text = std::function<std::string()>;

  // hosts: [W] names, or none. Both outlive this object, and so do the functions.
  WaitWatch(Counters& counters, int rank, const std::vector<std::string>& hosts,
            std::chrono::milliseconds timeout, const Arrived& arrived, const Text& text);
  ~WaitWatch() { charge(looked_at_); }
  WaitWatch(const WaitWatch&) = delete;
  WaitWatch& operator=(const WaitWatch&) = delete;

  // After each look that found nothing; `now` is before it.
  void look(platform::Clock::time_point now);
  // The look that began `now` has found what was waited for, and used it.
  void found(platform::Clock::time_point now) noexcept {
    if (looks_) looked_at_ = now;
  }
  // The wait is over. masked(source): it goes on without this rank.
  void done(const std::function<bool(int source)>& masked);

 private:
  // Charges the time since the last charge to the first rank that has not arrived.
  void charge(platform::Clock::time_point now);
  void name(platform::Clock::time_point now);
  std::string described(int source) const { return rank_on(hosts_, source); }
  int64_t ms_since_begin(platform::Clock::time_point now) const;

  Counters& counters_;
  const int rank_;
  const std::vector<std::string>& hosts_;
  const std::chrono::milliseconds timeout_;
  const Arrived& arrived_;
  const Text& text_;
  const platform::Clock::time_point began_;
  platform::Clock::time_point charged_, looked_at_;
  size_t source_ = 0;  // ranks before it have arrived
  std::vector<int> named_;
  std::string awaited_;  // as it was when they were named
  bool looks_ = false;   // some look found nothing
  bool late_ = false;    // ranks were named, if there were any
};

}  // namespace moe_p2p::moe
