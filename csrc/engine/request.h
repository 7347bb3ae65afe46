// The engine's operations. A Request belongs to its submitter and must stay alive, with the arrays
// its operation points to, until done(). It may be submitted again after that.
//
// Immediates delivered to the peer (R = number of rails = NICs of the sender):
//   Imm         1
//   Write       R: the bytes are cut into R shards, one per NIC, empty shards included;
//               0 without an immediate
//   WritePages  kPerPage: one per page; kPerNic: R, each after all that its NIC carries, if only
//               the immediate
//   Scatter     kByPeer: 1 per slice (slice i travels on NIC i mod R); kByBytes: R per slice
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/mailbox.h"
#include "engine/memory_region.h"
#include "platform/wait.h"

namespace moe_p2p::engine {

inline constexpr int kNumPriorities = 3;

class FinishedQueue;  // finished_queue.h
class Gate;           // gate.h
class Peer;           // peer.h

// A descriptor resolved for one connected peer: rail i goes through NIC i.
struct RemoteRegion {
  struct Rail {
    provider::PeerId peer;
    uint64_t remote_addr;
    uint64_t remote_key;
  };
  const Peer* owner = nullptr;
  uint64_t bytes = 0;
  std::vector<Rail> rails;  // one per NIC of the sender
};

struct Imm {
  const Peer* peer = nullptr;
  uint32_t imm = 0;
};

// 8 bytes for each NIC from `offset` in the target on, stored behind what that NIC wrote there
// (provider.h, sentence 4).
struct Flag {
  uint64_t offset = 0;
  uint64_t value = 0;
};

struct Write {
  const MemoryHandle* source = nullptr;
  uint64_t source_offset = 0;
  const RemoteRegion* target = nullptr;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
  std::optional<uint32_t> imm;
  std::optional<Flag> flag = {};  // with an immediate, where all NICs order writes
};

// Page p of a side lies at offset + indices[p] * stride, its row r at r * row_stride from there.
struct Pages {
  std::span<const int64_t> indices;
  uint64_t stride = 0;
  uint64_t offset = 0;
  uint64_t row_stride = 0;
};

// Rows that follow each other on both sides are one write. Not with an immediate per page, which
// also wants pages of one row.
struct WritePages {
  enum class Imms : uint8_t { kPerPage, kPerNic };
  const MemoryHandle* source = nullptr;
  const RemoteRegion* target = nullptr;
  uint64_t page_bytes = 0;
  Pages source_pages;
  Pages target_pages;
  std::optional<uint32_t> imm;
  uint64_t row_bytes = 0;  // divides page_bytes; 0: a page is one row
  Imms imms = Imms::kPerPage;

  uint64_t num_rows() const noexcept { return row_bytes == 0 ? 1 : page_bytes / row_bytes; }
};

struct Slice {
  uint64_t source_offset = 0;
  const RemoteRegion* target = nullptr;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
};

struct Scatter {
  enum class Sharding : uint8_t { kByPeer, kByBytes };
  const MemoryHandle* source = nullptr;
  std::span<const Slice> slices;
  Sharding sharding = Sharding::kByPeer;
  std::optional<uint32_t> imm;
};

// The peer's memory is the source, the memory here the target. No immediate is delivered: only the
// reader knows when it is done.
struct Read {
  const MemoryHandle* target = nullptr;
  uint64_t target_offset = 0;
  const RemoteRegion* source = nullptr;
  uint64_t source_offset = 0;
  uint64_t bytes = 0;

  // The same ranges as a write.
  Write reversed() const noexcept {
    return {target, target_offset, source, source_offset, bytes, std::nullopt, std::nullopt};
  }
};

struct ReadPages {
  const MemoryHandle* target = nullptr;
  const RemoteRegion* source = nullptr;
  uint64_t page_bytes = 0;
  Pages target_pages;
  Pages source_pages;
  uint64_t row_bytes = 0;

  WritePages reversed() const noexcept {
    return {target, source, page_bytes, target_pages, source_pages, std::nullopt, row_bytes};
  }
};

using Operation = std::variant<Imm, Write, WritePages, Scatter, Read, ReadPages>;

// One NIC's progress with one Request. An item is what one NIC carries as a whole (a shard, a page,
// a slice); it is cut into several writes only where the NIC limits the size of a write.
struct RailCursor {
  enum class State : uint8_t {
    kMore,       // has writes to post
    kHeld,       // its next write carries an immediate and waits for the item's earlier writes
    kExhausted,  // everything is posted
  };
  uint64_t item = 0;
  uint64_t offset = 0;     // bytes of this item already posted
  uint64_t in_flight = 0;  // posted or staged on this NIC and not completed
  State state = State::kExhausted;
};

struct Amount {
  uint64_t bytes = 0;
  uint64_t imms = 0;

  Amount& operator+=(const Amount& more) noexcept {
    bytes += more.bytes;
    imms += more.imms;
    return *this;
  }
};

// How far a Request was that did not end well, over all NICs. What was posted may have arrived.
struct Cancellation {
  Amount posted;
  uint64_t posted_writes = 0;  // or reads: work requests
  Amount taken_back;           // never posted
};

// How far a Request is that is not done.
struct Progress {
  bool held = false;           // by its gate
  uint64_t posted_writes = 0;  // or next to be, where a NIC is full
  uint64_t in_flight = 0;      // of these
  bool more = false;           // to post
};

class Request : private MailboxNode {
 public:
  Request() noexcept : MailboxNode(Kind::kRequest) {}
  explicit Request(Operation what) : MailboxNode(Kind::kRequest), operation(std::move(what)) {}
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  Operation operation;
  // 0 to 2, the most urgent first: MoE, KV, weights. Must not change while the Request is active.
  uint8_t priority = 0;
  // Keeps the times below, which costs a look at the clock.
  bool timed = false;
  // Nothing is posted before the gate's word is at least gate_value; null: at once. As `priority`.
  Gate* gate = nullptr;
  uint64_t gate_value = 0;

  // acquire: pairs with the release in finish(); status() is valid once this is true.
  bool done() const noexcept { return phase_.load(std::memory_order_acquire) == Phase::kDone; }
  // Submitted and not done.
  bool active() const noexcept;
  base::Status status() const noexcept { return status_; }
  // Of a Request that is done and did not end well.
  const Cancellation& cancellation() const noexcept { return cancellation_; }
  // Of a timed Request that is done: when its first write was given to a NIC (the epoch: none was),
  // and when the last completion was seen, or what else ended it.
  platform::Deadline first_post() const noexcept { return first_post_; }
  platform::Deadline end() const noexcept { return end_; }
  // Of a Request that is done: work requests that were posted.
  uint64_t num_writes() const noexcept { return num_writes_; }
  // Any thread, after the submission. The Request comes out of the queue once it has ended, also
  // when it had before, and must stay alive until then. False when another queue has it already.
  bool watch(FinishedQueue& queue) noexcept;
  // Returns false when the deadline passed first; the Request is then still in use.
  bool wait(platform::Deadline deadline, const platform::WaitPolicy& policy = {});

 private:
  friend class TransferEngine;
  friend class Poller;
  friend class NicQueue;
  friend class Gates;
  friend class FinishedQueue;

  // kFinishing exists because a Request may be destroyed as soon as it is done: waiters are
  // notified before kDone, the last write of the polling thread.
  enum class Phase : uint32_t { kIdle, kActive, kFinishing, kDone };

  // One per NIC: the cursor, and the links of that NIC's queue.
  struct Rail {
    RailCursor cursor;
    uint32_t largest = 0;  // bytes of a write in flight, at most
    Request* previous = nullptr;
    Request* next = nullptr;
    bool queued = false;
  };

  void start() noexcept;            // submitter, before the push
  void finish() noexcept;           // polling thread; the Request may be gone when this returns
  void take_from_queue() noexcept;  // user, out of its FinishedQueue

  // Polling thread only, from here to `event_`.
  base::Status status_;        // the first failure
  Cancellation cancellation_;  // at that moment
  platform::Deadline first_post_{}, end_{};
  uint64_t in_flight_ = 0;   // over all NICs, staged included
  uint64_t num_writes_ = 0;  // likewise, completed ones included
  int open_rails_ = 0;       // NICs that have more to post
  bool fills_gpu_memory_ = false;
  bool held_ = false;  // by its gate
  std::array<Rail, kMaxNics> rails_;
  Request* previous_active_ = nullptr;
  Request* next_active_ = nullptr;

  // Null, a FinishedQueue, or kEnded. finish() and watch() exchange it: exactly one of the two puts
  // the Request into the queue.
  static constexpr uintptr_t kEnded = 1;
  std::atomic<uintptr_t> watcher_{0};
  std::atomic<Phase> phase_{Phase::kIdle};
  platform::EventCount event_{};
};

}  // namespace moe_p2p::engine
