// How tests wait. Anything may take long on a machine with much to do, so a wait ends when nothing
// has moved for a minute, not some time after its start: that turns a hang into a failure.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include "platform/wait.h"

namespace moe_p2p::test {

inline constexpr std::chrono::seconds kStandstill{60};

// The deadline of a wait for one event.
inline platform::Deadline soon() { return platform::Clock::now() + kStandstill; }

// While it lives, sleepers wake by notifications alone: at other times one that is missing costs
// the rest of a nap, which no test sees.
class OnlyNotified {
 public:
  OnlyNotified() { platform::longest_nap = std::chrono::hours(1); }
  ~OnlyNotified() { platform::longest_nap = before_; }
  OnlyNotified(const OnlyNotified&) = delete;
  OnlyNotified& operator=(const OnlyNotified&) = delete;

  // Of waits that are to sleep.
  static constexpr platform::WaitPolicy kAtOnce{platform::WaitMode::kSleep, {}, {}};

  // Whether wait(deadline) has ended well, and not by its deadline: it looks once more then.
  template <typename Wait>
  static bool woken(Wait&& wait) {
    const platform::Deadline deadline = soon();
    return wait(deadline) && platform::Clock::now() < deadline;
  }

 private:
  const std::chrono::milliseconds before_ = platform::longest_nap;
};

// Whether that thread of this process sleeps in a call of the system.
inline bool sleeps(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  return name_end != std::string::npos && line[name_end + 2] == 'S';
}

// Of a thread that polls. Other threads may need its core: it is offered at every 64th poll in
// vain, and for longer the longer nothing has moved. At every poll would be far too often: an
// adversary shows nothing in most of them, and on a busy machine a yield costs milliseconds.
class Patience {
 public:
  // Call it after each poll. False once nothing has moved for a minute.
  bool polled(bool moved) {
    num_in_vain_ = moved ? 0 : num_in_vain_ + 1;
    return num_in_vain_ == 0 || num_in_vain_ % 64 != 0 || offer_core();
  }

 private:
  bool offer_core() {
    using std::chrono::milliseconds;
    const auto now = platform::Clock::now();
    if (num_in_vain_ == 64) last_moved_ = now;
    const auto since = now - last_moved_;
    if (since < milliseconds(1)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<platform::Clock::duration>(since / 8, milliseconds(5)));
    }
    return since < kStandstill;
  }

  uint32_t num_in_vain_ = 0;
  platform::Deadline last_moved_{};
};

// Polls until ready(); false when nothing has moved for a minute. poll() says whether something
// has.
template <typename Poll, typename Ready>
bool poll_until(Poll&& poll, Ready&& ready) {
  Patience patience;
  while (!ready())
    if (!patience.polled(poll())) return ready();
  return true;
}

}  // namespace moe_p2p::test
