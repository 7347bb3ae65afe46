// A connected NIC and the queue pairs (lanes) that lead to it: what the control path and the
// polling thread know of it, and the few words through which they tell each other.
//
// A lane breaks when one of its writes is refused, the driver refuses to post, or the peer ends.
// What the NIC holds then comes back in its own time and not always write by write, so the polling
// thread posts one more, the marker, whose completion comes after all others (Sender::end_lane).
// With it the lane is repaired, when only a write was refused: what had not been carried out is
// kept, the control thread makes a new pair of queues, and the rest is posted there. Else what it
// owes fails. A marker that does not come in time is given up by the control thread, and the lane
// fails.
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

// An accepted write until its completion is shown. `wr` is what the NIC is given: its next pointers
// are the lane's queue, so that posting a chain copies nothing.
struct Slot {
  SendWr wr{};
  Sge sge{};
  uint64_t wr_id = 0;  // the caller's
  Lane* lane = nullptr;
  Slot* next() const noexcept { return reinterpret_cast<Slot*>(wr.next); }
};
static_assert(offsetof(Slot, wr) == 0);

struct Lane {
  enum class Repair : int { kNone, kEnding, kGivenUp, kWanted, kRepairing, kRepaired };

  Peer* peer = nullptr;
  uint32_t index = 0;

  // Between the threads. kEnding, kNone and kWanted are stored by the polling thread (release;
  // acquire in Control::look_at_peers), the others by the control thread (release; acquire in
  // Sender::look_at). Both leave kEnding, so by exchange: the marker came (kNone, kWanted) or did
  // not (kGivenUp). While it is kEnding the polling thread leaves `qp` alone.
  std::atomic<Repair> repair{Repair::kNone};
  // Stored by the control side before kRepaired, or before the peer is shown at all.
  Qp* qp = nullptr;

  // Control side.
  Owned<Qp> owner{nullptr, nullptr};
  uint32_t psn = 0;
  platform::Deadline end_by = platform::Deadline::max();  // for the marker to be there
  uint64_t end_ticket = 0;  // of Changes: when it is done the marker must have been seen

  // Polling thread. The queue: `head` is the oldest, `unposted` the first that the NIC has not got.
  Slot* head = nullptr;
  Slot* unposted = nullptr;
  Slot* tail = nullptr;
  uint32_t num_posted = 0;
  uint32_t num_unposted = 0;
  bool waiting = false;  // in the Sender's list of lanes with something to post
  bool broken = false;   // nothing more is posted to this queue pair
  bool ending = false;   // the marker is under way
  bool failed = false;   // a completion was not good: those behind it were not carried out
  bool dead = false;     // what comes fails with `failure`
  base::Status failure;
  Lane* next_waiting = nullptr;
};

struct Peer {
  PeerId id = 0;
  NicAddress address;
  std::vector<std::unique_ptr<Lane>> lanes;

  // Why nothing can be sent any more: kPeerDead or kClosed, the first stays. Stored by the control
  // side (release; acquire in Sender::look_at), after which it breaks the queue pairs.
  std::atomic<base::Code> end{base::Code::kOk};
  std::atomic<bool> leaving{false};   // disconnect() was called; as `end`
  std::atomic<bool> released{false};  // the polling thread has forgotten it (release; Control)

  // Control side.
  Socket link;
  std::optional<Proof> proof;  // of what travels over `link`
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
