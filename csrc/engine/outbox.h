// The sending end of small messages, to the inbox of one peer and for one purpose: claims a ring
// there with the first message (message_ring.h), and knows how much room it has. Any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/message_ring.h"
#include "engine/transfer_engine.h"

namespace moe_p2p::engine {

// What a Request has to do to send a message: a Scatter of one slice.
struct MessageWrite {
  const MemoryHandle* source;
  Slice slice;
  uint32_t imm;
};

class Outbox {
 public:
  // Submits a Request for it and returns it. Where it throws, nothing was sent.
  using Submit = std::function<std::shared_ptr<Request>(const MessageWrite&)>;

  // Does nothing yet. label: of this engine. The peer stays connected until end().
  Outbox(TransferEngine& engine, const Peer* peer, Purpose purpose, std::string label);

  // The message is visible at the peer when the Request is done; the data is copied at once. Waits
  // for the peer's NIC where it claims a ring or finds its own full. Throws
  //   kInvalidArgument    the peer has no inbox, or takes no message of this size
  //   kResourceExhausted  its inbox is full: of messages from here, or of senders
  //   kTimeout            the peer's NIC did not answer
  //   kClosed             end() was called, or the receiver has forgotten this sender
  // and what an earlier message failed with: one that is lost leaves a hole, so none follows it.
  void send(std::span<const std::byte> data, platform::Deadline deadline, const Submit& submit);
  // Gives the ring back where all was sent by the deadline, but for NICs that must not write to a
  // peer that may have left; later messages fail with kClosed.
  void end(platform::Deadline deadline) noexcept;
  // After end(), when the peer is gone too: it may be destroyed, or with the engine.
  bool settled() const noexcept { return !own_.active(); }

 private:
  const InboxPlace& place() const noexcept;
  void check_alive() const;
  void open();
  void claim(platform::Deadline deadline);
  std::optional<uint32_t> choose();
  bool write_claim(uint32_t ring, platform::Deadline deadline);
  void use(uint32_t ring);
  const RemoteRegion* resolve(uint64_t bytes, std::span<const RemoteKey> rails);
  void make_room(platform::Deadline deadline);
  void begin_reading(uint32_t first, uint32_t num);
  void end_reading(platform::Deadline deadline);
  void note_taken();
  void note_ended();
  Slice stage(std::span<const std::byte> data);
  void submit_own(Operation operation);
  void wait(Request& request, platform::Deadline deadline);
  bool all_arrived(platform::Deadline deadline);
  [[noreturn]] void fail(base::Code code, const std::string& text);
  const RingEntry& entry(uint32_t ring) const noexcept;

  TransferEngine& engine_;
  const Peer* const peer_;
  const std::string label_;
  const uint64_t name_;
  std::atomic<bool> ending_{false};

  std::mutex mutex_;  // guards what follows; held by senders while they wait
  std::optional<base::Error> failure_;
  std::vector<std::byte> memory_;  // the directory as it was read, the claim, the ring's copy
  const MemoryHandle* handle_ = nullptr;
  const RemoteRegion* directory_ = nullptr;
  const RemoteRegion* target_ = nullptr;  // the ring; null: none is claimed
  uint32_t ring_ = 0;
  uint64_t generation_ = 0;
  uint64_t sent_ = 0, taken_ = 0, ended_ = 0;       // messages; taken_: as far as it is known
  std::vector<std::shared_ptr<Request>> requests_;  // by slot
  bool reading_ = false;                            // own_ reads the entry
  Request own_;                                     // reads, claims, the bye
  Slice own_slice_;
};

}  // namespace moe_p2p::engine
