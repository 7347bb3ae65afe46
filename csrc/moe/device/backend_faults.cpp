// What kernels have reported, as errors.
#include <atomic>

#include "moe/device/backend.h"
#include "moe/device/fault.h"

namespace moe_p2p::moe {

const abi::Fault* DeviceBackend::fault() const noexcept {
  // acquire: pairs with raise_fault() of the device.
  const bool complete =
      std::atomic_ref(memory_.fault->complete).load(std::memory_order_acquire) != 0;
  return complete ? memory_.fault : nullptr;
}

void DeviceBackend::check() const {
  const abi::Fault* raised = fault();
  if (raised == nullptr || raised->raised == abi::kAborted) waits_.check_abort([] { return ""; });
  if (raised == nullptr) return;
  if (raised->raised != abi::kTimedOut) throw error_of(*raised, plan_, comm_.rank, "", "");
  const abi::Shape& shape = plan_.shape;
  const int node = raised->source / shape.ranks_per_node;  // of the rank that was waited for
  const int local = raised->source % shape.ranks_per_node;
  std::string progress;  // other local ranks of that node send to other gateways here
  if (node != comm_.rank / shape.ranks_per_node && local == local_)
    progress = ", " + waits_.progress({Step::of(raised->step, shape.steps_in_flight),
                                       static_cast<abi::Phase>(raised->phase)},
                                      node);
  throw error_of(*raised, plan_, comm_.rank, waits_.gone(local), progress);
}

}  // namespace moe_p2p::moe
