#include "moe/node/progress.h"

namespace moe_p2p::moe {

using abi::Phase;

namespace {

// What `source` of another node sent in the step has arrived at its gateway here.
bool arrived(const NodeMemory& memory, Phase phase, Step step, int source, int gateway) noexcept {
  return memory.flag(gateway, phase, step.slot, source).load(std::memory_order_relaxed) >=
         step.flag();
}

}  // namespace

std::vector<int> ranks_behind(const abi::Shape& shape, const NodeMemory& memory, uint64_t count,
                              uint64_t step) {
  const int local = shape.ranks_per_node, first = memory.node() * local;
  const Step last = Step::of(step, shape.steps_in_flight);
  std::vector<int> behind;
  bool preparing = false;
  for (int l = 0; l < local; ++l) {
    const uint64_t word = std::atomic_ref(memory.head(l).progress).load(std::memory_order_relaxed);
    const uint64_t theirs = word & ~Progress::kPreparing;
    if (theirs == 0 || theirs > count) continue;
    preparing = preparing || (word & Progress::kPreparing) != 0;
    if ((word & Progress::kPreparing) == 0) behind.push_back(first + l);
  }
  const auto look_for = [&](Phase phase) {
    for (int source = 0; source < shape.world_size; ++source) {
      const int gateway = source % local;
      // Sums of another node come from the rank with this one's local index.
      const bool ours = phase == Phase::kDispatch || gateway == memory.local();
      if (source / local != memory.node() && ours && !arrived(memory, phase, last, source, gateway))
        behind.push_back(source);
    }
  };
  look_for(Phase::kDispatch);
  // A combine is waited for once all that was dispatched is there.
  if (behind.empty() && !preparing) look_for(Phase::kCombine);
  return behind;
}

}  // namespace moe_p2p::moe
