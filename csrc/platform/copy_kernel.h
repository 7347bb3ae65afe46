// Copies by a kernel (kernels/copy.cu) that stays on its device as long as it has something to do,
// so that none of them needs the driver. It leaves when nothing comes for a while, because whoever
// waits for the device waits for it too, and only what it was given while it was there does it
// carry: it may find no room on a device that others fill. CopyQueue does the rest.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"
#include "kernels/abi/copy.h"
#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

class CopyKernel {
 public:
  // `function`: CUfunction of moe_p2p_copy. With the device's context current, as busy(), status(),
  // start() and the destructor. Throws Error{kTransport} with the driver's text.
  CopyKernel(int device, uint64_t function);
  ~CopyKernel();  // when it is not busy()
  CopyKernel(const CopyKernel&) = delete;
  CopyKernel& operator=(const CopyKernel&) = delete;

  // --- any thread ---
  // How many copies are done, in their order.
  uint64_t num_done() const noexcept { return load(ring_->done); }
  uint64_t num_posted() const noexcept { return num_posted_.load(std::memory_order_acquire); }
  // Whether it is on the device, or on its way there.
  bool busy() const noexcept { return driver_.event_query(event_) == kDriverNotReady; }
  // Not ok once the device has failed.
  base::Status status() const noexcept;

  // --- polling thread ---
  // Whether it has left since start(); true before the first.
  bool left() const noexcept { return load(ring_->left) == num_launches_; }
  // Whether what is posted now is carried, unless it leaves at this very moment.
  bool takes() const noexcept { return !left() && load(ring_->entered) == num_launches_; }
  // After it has left; copies that it was given and has not done are then nobody's.
  base::Status start() noexcept;
  // Returns the number of the copy, which is done once num_done() is larger. At most
  // abi::kCopyRequests are under way.
  uint64_t post(std::byte* to, const std::byte* from, uint64_t bytes) noexcept;

 private:
  // acquire: pairs with the kernel's stores, behind which lie its copies.
  static uint64_t load(const uint64_t& word) noexcept {
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
  }
  void free() noexcept;

  const DriverTable& driver_;
  const uint64_t function_;
  abi::CopyRing* ring_ = nullptr;  // pinned
  void* stream_ = nullptr;
  void* event_ = nullptr;                // behind the last launch
  uint64_t num_launches_ = 0;            // polling thread only
  std::atomic<uint64_t> num_posted_{0};  // store by post(), release; acquire by num_posted()
};

}  // namespace moe_p2p::platform
