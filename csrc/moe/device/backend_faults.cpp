// What kernels have reported, as errors.
#include <atomic>

#include "moe/device/backend.h"
#include "moe/device/fault.h"

namespace moe_p2p::moe {

const abi::Fault* DeviceBackend::fault() const noexcept {
  if (failed_) return nullptr;  // a later epoch's, if it is one
  // acquire: pairs with raise_fault() of the device.
  const uint32_t complete =
      std::atomic_ref(memory_.fault->complete).load(std::memory_order_acquire);
  const bool ours =
      memory_.table != 0 ? complete == abi::epoch_mark(table_.communicator) : complete != 0;
  return ours ? memory_.fault : nullptr;
}

Lost DeviceBackend::lost() const noexcept {
  // acquire: pairs with count_lost() of the device.
  const uint64_t word = std::atomic_ref(memory_.fault->lost_tokens).load(std::memory_order_acquire);
  if (word >> abi::kMarkBit != abi::epoch_mark(comm_.communicator)) return {};
  return {.num_tokens = word & ((uint64_t{1} << abi::kMarkBit) - 1),
          .step = std::atomic_ref(memory_.fault->lost_step).load(std::memory_order_relaxed),
          .rank = static_cast<int>(
              std::atomic_ref(memory_.fault->lost_rank).load(std::memory_order_relaxed))};
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
