// How far the kernels of a rank on a GPU are, as a thread of its host finds out now and then
// (moe_p2p/moe/gpu/watch.py): it tells neighbours by a word in its signal memory, and finds out who
// is behind. Kernels know nothing of it.
//
// Ranks make the same calls in one order, so others wait for a rank that is behind, or soon will.
// Of ranks of other nodes the host knows what has arrived here.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/node/memory.h"
#include "moe/plan/step.h"

namespace moe_p2p::moe {

struct Progress {
  uint64_t count = 0;      // of kernels, or steps, alike on all ranks; it only grows
  bool preparing = false;  // it compiles kernels: it is late, and will come

  static constexpr uint64_t kPreparing = uint64_t{1} << 63;
  // 0: not known.
  uint64_t word() const noexcept { return (count + 1) | (preparing ? kPreparing : 0); }
};

inline void publish(const NodeMemory& memory, const Progress& progress) noexcept {
  // relaxed: for a line in a log; no data depends on it.
  std::atomic_ref(memory.head(memory.local()).progress)
      .store(progress.word(), std::memory_order_relaxed);
}

// Ranks, among all others, that have not come as far as this one, whose kernels have begun step
// `step` last.
std::vector<int> ranks_behind(const abi::Shape& shape, const NodeMemory& memory, uint64_t count,
                              uint64_t step);

}  // namespace moe_p2p::moe
