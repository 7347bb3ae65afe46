// A mapped segment: made by the NIC that receives in it, opened by the NICs that send to it. One
// mapping per process and segment, shared with a creator in the same process, so that 64 ranks in
// one process do not need 64 * 64 descriptors and thread sanitizers see both ends. Control path,
// except the noexcept members. In a forked child close() and release() do nothing.
#pragma once

#include <memory>
#include <string>

#include "platform/shm.h"
#include "platform/wait.h"
#include "provider/loopback/channel.h"
#include "provider/loopback/config.h"

namespace moe_p2p::provider::loopback {

class Segment {
 public:
  static std::shared_ptr<Segment> create(const Config& config);
  // Bytes of /dev/shm that a segment takes with `num_claimed` channels claimed: its head, and a
  // block for each. Pages of other channels are not reserved.
  static uint64_t reserved_bytes(const Config& config, uint32_t num_claimed) noexcept;
  // Throws Error{kPeerDead} when it does not exist any more.
  static std::shared_ptr<Segment> open(const std::string& name);

  Segment(platform::SharedMemory shm, bool own_process);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const std::string& name() const noexcept { return shm_.name(); }
  const SegmentLayout& layout() const noexcept { return layout_; }
  SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(shm_.data()); }
  Channel channel(uint32_t index) const noexcept;

  struct Claimed {
    uint32_t index;
    uint64_t word;  // its channel_word() while claimed
  };
  // Takes the free channel of lowest number and reserves its pages. Throws
  // Error{kResourceExhausted}.
  Claimed claim(const std::string& sender_segment, const std::string& sender_waker, uint64_t tag);
  // Hands a claimed channel to the receiver, which frees it at its next poll. Does nothing when the
  // receiver has already taken it back.
  void release(const Claimed& claimed) noexcept;

  // Creator: waits until copies by peers into memory that it lends, and lends no more, have ended.
  // False at the deadline. What a process that has ended left to its GPU ends with it, and a little
  // later than its lock.
  bool await_lent_copies(platform::Deadline deadline) const;

  // Creator: marks that the channels are not read any more.
  void close() noexcept;
  bool closed() const noexcept {
    return header().closed.load(std::memory_order_acquire) != 0;  // pairs with close()
  }
  // False once the receiver's process has ended. A system call, unless it is this process.
  bool process_alive() const noexcept { return own_process_ || shm_.owner_alive(); }

 private:
  platform::SharedMemory shm_;
  SegmentLayout layout_{};
  bool own_process_;
};

}  // namespace moe_p2p::provider::loopback
