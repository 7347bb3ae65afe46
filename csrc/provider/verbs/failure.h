// What went wrong with a write: from the NIC's words to a Status, and to a sentence for whoever has
// to mend it.
#pragma once

#include <atomic>
#include <string>

#include "provider/provider.h"
#include "provider/verbs/api.h"

namespace moe_p2p::provider::verbs {

// For a completion that is not good. `end` is why the peer is over, kOk while it is not. The detail
// is the NIC's own status.
base::Status status_of(int wc_status, base::Code end) noexcept;
// True when the write was refused and those behind it were not carried out: they may be sent again.
bool refused_only(base::Code code) noexcept;

// "remote access error (10)" and what usually is behind it.
std::string cause_of(int wc_status);

// The first write of a NIC that failed by itself. Kept by the polling thread, told by any other.
struct Failure {
  base::Status status;
  uint32_t vendor_error = 0;
  PeerId peer = 0;
  uint64_t remote_addr = 0;
  uint32_t remote_key = 0;
  uint32_t bytes = 0;
};

class FirstFailure {
 public:
  void keep(const Failure& failure) noexcept {
    if (there_.load(std::memory_order_relaxed)) return;  // one writer
    failure_ = failure;
    there_.store(true, std::memory_order_release);  // pairs with the acquire in get()
  }
  // Null while there is none.
  const Failure* get() const noexcept {
    return there_.load(std::memory_order_acquire) ? &failure_ : nullptr;
  }

 private:
  Failure failure_;
  std::atomic<bool> there_{false};
};

}  // namespace moe_p2p::provider::verbs
