// Keeps control calls and the polling thread out of libfabric at the same time: domains are opened
// with FI_THREAD_DOMAIN, or, with a NIC, FI_THREAD_COMPLETION, under which the caller must lock
// endpoint and completion queue. Under the latter memory may be registered and given back without
// the gate, which takes seconds for tens of GB. The polling thread never waits here: when the gate
// is taken it reports that nothing happened and tries again. A control call announces itself first,
// or a thread that polls without a pause would never let it in.
#pragma once

#include <sched.h>

#include <atomic>

#include "base/log.h"
#include "platform/wait.h"

namespace moe_p2p::provider::libfabric {

class Gate {
 public:
  // Polling thread. False: a control call is inside or waits.
  bool try_enter() noexcept {
    if (num_waiting_.load(std::memory_order_relaxed) != 0) return false;  // only a hint
    return take();
  }
  void leave() noexcept { taken_.store(false, std::memory_order_release); }  // pairs with take()

  // A control call, for the time of a scope.
  class Control {
   public:
    explicit Control(Gate& gate) : gate_(gate) {
      gate_.num_waiting_.fetch_add(1, std::memory_order_relaxed);
      const auto deadline = platform::Clock::now() + kPatience;
      while (!gate_.take()) {
        sched_yield();
        if (platform::Clock::now() < deadline) continue;
        gate_.num_waiting_.fetch_sub(1, std::memory_order_relaxed);
        throw base::Error(base::Code::kTimeout,
                          "libfabric: a call into the provider did not return within 10 s");
      }
    }
    ~Control() {
      gate_.leave();
      gate_.num_waiting_.fetch_sub(1, std::memory_order_relaxed);
    }
    Control(const Control&) = delete;
    Control& operator=(const Control&) = delete;

   private:
    static constexpr auto kPatience = std::chrono::seconds(10);
    Gate& gate_;
  };

 private:
  // acquire: pairs with the last leave().
  bool take() noexcept { return !taken_.exchange(true, std::memory_order_acquire); }

  std::atomic<bool> taken_{false};
  std::atomic<uint32_t> num_waiting_{0};
};

}  // namespace moe_p2p::provider::libfabric
