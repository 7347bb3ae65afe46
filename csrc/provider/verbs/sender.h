// The sending half of a NIC, on the polling thread: accepted writes lie in slots, each in the queue
// of its lane, and are posted in chains with one doorbell, of which only the last is signalled. A
// good completion completes all writes before it. peer.h describes broken lanes.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "provider/verbs/failure.h"
#include "provider/verbs/nic.h"
#include "provider/verbs/output.h"
#include "provider/verbs/peer.h"

namespace moe_p2p::provider::verbs {

// Wakes the control thread to check the peers: an eventfd, whose write never blocks here.
class Kick {
 public:
  Kick();
  ~Kick();
  Kick(const Kick&) = delete;
  Kick& operator=(const Kick&) = delete;
  void operator()() const noexcept;
  void clear() const noexcept;
  int fd() const noexcept { return fd_; }

 private:
  const int fd_;
};

// Flag in local_key above the NIC's own 32 bits: GPU memory, which inlining would read by CPU.
inline constexpr uint64_t kCudaKey = uint64_t{1} << 32;

class Sender {
 public:
  Sender(const Nic& nic, PeerTable& peers, const Kick& kick, FirstFailure& failure);

  size_t post(std::span<const WorkRequest> requests) noexcept;
  // Handles a completion of one of our writes.
  void complete(const Wc& wc, Output& output) noexcept;
  // Call it after the control side has changed a peer.
  void look_at_peers(Output& output) noexcept;
  // Posts waiting writes: after a repair, or when a queue was full.
  void post_waiting(Output& output) noexcept;
  bool has_waiting() const noexcept { return waiting_ != nullptr; }
  bool must_look() const noexcept { return must_look_; }

  Backlog& backlog() noexcept { return backlog_; }
  void shown(size_t num_writes) noexcept { num_open_ -= static_cast<uint32_t>(num_writes); }
  uint32_t num_open() const noexcept { return num_open_; }

 private:
  void accept(Lane& lane, const WorkRequest& request) noexcept;
  void append(Lane& lane, Slot& slot) noexcept;
  void queue_for_posting(Lane& lane) noexcept;
  void post_lane(Lane& lane, Output& output) noexcept;
  int post_chain(Lane& lane) noexcept;
  bool look_at(Peer& peer, Output& output) noexcept;
  void finish_head(Lane& lane, base::Status status, Output& output) noexcept;
  void fail_all(Lane& lane, base::Status status, Output& output) noexcept;
  void finish_before(Lane& lane, const Slot* slot, Output& output) noexcept;
  void begin_break(Lane& lane, const Wc& wc, Output& output) noexcept;
  void end_lane(Lane& lane, base::Status failure, Output& output) noexcept;
  void marker_came(const Wc& wc, Output& output) noexcept;
  void give_up(Lane& lane, Output& output) noexcept;
  void ended(Lane& lane, Output& output) noexcept;
  void keep_failure(const Slot& slot, base::Status status, uint32_t vendor_error) noexcept;

  const Nic& nic_;
  const ContextOps& ops_;
  PeerTable& peers_;
  const Kick& kick_;
  FirstFailure& failure_;
  const uint32_t inline_bytes_;

  std::vector<Slot> slots_;  // [max_in_flight]
  Slot* free_ = nullptr;
  uint32_t num_open_ = 0;  // accepted, completion not reported
  Backlog backlog_;
  Lane* waiting_ = nullptr;
  bool must_look_ = false;
};

}  // namespace moe_p2p::provider::verbs
