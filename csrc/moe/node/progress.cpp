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
  for (int l = 0; l < local; ++l) {
    const uint64_t word = std::atomic_ref(memory.head(l).progress).load(std::memory_order_relaxed);
    const bool preparing = (word & Progress::kPreparing) != 0;
    if (l != memory.local() && word != 0 && !preparing && word <= count)
      behind.push_back(first + l);
  }
  // What a combine of this rank needs is asked for once that has rung its doorbells.
  const bool combines =
      memory.rung(memory.local(), Phase::kCombine, last.slot).load(std::memory_order_relaxed) >=
      last.word();
  for (int source = 0; source < shape.world_size; ++source) {
    const int gateway = source % local;
    if (source / local == memory.node()) continue;
    const bool dispatched = arrived(memory, Phase::kDispatch, last, source, gateway);
    // Sums of another node come from the rank with this one's local index.
    const bool sums = combines && gateway == memory.local();
    if (!dispatched || (sums && !arrived(memory, Phase::kCombine, last, source, gateway)))
      behind.push_back(source);
  }
  return behind;
}

}  // namespace moe_p2p::moe
