#include "engine/gpu_flushes.h"

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::engine {

void GpuFlushes::include(const provider::MemorySpan& memory) {
  const std::lock_guard lock(mutex_);
  const bool included = std::ranges::any_of(gpus_, [&](const auto& gpu) {
    return gpu->device == memory.device && gpu->for_neighbours >= memory.read_by_neighbours;
  });
  if (included) return;
  auto gpu = std::make_unique<const Gpu>(memory, first_.load(std::memory_order_relaxed));
  if (!gpu->flush.needed()) return;
  gpus_.push_back(std::move(gpu));
  first_.store(gpus_.back().get(), std::memory_order_release);  // pairs with flush()
}

std::string GpuFlushes::failure() const {
  const int error = error_.load(std::memory_order_relaxed);
  return error == 0 ? ""
                    : base::concat(
                          "the GPU does not flush what NICs wrote: ", platform::driver_error(error),
                          "; immediates are kept back since then");
}

}  // namespace moe_p2p::engine
