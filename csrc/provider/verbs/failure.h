// Failed writes: turns the NIC's status into a Status and an error text.
#pragma once

#include <atomic>
#include <string>

#include "provider/provider.h"
#include "provider/verbs/api.h"

namespace moe_p2p::provider::verbs {

// For a failed completion. `end` is why the peer ended, kOk while it has not. The detail is the
// NIC's own status.
base::Status status_of(int wc_status, base::Code end) noexcept;
// True when the write was refused and later writes were not carried out: they may be sent again.
bool refused_only(base::Code code) noexcept;

// "remote access error (10)" and its usual cause.
std::string cause_of(int wc_status);

// The first write of a NIC that failed by itself. Kept by the polling thread, read by any thread.
struct Failure {
  base::Status status;
  uint32_t vendor_error = 0;
  PeerId peer = 0;
  uint64_t remote_addr = 0;
  uint32_t remote_key = 0;
  uint32_t bytes = 0;
  bool is_read = false;
};

class FirstFailure {
 public:
  void keep(const Failure& failure) noexcept {
    if (there_.load(std::memory_order_relaxed)) return;  // one writer
    failure_ = failure;
    there_.store(true, std::memory_order_release);  // pairs with the acquire in get()
  }
  // Null without a failure.
  const Failure* get() const noexcept {
    return there_.load(std::memory_order_acquire) ? &failure_ : nullptr;
  }

 private:
  Failure failure_;
  std::atomic<bool> there_{false};
};

}  // namespace moe_p2p::provider::verbs
