// Measures how long a receiving half waits for each source. Reads the clock only when ticks are
// asked for, so a simulation without them stays exact.
#pragma once

#include <algorithm>
#include <chrono>
#include <span>
#include <vector>

#include "moe/host/kernels.h"

namespace moe_p2p::moe {

class WaitClock {
 public:
  // Called at every look at the arrivals of `step`; the first call begins the wait. ticks: [W]
  // nanoseconds, summed over the steps of a call; null: not measured.
  void look(const HostKernels& kernels, Step step, abi::Phase phase, std::span<int64_t> ticks) {
    if (ticks.empty()) return;
    const auto now = platform::Clock::now();
    if (arrived_.empty()) std::ranges::fill(ticks, 0);
    if (arrived_.empty() || step_ != step.index) {
      arrived_.assign(ticks.size(), false);
      step_ = step.index;
      begin_ = now;
    }
    for (size_t source = 0; source < ticks.size(); ++source) {
      if (arrived_[source] || !kernels.arrived(step, phase, static_cast<int>(source))) continue;
      arrived_[source] = true;
      ticks[source] += std::chrono::nanoseconds(now - begin_).count();
    }
  }

 private:
  std::vector<bool> arrived_;  // sources of this step that have arrived
  uint64_t step_ = 0;
  platform::Clock::time_point begin_;
};

}  // namespace moe_p2p::moe
