// Copies within GPU memory by the copy engines, for a thread that polls: a stream of its own, and
// an event after each copy. Also between a GPU and host memory, which need not be pinned. The
// loopback NIC uses it to write to memory of its peers that is mapped here. Made and drained on the
// control path; copy() and poll() belong to one thread, which never waits.
//
// While a copy kernel is on the device, it carries the copies instead: for a short copy, the
// driver's calls (two to start it, more until it is done) take most of the time. The engines do
// what the kernel leaves undone.
//
// The polling thread's current context becomes the device's, and its stream capture mode relaxed:
// in any other mode an event query may break the capture of a CUDA graph elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "platform/copy_kernel.h"
#include "platform/cuda_context.h"
#include "platform/cuda_driver.h"
#include "platform/wait.h"

namespace moe_p2p::platform {

class CopyQueue {
 public:
  // Copies under way at a time. Too small: short writes wait for an event although the copy engine
  // would take them. Too large: a failed stream takes longer to look through.
  static constexpr uint32_t kCapacity = 256;
  static_assert(kCapacity <= abi::kCopyRequests);

  // copy_kernel: the kernel's function on the device; 0: copy by the engines alone. Throws
  // Error{kUnavailable} without a driver, Error{kTransport} with its text when it refuses.
  explicit CopyQueue(int device, uint64_t copy_kernel = 0);
  ~CopyQueue();  // drains; logs copies that still run after that
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  int device() const noexcept { return device_; }

  // --- any thread --- Returns true once every copy begun before the call has ended, false when the
  // deadline passed first. True also for a failed device, which copies no more.
  bool drain(Deadline deadline) noexcept;

  // --- polling thread ---
  struct Started {
    base::Status status;  // kTransport, detail = CUresult: nothing was started
    uint64_t ticket = 0;
  };
  // Never true once the queue has failed: copy() then reports the failure.
  bool full() const noexcept { return status_.ok() && num_started_ - num_done_ == kCapacity; }
  // Must not be full. With on_device = false one side is host memory, and the kernel is not used.
  Started copy(std::byte* to, const std::byte* from, uint64_t bytes,
               bool on_device = true) noexcept;
  // Asks the driver which copies are done. Cheap when there are none.
  void poll() noexcept;
  bool done(uint64_t ticket) const noexcept { return ticket <= num_done_; }
  // Once this is not ok, copies that are not done never will be.
  base::Status status() const noexcept { return status_; }

 private:
  struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    uint64_t bytes = 0;
    bool on_device = true;
    bool by_kernel = false;
    uint64_t number = 0;    // by_kernel: its number there
    void* event = nullptr;  // recorded after it when the engines carry it
  };

  void open(uint64_t copy_kernel);
  void close() noexcept;
  void enter() const noexcept;
  bool ask_kernel(Copy& copy) noexcept;
  base::Status ask_engines(Copy& copy) noexcept;
  void take_over() noexcept;
  bool done(const Copy& copy) noexcept;
  uint64_t num_settled() const noexcept;

  const DriverTable& driver_;
  const int device_;
  const PrimaryContext context_;
  void* stream_ = nullptr;
  std::unique_ptr<CopyKernel> kernel_;  // null: the engines alone
  std::vector<Copy> copies_;            // [kCapacity], number i: copies_[i % kCapacity]
  std::mutex drain_mutex_;              // guards drain_event_
  void* drain_event_ = nullptr;
  // The kernel's copies that are done or that the engines took over: this number or the kernel's
  // num_done(), whichever is larger. Stored after the engines' calls, release; acquire by drain().
  std::atomic<uint64_t> num_taken_over_{0};

  // Polling thread only.
  bool kernel_started_ = false;  // and take_over() has not run since
  uint32_t num_looks_ = 0;       // at copies by the kernel
  uint64_t num_started_ = 0;
  uint64_t num_done_ = 0;
  base::Status status_;
};

}  // namespace moe_p2p::platform
