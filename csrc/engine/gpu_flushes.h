// Makes what NICs wrote into GPU memory visible to all who read it there. A NIC's completion says that
// the payload is on its way into the GPU, and how far the GPU orders such writes differs
// (platform/gpu_writes.h); so the Poller flushes after it took immediates from a NIC and before it
// counts the first. Once for all providers whose writes a device carries out (Domain::needs_gpu_flush).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "platform/gpu_writes.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

class GpuFlushes {
 public:
  // Any thread. From now on flush() includes the GPU of `memory`, where its order does not suffice for
  // those who read it. Throws Error{kUnavailable} when the GPU orders too little and cannot flush.
  void include(const provider::MemorySpan& memory);
  // A flush has failed: immediates that came with it are not counted, nor are later ones.
  bool failed() const noexcept { return error_.load(std::memory_order_relaxed) != 0; }
  // "the GPU does not flush ...", empty while every flush has succeeded.
  std::string failure() const;

  // Polling thread.
  bool needed() const noexcept { return first_.load(std::memory_order_relaxed) != nullptr; }
  // False when a GPU could not flush: nothing that a NIC wrote may be shown then.
  bool flush() noexcept {
    if (failed()) return false;
    // acquire: pairs with include().
    for (const Gpu* gpu = first_.load(std::memory_order_acquire); gpu != nullptr; gpu = gpu->next) {
      const int error = gpu->flush.flush();
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
  // Those that need a flush, the last included first. Stored by include() (release).
  std::atomic<const Gpu*> first_{nullptr};
  std::atomic<int> error_{0};
};

}  // namespace moe_p2p::engine
