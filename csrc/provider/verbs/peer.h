// A connected NIC and the queue pairs (lanes) that lead to it: the state of the control path and of
// the polling thread, and the few words between them.
//
// A lane breaks when one of its writes is refused, the driver refuses to post, or the peer ends.
// The NIC then completes the lane's writes at some later time and not always one by one, so the
// polling thread posts one more write, the marker, whose completion follows all others
// (Sender::end_lane). When the marker completes and only a write was refused, the lane is repaired:
// writes that were not carried out are kept, the control thread makes a new queue pair, and they
// are posted there. Otherwise all writes of the lane fail. When the marker does not complete in
// time, the control thread gives it up, and the lane fails.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "provider/provider.h"
#include "provider/verbs/socket.h"
#include "provider/verbs/wire.h"

namespace moe_p2p::provider::verbs {

struct Peer;
struct Lane;

// An accepted write until its completion is reported. The NIC gets `wr`: its next pointers are the
// lane's queue, so that posting a chain copies nothing.
struct Slot {
  SendWr wr{};
  Sge sge{};
  uint64_t wr_id = 0;  // the caller's
  uint64_t flag = 0;   // what a flag's write carries
  // The write before a flag: the flag is posted behind it on the same queue pair, completes for
  // both, and is not carried out if this is refused.
  bool has_flag = false;
  Lane* lane = nullptr;
  Slot* next() const noexcept { return reinterpret_cast<Slot*>(wr.next); }
};
static_assert(offsetof(Slot, wr) == 0);

struct Lane {
  enum class Repair : int { kNone, kEnding, kGivenUp, kWanted, kRepairing, kRepaired };

  Peer* peer = nullptr;
  uint32_t index = 0;

  // Between the threads. The polling thread stores kEnding, kNone and kWanted (release; acquire in
  // Control::look_at_lane), the control thread the others (release; acquire in Sender::look_at).
  // Both may leave kEnding, so they exchange it: the marker completed (kNone, kWanted) or did not
  // (kGivenUp). During kEnding the polling thread does not use `qp`.
  std::atomic<Repair> repair{Repair::kNone};
  // Stored by the control side before kRepaired, or before the peer is in the PeerTable.
  Qp* qp = nullptr;

  // Control side.
  Owned<Qp> owner{nullptr, nullptr};
  uint32_t psn = 0;
  platform::Deadline end_by = platform::Deadline::max();  // deadline of the marker
  uint64_t end_ticket = 0;  // of Changes: once done, the marker must have been polled

  // Polling thread. The queue: `head` is the oldest write, `unposted` the first one not posted.
  Slot* head = nullptr;
  Slot* unposted = nullptr;
  Slot* tail = nullptr;
  uint32_t num_posted = 0;
  uint32_t num_unposted = 0;
  bool waiting = false;       // in the Sender's list of lanes with something to post
  bool broken = false;        // nothing more is posted to this queue pair
  bool ending = false;        // the marker is under way
  bool failed = false;        // a completion failed: later writes were not carried out
  bool dead = false;          // new writes fail with `failure`
  bool refused_flag = false;  // `head` is the flag of a write that was refused
  base::Status failure;
  Lane* next_waiting = nullptr;
};

struct Peer {
  PeerId id = 0;
  NicAddress address;
  int priority = 0;
  uint64_t tag = 0;
  std::vector<std::unique_ptr<Lane>> lanes;

  // Why nothing can be sent any more, the first reason stays. Stored by the control side (release;
  // acquire in Sender::look_at), which breaks the queue pairs afterwards.
  std::atomic<base::Code> end{base::Code::kOk};
  std::atomic<bool> leaving{false};   // disconnect() was called; ordered as `end`
  std::atomic<bool> released{false};  // dropped by the polling thread (release; Control::look)

  // Control side.
  Socket link;
  std::optional<Proof> proof;  // for messages over `link`
  platform::Deadline answer_by = platform::Deadline::max();

  uint32_t next_lane = 0;  // polling thread
};

// Peers by id: entry id % kCapacity. Filled by the control side (release), emptied by the polling
// thread (acquire by both).
struct PeerTable {
  static constexpr size_t kCapacity = 4096;
  std::array<std::atomic<Peer*>, kCapacity> entries{};

  Peer* find(PeerId id) const noexcept {
    Peer* peer = entries[id % kCapacity].load(std::memory_order_acquire);
    return peer && peer->id == id ? peer : nullptr;
  }
};

}  // namespace moe_p2p::provider::verbs
