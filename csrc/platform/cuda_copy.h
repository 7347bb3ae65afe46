// Copies within GPU memory by the copy engines, for a thread that polls: a stream of its own, and
// an event after each copy. Also between a GPU and host memory, which need not be pinned. The
// loopback NIC uses it to write to memory of its peers that is mapped here. Made and drained on the
// control path; copy() and poll() belong to one thread, which never waits.
//
// While a copy kernel is on the device, it carries the copies instead: for a short copy, the
// driver's calls (two to start it, more until it is done) take most of the time. The engines do
// what the kernel leaves undone.
//
// Copies into memory that a peer lends, and may take back at any time, are known to that peer
// (CopyWords): short ones are carried by a kernel that is launched for many of them (row_copies.h),
// others by the engines, with a word that the stream writes behind each.
//
// The polling thread's current context becomes the device's, and its stream capture mode relaxed:
// in any other mode an event query may break the capture of a CUDA graph elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "platform/copy_kernel.h"
#include "platform/cuda_context.h"
#include "platform/cuda_driver.h"
#include "platform/row_copies.h"
#include "platform/wait.h"

namespace moe_p2p::platform {

// A copy of memory that is lent; 0 bytes: another one. by_engine: also where it is short enough for
// a launch of rows.
struct LentBytes {
  uint64_t bytes = 0;
  bool by_engine = false;
};

class CopyQueue {
 public:
  // Copies under way at a time. Too small: short writes wait for an event although the copy engine
  // would take them. Too large: a failed stream takes longer to look through.
  static constexpr uint32_t kCapacity = 1024;
  static_assert(kCapacity <= abi::kCopyRequests);
  // Of these, for copies into memory that is not lent. Too small: they wait behind rows that wait
  // for multiprocessors, which may be held by a kernel that waits for such a copy.
  static constexpr uint32_t kKept = 256;

  // copy_kernel: the kernel's function on the device; 0: copy by the engines alone. Throws
  // Error{kUnavailable} without a driver, Error{kTransport} with its text when it refuses.
  explicit CopyQueue(int device, uint64_t copy_kernel = 0, const LentCopies& lent = {});
  ~CopyQueue();  // drains; logs copies that still run after that
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  int device() const noexcept { return device_; }
  // Whether copy_lent() may be called: the device has to see the words.
  bool copies_lent() const noexcept { return words_ != nullptr; }

  // --- any thread --- Returns true once every copy begun before the call has ended, false when the
  // deadline passed first. True also for a failed device, which copies no more.
  bool drain(Deadline deadline) noexcept;

  // --- polling thread ---
  struct Started {
    base::Status status;  // kTransport, detail = CUresult: nothing was started
    uint64_t ticket = 0;
  };
  // Whether a copy has to wait. Never true once the queue has failed: copy() then reports the
  // failure.
  bool full(const LentBytes& lent = {}) const noexcept {
    const uint64_t most = lent.bytes > 0 ? kCapacity - kKept : kCapacity;
    const bool rows = lent.bytes > 0 && by_rows(lent);
    return status_.ok() && (num_started_ - num_done_ >= most || (rows && rows_->full()));
  }
  // Must not be full. With on_device = false one side is host memory, and the kernel is not used.
  Started copy(std::byte* to, const std::byte* from, uint64_t bytes,
               bool on_device = true) noexcept;
  // Of memory that is lent: announce() before its owner's word is read, then copy_lent(), or
  // withdraw() when it is not lent any more. launch() before the polling thread does anything else.
  void announce(const LentBytes& lent) noexcept;
  void withdraw(const LentBytes& lent) noexcept;
  Started copy_lent(std::byte* to, const std::byte* from, const LentBytes& lent) noexcept;
  void launch() noexcept;
  // Asks the driver which copies are done. Cheap when there are none.
  void poll() noexcept;
  // In any order: what waits for multiprocessors keeps nothing else back.
  bool done(uint64_t ticket) const noexcept {
    return ticket <= num_done_ || copies_[(ticket - 1) % kCapacity].is_done;
  }
  // Once this is not ok, copies that are not done never will be.
  base::Status status() const noexcept { return status_; }

 private:
  struct Copy {
    std::byte* to = nullptr;
    const std::byte* from = nullptr;
    uint64_t bytes = 0;
    bool on_device = true;
    bool is_done = false;
    enum class By : uint8_t { kEngine, kLentByEngine, kKernel, kRows };
    By by = By::kEngine;
    uint64_t number = 0;  // but of kEngine: its number there
    // Recorded after it when the engines carry it; of kLentByEngine when it takes long.
    void* event = nullptr;
  };

  void open(uint64_t copy_kernel, const LentCopies& lent);
  void open_lent(LentCopies lent);
  std::string share_words(LentCopies& lent);
  bool by_rows(const LentBytes& lent) const noexcept {
    return rows_ && !lent.by_engine && lent.bytes <= RowCopies::kMostBytes;
  }
  void close() noexcept;
  void enter() const noexcept;
  bool ask_kernel(Copy& copy) noexcept;
  base::Status ask_engines(Copy& copy) noexcept;
  void take_over() noexcept;
  bool done(const Copy& copy) noexcept;
  void look_for_failure(const Copy& copy) noexcept;
  uint64_t num_settled() const noexcept;

  const DriverTable& driver_;
  const int device_;
  const PrimaryContext context_;
  void* stream_ = nullptr;
  std::unique_ptr<CopyKernel> kernel_;  // null: the engines alone
  abi::CopyWords* words_ = nullptr;     // registered with the driver
  uint64_t engine_done_ = 0;            // address of the word on the device
  std::unique_ptr<RowCopies> rows_;
  std::vector<Copy> copies_;  // [kCapacity], number i: copies_[i % kCapacity]
  std::mutex drain_mutex_;    // guards drain_event_
  void* drain_event_ = nullptr;
  // The kernel's copies that are done or that the engines took over: this number or the kernel's
  // num_done(), whichever is larger. Stored after the engines' calls, release; acquire by drain().
  std::atomic<uint64_t> num_taken_over_{0};

  // Polling thread only.
  bool kernel_started_ = false;  // and take_over() has not run since
  uint32_t num_looks_ = 0;       // at copies by the kernel
  uint64_t num_started_ = 0;
  uint64_t num_done_ = 0;  // these, and all before
  uint32_t num_rows_under_way_ = 0;
  uint64_t num_lent_by_engine_ = 0;
  base::Status status_;
};

}  // namespace moe_p2p::platform
