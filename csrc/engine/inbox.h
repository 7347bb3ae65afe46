// The receiving end of small messages: registered memory that any engine may claim a ring of and
// write to (message_ring.h). Messages of one sender are taken in the order in which they were sent.
//
// The polling thread calls on_imm(), for arrivals only: an engine without an inbox does nothing for
// one. Everything else is for any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/event_fd.h"
#include "engine/message_ring.h"
#include "engine/transfer_engine.h"

namespace moe_p2p::engine {

struct Message {
  uint64_t sender = 0;  // its name
  std::string label;    // of its engine
  base::Bytes data;
};

class Inbox final : public ImmSink {
 public:
  // `size`: num_rings, num_slots and max_bytes. The engine's addresses name the inbox from then on.
  // Throws Error{kInvalidArgument} for a size that cannot be, {kUnavailable} where NICs carry no
  // bytes. Must live as long as the engine.
  Inbox(TransferEngine& engine, const InboxPlace& size, std::string label);

  // Returns the next message; nothing when none has arrived.
  std::optional<Message> take(Purpose purpose);
  // Readable while there may be a message, and for good after wake(). Nonblocking.
  int fd(Purpose purpose) const noexcept { return bell(purpose).event.fd(); }
  void wake() noexcept;
  uint32_t num_senders() const noexcept;
  const InboxPlace& place() const noexcept { return place_; }
  // For a sender that ended without a bye: nothing of it arrives any more, what it has sent and
  // nobody has taken is lost, and its ring is free. False when it has none. Throws Error{kTimeout}
  // as unregister_memory() does; to be called again.
  bool forget(uint64_t sender);

  void on_imm(const ImmKey& key) noexcept override;

 private:
  struct Ring {
    std::unique_ptr<std::byte[]> memory;
    const MemoryHandle* handle = nullptr;
    // Set by the polling thread when the ring is claimed, reset under mutex_; release and acquire:
    // whoever sees it free sees its next generation.
    std::atomic<uint64_t> owner{0};
    std::atomic<uint64_t> generation{0};
    static constexpr uint32_t kNoBye = ~0u;
    std::atomic<uint32_t> bye{kNoBye};
    // By slot: release by the polling thread, acquire in find(): the message is visible.
    std::unique_ptr<std::atomic<bool>[]> arrived;
    uint64_t taken = 0;  // under mutex_
  };
  struct Bell {
    EventFd event{"an inbox"};
    std::atomic<bool> rung{false};  // saves the system call where nobody has looked since

    void ring() noexcept;
    void clear() noexcept;
  };

  const Bell& bell(Purpose purpose) const noexcept { return bells_[static_cast<size_t>(purpose)]; }
  Bell& bell(Purpose purpose) noexcept { return bells_[static_cast<size_t>(purpose)]; }
  RingEntry& entry(size_t ring) const noexcept;
  void add_ring(Ring& ring, size_t index);
  void publish_keys(const Ring& ring, size_t index);
  void claim(Ring& ring, size_t index) noexcept;
  std::optional<Message> find(Purpose purpose);
  Message take_from(Ring& ring, size_t index, uint64_t owner);
  void free_if_left(Ring& ring, size_t index) noexcept;
  void release(Ring& ring, size_t index) noexcept;

  TransferEngine& engine_;
  const std::string label_;
  InboxPlace place_;
  std::unique_ptr<std::byte[]> directory_;
  std::vector<Ring> rings_;
  std::array<Bell, kNumPurposes> bells_;
  std::atomic<bool> awake_{false};
  std::mutex mutex_;   // between takers; never held by the polling thread
  size_t cursor_ = 0;  // the ring that is looked at first: no sender holds up the others
};

}  // namespace moe_p2p::engine
