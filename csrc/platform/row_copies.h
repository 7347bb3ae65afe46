// Batches of copies within GPU memory and to a peer's that is mapped here, each carried by one
// launch of kernels/rows.cu. add() notes a copy, launch() starts what was noted, before the polling
// thread leaves the provider: nothing waits for it in between. Batches end in order. The numbers of
// batches begun and done are in CopyWords, which owners of the targets see too, also while this
// process is stopped.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"
#include "kernels/abi/rows.h"
#include "platform/cuda_driver.h"
#include "platform/wait.h"

namespace moe_p2p::platform {

// What CopyQueue needs for copies into memory that a peer may take back.
struct LentCopies {
  uint64_t function = 0;            // CUfunction of moe_p2p_rows; 0: the engines carry all
  abi::CopyWords* words = nullptr;  // null: there are no such copies
  uint64_t on_device = 0;           // their address there, once they are registered

  // For the owner of a target: whether copies that had begun by `since` have ended. `since` was
  // read after the target was closed to new ones.
  struct Begun {
    uint64_t rows, engine;
  };
  static Begun begun(const abi::CopyWords& words) noexcept;
  static bool ended(const abi::CopyWords& words, const Begun& since) noexcept;
};

class RowCopies {
 public:
  // Copies of at most so many bytes. Too small: the driver is asked for each copy, which takes the
  // polling thread about seven microseconds. Too large: multiprocessors do what the copy engines
  // do as well.
  static constexpr uint64_t kMostBytes = 4096 << 10;

  // The device's context must be current, also for launch(), status(), end() and the destructor.
  // Throws Error{kTransport} with the driver's text.
  RowCopies(int device, const LentCopies& lent);
  ~RowCopies();  // after end()
  RowCopies(const RowCopies&) = delete;
  RowCopies& operator=(const RowCopies&) = delete;

  // After the last launch: true once all have ended, false at the deadline.
  bool end(Deadline deadline) noexcept;
  // A failure once the device has failed. Any thread.
  base::Status status() const noexcept;
  uint64_t num_done() const noexcept;       // batches
  uint64_t num_launched() const noexcept {  // any thread
    return num_launched_.load(std::memory_order_acquire);
  }

  // --- polling thread ---
  bool full() const noexcept;
  // Before the target's owner is asked whether it still lends the memory: the batch to come counts
  // as begun. Either add() follows, or withdraw() when it does not lend it.
  void announce() noexcept;
  void withdraw() noexcept;
  // Returns the number of the batch, which is done once num_done() has reached it.
  uint64_t add(std::byte* to, const std::byte* from, uint64_t bytes) noexcept;
  bool has_unlaunched() const noexcept { return num_rows_ != num_launched_rows_; }
  base::Status launch() noexcept;

 private:
  // Batches under way at a time. Too small: short posts wait for the device.
  static constexpr uint64_t kBatches = 64;

  static uint64_t load(const uint64_t& word) noexcept {
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
  }
  void free() noexcept;

  const DriverTable& driver_;
  const uint64_t function_;
  abi::CopyWords& words_;
  const uint64_t words_on_device_;
  abi::RowCopy* rows_ = nullptr;  // [kRowCopies], pinned
  void* stream_ = nullptr;
  void* event_ = nullptr;  // recorded when somebody asks: each launch would cost more by a third

  // Polling thread only; num_launched_ is stored by launch(), release.
  std::atomic<uint64_t> num_launched_{0};
  uint64_t num_rows_ = 0, num_launched_rows_ = 0, num_bytes_ = 0;  // bytes: of the batch to come
  uint64_t first_row_[kBatches] = {};  // batch b, from 1: first_row_[b % kBatches]
};

}  // namespace moe_p2p::platform
