// The data path of the software NIC: what the polling thread runs. Sender and Receiver do the work.
#include "provider/loopback/domain.h"

namespace moe_p2p::provider::loopback {

size_t LoopbackDomain::post(std::span<const WorkRequest> requests) noexcept {
  // acquire: pairs with kill().
  if (dead_.load(std::memory_order_acquire)) sender_.abandon();
  const RegionTable::Pass pass(regions_);
  return sender_.post(requests);
}

size_t LoopbackDomain::poll(std::span<Completion> completions) noexcept {
  Output output{completions};
  if (dead_.load(std::memory_order_acquire)) {
    sender_.abandon();
    sender_.complete_writes(output);
    return output.count;
  }
  const RegionTable::Pass pass(regions_);
  // Alternates: a caller with a short array must not get one kind of completion only.
  receive_first_ = !receive_first_;
  if (receive_first_) receiver_.poll(output);
  sender_.complete_writes(output);
  if (!receive_first_) receiver_.poll(output);
  sender_.pump();
  return output.count;
}

bool LoopbackDomain::idle() const noexcept {
  return sender_.idle() && (dead_.load(std::memory_order_acquire) || !receiver_.pending());
}

}  // namespace moe_p2p::provider::loopback
