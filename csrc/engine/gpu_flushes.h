// Makes what NICs wrote into GPU memory visible to all its readers. A NIC's completion means that
// the payload is on its way into the GPU, and GPUs differ in how they order such writes
// (platform/gpu_writes.h); so the Poller flushes after it took immediates from a NIC and before it
// counts the first, for the readers of the announced data. Serves all providers whose writes a
// device carries out (Domain::needs_gpu_flush).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/imm_counter.h"
#include "platform/gpu_writes.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

class GpuFlushes {
 public:
  // Any thread. From now on flush() includes the GPU of `memory`, if that does not order writes for
  // all readers of the memory. Throws Error{kUnavailable} when the GPU neither orders them nor can
  // flush.
  void include(const provider::MemorySpan& memory);
  // True once a flush has failed: its immediates and later ones are not counted.
  bool failed() const noexcept { return error_.load(std::memory_order_relaxed) != 0; }
  // "the GPU does not flush ...", empty while every flush has succeeded.
  std::string failure() const;

  // Polling thread.
  bool needed() const noexcept { return first_.load(std::memory_order_relaxed) != nullptr; }
  // For readers on GPUs: the owners of the memory alone, or their neighbours too. False when a GPU
  // could not flush: then no immediate may be counted.
  bool flush(Readers readers) noexcept {
    if (failed()) return false;
    if (readers == Readers::kNobody) return true;
    // acquire: pairs with include().
    for (const Gpu* gpu = first_.load(std::memory_order_acquire); gpu != nullptr; gpu = gpu->next) {
      const int error = gpu->flush.flush(readers == Readers::kNeighbours);
      if (error == 0) continue;
      error_.store(error, std::memory_order_relaxed);  // a number for failure()
      return false;
    }
    return true;
  }

 private:
  struct Gpu {
    Gpu(const provider::MemorySpan& memory, const Gpu* following)
        : flush(memory.device, memory.read_by_neighbours),
          device(memory.device),
          for_neighbours(memory.read_by_neighbours),
          next(following) {}
    const platform::GpuWriteFlush flush;
    const int device;
    const bool for_neighbours;
    const Gpu* const next;
  };

  std::mutex mutex_;  // between callers of include()
  std::vector<std::unique_ptr<const Gpu>> gpus_;
  // List of GPUs that need a flush, newest first. Stored by include() (release).
  std::atomic<const Gpu*> first_{nullptr};
  std::atomic<int> error_{0};
};

}  // namespace moe_p2p::engine
