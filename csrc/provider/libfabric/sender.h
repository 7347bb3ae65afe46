// The sending side of one NIC: accepted writes, in a list per peer until libfabric takes them. A
// peer that takes nothing (not connected yet, its queue full) delays only itself; pump() tries
// again at every poll. Data path, inside the Domain's gate; functions that allocate are marked as
// control.
//
// Writes are posted in chains with FI_MORE, which needs one doorbell per chain. EFA's peers share
// one send queue, so a chain continues with the next peer there; but neither to nor from a peer
// that may still need a handshake, because EFA holds back its writes. A chain that was cut short is
// rung by an empty write. Reads are in no chain: EFA begins one of its own for each read, also when
// another is open (efa_rdm_pke.c, efa_rdm_pke_read, of 1.20 to 1.22).
//
// Over tcp a write with bytes and an immediate is two of libfabric's: fence.h says why. Connections
// are in order, so the immediate comes behind the bytes.
//
// A full shared queue refuses all peers: a peer's patience counts only its own refusals, the
// queue's patience counts from the last completion.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <vector>

#include "provider/libfabric/failure.h"
#include "provider/libfabric/memory.h"
#include "provider/libfabric/peers.h"

namespace moe_p2p::provider::libfabric {

// One accepted write or read. libfabric has the address of `context` while the write is posted. The
// rest is one cache line: between two batches of writes, it falls out of the caches.
struct alignas(64) Slot {
  // kAbandoned: reported to the engine as complete, or none of its writes, or the bytes of a write
  // whose immediate follows; not yet returned by libfabric. kProbe: so, and its peer waits for it
  // (Peer::probe).
  enum class State : uint8_t { kFree, kWaiting, kPosted, kAbandoned, kProbe };

  Context context{};  // first: a completion's op_context is the slot's address
  uint64_t wr_id = 0;
  const std::byte* local = nullptr;
  Region* region = nullptr;
  uint64_t remote_addr = 0;
  uint64_t remote_key = 0;
  Slot* next = nullptr;  // in the peer's list
  uint32_t bytes = 0;
  uint32_t imm = 0;
  PeerId peer = 0;
  bool has_imm = false;
  bool is_read = false;
  bool bytes_sent = false;  // in a slot of their own: what is left to post is the immediate
  State state = State::kFree;
};
static_assert(sizeof(Slot) == sizeof(Context) + 64);

class Writes {
 public:
  Writes(const Session& session, const Config& config, Regions& regions, Peers& peers,
         std::vector<Completion>& ready);

  // Takes the first n requests and returns n.
  size_t accept(std::span<const WorkRequest> requests) noexcept;
  // Offers waiting writes to libfabric.
  void pump() noexcept;
  // libfabric returned op_context: returns its completion for the engine, unless that was reported
  // before.
  std::optional<Completion> finish(void* op_context, base::Status status,
                                   int prov_errno = 0) noexcept;
  bool owns(const void* op_context) const noexcept;
  // Completes the writes in flight to the peer, or from the memory, with `status`.
  void fail(Peer& peer, base::Status status) noexcept;
  void fail(const Region& region, base::Status status) noexcept;
  // For a lost NIC: completes all writes with `status`, also later ones.
  void fail_all(base::Status status) noexcept;
  // Control. Posted before all writes that are accepted later, and again after a failure.
  void announce(Peer& peer, uint64_t announcement);
  // Control: asks the peer, once; true when it has answered, or its connection has ended.
  bool probe(Peer& peer);
  // To this address, by any Peer that it has or had. kReads: reads alone.
  enum class What { kAll, kReads };
  bool has_posted_to(const base::Bytes& name, What what = What::kAll) const noexcept;
  // Control: asks libfabric.
  bool is_connected(const Peer& peer);
  // Control: whether libfabric can end the connection to the peer now. `waited`: it had time to be
  // made, or to fail.
  bool may_end_connection(const Peer& peer, bool waited);
  bool may_close_endpoint() const noexcept;
  // Control: replaces abandoned slots, which may never be returned.
  void refill();

  const std::optional<Failure>& first_failure() const noexcept { return first_failure_; }
  uint32_t num_in_flight() const noexcept { return num_in_flight_; }
  uint32_t num_posted() const noexcept { return num_posted_; }  // without abandoned ones

 private:
  void add_slots(size_t count);
  void accept(const WorkRequest& request, Slot& slot) noexcept;
  void enqueue(Slot& slot, Peer& peer) noexcept;
  void list(Peer& peer) noexcept;
  std::optional<bool> announce(Peer& peer) noexcept;
  std::optional<bool> give_up(Peer& peer, bool busy, base::Status status) noexcept;
  bool push(Peer& peer) noexcept;
  ssize_t post(Slot& slot, const Peer& peer, uint64_t flags, uint64_t data) noexcept;
  ssize_t post_empty(const Peer& peer, Slot::State state, std::optional<uint64_t> data) noexcept;
  ssize_t post_bytes(Slot& slot, const Peer& peer) noexcept;
  ssize_t post_beside(Slot& slot, const Peer& peer, Slot::State state, uint64_t data) noexcept;
  ssize_t post_announced(Peer& peer) noexcept;
  void leave(const Slot& slot) noexcept;
  bool goes_on(const Slot& slot, const Peer& peer) const noexcept;
  void ring() noexcept;
  bool is_full() const noexcept { return num_held_ >= queue_size_; }
  bool has_stalled() noexcept;
  int has_given_up(Peer& peer, std::chrono::milliseconds patience) noexcept;
  template <typename Concerns>
  void fail_if(base::Status status, Concerns&& concerns) noexcept;
  void note(const Slot& slot, base::Status status, int prov_errno) noexcept;
  void show(const Slot& slot, base::Status status) noexcept;
  void complete(Slot& slot, base::Status status) noexcept;
  void release(Slot& slot) noexcept;

  const Session& session_;
  const uint32_t max_in_flight_;
  const std::chrono::milliseconds timeout_;
  const uint32_t bytes_when_empty_;
  const bool over_rxm_;  // tcp's, with its limits (fence.h)
  const uint64_t completion_flags_, read_flags_;
  Regions& regions_;
  Peers& peers_;
  std::vector<Completion>& ready_;
  std::deque<Slot> slots_;
  std::vector<Slot*> free_;     // no linked list: each link would be a cache miss
  Peer* waiting_ = nullptr;     // peers with a list, by Peer::next_waiting
  const bool shares_queue_;     // all peers have one send queue
  const size_t queue_size_;     // of the shared send queue
  uint32_t chain_length_ = 0;   // writes with FI_MORE since the last doorbell
  PeerId chain_peer_ = 0;       // of the last write with FI_MORE
  uint32_t num_in_flight_ = 0;  // accepted, no completion yet
  uint32_t num_posted_ = 0;
  size_t num_held_ = 0;    // posted writes that libfabric has, abandoned ones too
  bool completed_ = true;  // a write has, since last_completion_ was set
  platform::Clock::time_point last_completion_;
  std::optional<Failure> first_failure_;
  base::Status broken_;  // not ok: every write ends with it
};

}  // namespace moe_p2p::provider::libfabric
