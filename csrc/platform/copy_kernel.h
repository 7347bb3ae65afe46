// Copies by a kernel (kernels/copy.cu) that stays on its device while it has work, so that no copy
// needs the driver. It exits after a while without work, because a wait for the whole device waits
// for it too. It carries only copies posted while it runs: a device that is full may not start it.
// CopyQueue does the rest.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"
#include "kernels/abi/copy.h"
#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

class CopyKernel {
 public:
  // `function`: CUfunction of moe_p2p_copy. The device's context must be current, also for busy(),
  // status(), start() and the destructor. Throws Error{kTransport} with the driver's text.
  CopyKernel(int device, uint64_t function);
  ~CopyKernel();  // must not be busy()
  CopyKernel(const CopyKernel&) = delete;
  CopyKernel& operator=(const CopyKernel&) = delete;

  // --- any thread --- How many copies are done; copies finish in order.
  uint64_t num_done() const noexcept { return load(ring_->done); }
  uint64_t num_posted() const noexcept { return num_posted_.load(std::memory_order_acquire); }
  // True while the kernel is on the device or on its way there.
  bool busy() const noexcept { return driver_.event_query(event_) == kDriverNotReady; }
  // A failure once the device has failed.
  base::Status status() const noexcept;

  // --- polling thread --- True when the kernel has exited since start(), and before the first
  // start().
  bool left() const noexcept { return load(ring_->left) == num_launches_; }
  // True when the kernel will carry what is posted now, unless it exits at this very moment.
  bool takes() const noexcept { return !left() && load(ring_->entered) == num_launches_; }
  // Call it only after left(). Copies that the kernel did not do are not done by this launch
  // either.
  base::Status start() noexcept;
  // Returns the number of the copy, which is done once num_done() is larger. At most
  // abi::kCopyRequests are under way.
  uint64_t post(std::byte* to, const std::byte* from, uint64_t bytes) noexcept;

 private:
  // acquire: pairs with the kernel's stores, which follow its copies.
  static uint64_t load(const uint64_t& word) noexcept {
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
  }
  void free() noexcept;

  const DriverTable& driver_;
  const uint64_t function_;
  abi::CopyRing* ring_ = nullptr;  // pinned
  void* stream_ = nullptr;
  void* event_ = nullptr;                // recorded after the last launch
  uint64_t num_launches_ = 0;            // polling thread only
  std::atomic<uint64_t> num_posted_{0};  // store by post(), release; acquire by num_posted()
};

}  // namespace moe_p2p::platform
