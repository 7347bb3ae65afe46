// Copies within GPU memory by the copy engines, for a thread that polls: a stream of its own, and an
// event behind each copy. The loopback NIC writes with it to memory of its peers that is mapped here.
// Made and drained on the control path; copy() and poll() belong to one thread, which never waits.
//
// The polling thread's current context becomes that of the device, and its stream capture mode
// relaxed: in any other mode an event query may break the capture of a CUDA graph elsewhere.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "platform/cuda_context.h"
#include "platform/cuda_driver.h"
#include "platform/wait.h"

namespace moe_p2p::platform {

class CopyQueue {
 public:
  // Copies under way at a time. Too small: short writes wait for an event although the copy engine
  // would take them. Too large: a failed stream takes longer to look through.
  static constexpr uint32_t kCapacity = 256;

  // Throws Error{kUnavailable} without a driver, Error{kTransport} with its text when it refuses.
  explicit CopyQueue(int device);
  ~CopyQueue();  // drains; what a device still copies after that is logged
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  int device() const noexcept { return device_; }

  // --- any thread ---
  // Returns true once every copy begun before the call has ended, false when the deadline was first.
  // A device that has failed copies no more.
  bool drain(Deadline deadline) noexcept;

  // --- polling thread ---
  struct Started {
    base::Status status;  // kTransport, detail = CUresult: nothing was started
    uint64_t ticket = 0;
  };
  // Never once the queue has failed: copy() then says so.
  bool full() const noexcept { return status_.ok() && num_started_ - num_done_ == kCapacity; }
  // Must not be full.
  Started copy(std::byte* to, const std::byte* from, uint64_t bytes) noexcept;
  // Asks the driver which copies are done. Cheap when there are none.
  void poll() noexcept;
  bool done(uint64_t ticket) const noexcept { return ticket <= num_done_; }
  // Once this is not ok, copies that are not done never will be.
  base::Status status() const noexcept { return status_; }

 private:
  void open();
  void close() noexcept;
  void enter() const noexcept;

  const DriverTable& driver_;
  const int device_;
  const PrimaryContext context_;
  void* stream_ = nullptr;
  std::vector<void*> events_;  // [kCapacity], behind copy number i: events_[i % kCapacity]
  std::mutex drain_mutex_;     // guards drain_event_
  void* drain_event_ = nullptr;

  // Polling thread only.
  uint64_t num_started_ = 0;
  uint64_t num_done_ = 0;
  base::Status status_;
};

}  // namespace moe_p2p::platform
