// The sending side of one NIC: accepted writes, in a list per peer until libfabric takes them. A
// peer that takes nothing (not connected yet, its queue full) holds up only itself; pump() offers
// again at every poll. Data path, inside the Domain's gate; what allocates is marked as control.
//
// Writes go out in chains with FI_MORE, which lets the NIC be rung once per chain. EFA's peers
// share one send queue, so a chain goes on to the next peer there; neither to nor from one that may
// have to shake hands first, for EFA keeps its writes back. A chain that was cut short is rung by
// an empty write.
//
// A shared queue that is full refuses everybody: the patience with a peer counts refusals that are
// its own, the patience with the queue counts from the last completion.
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <vector>

#include "provider/libfabric/failure.h"
#include "provider/libfabric/memory.h"
#include "provider/libfabric/peers.h"

namespace moe_p2p::provider::libfabric {

// One accepted write. libfabric has the address of `context` while the write is posted. The rest is
// one cache line: between two batches of writes, caches forget what the last one touched.
struct alignas(64) Slot {
  // kAbandoned: completed toward the engine, libfabric still has to return it.
  enum class State : uint8_t { kFree, kWaiting, kPosted, kAbandoned };

  Context context{};  // first: a completion's op_context is the slot's address
  uint64_t wr_id = 0;
  const std::byte* local = nullptr;
  Region* region = nullptr;
  uint64_t remote_addr = 0;
  uint64_t remote_key = 0;
  Slot* next = nullptr;  // in the list of the peer
  uint32_t bytes = 0;
  uint32_t imm = 0;
  PeerId peer = 0;
  bool has_imm = false;
  State state = State::kFree;
};
static_assert(sizeof(Slot) == sizeof(Context) + 64);

class Writes {
 public:
  Writes(const Session& session, const Config& config, Regions& regions, Peers& peers,
         std::vector<Completion>& ready);

  // Takes the first n requests and returns n.
  size_t accept(std::span<const WorkRequest> requests) noexcept;
  // Offers what waits to libfabric.
  void pump() noexcept;
  // libfabric returned op_context. The engine's completion of it, unless it has had one.
  std::optional<Completion> finish(void* op_context, base::Status status,
                                   int prov_errno = 0) noexcept;
  bool owns(const void* op_context) const noexcept;
  // Completes what is under way to the peer, or from the memory, with `status`.
  void fail(Peer& peer, base::Status status) noexcept;
  void fail(const Region& region, base::Status status) noexcept;
  // Completes everything with `status`, from now on: the NIC is lost.
  void fail_all(base::Status status) noexcept;
  // Control: makes up for slots that were abandoned and may never come back.
  void refill();

  const std::optional<Failure>& first_failure() const noexcept { return first_failure_; }
  uint32_t num_in_flight() const noexcept { return num_in_flight_; }
  uint32_t num_posted() const noexcept { return num_posted_; }  // without abandoned ones

 private:
  void add_slots(size_t count);
  void accept(const WorkRequest& request, Slot& slot) noexcept;
  void enqueue(Slot& slot, Peer& peer) noexcept;
  bool push(Peer& peer) noexcept;
  ssize_t post(Slot& slot, const Peer& peer, uint64_t flags) noexcept;
  bool goes_on(const Slot& slot, const Peer& peer) const noexcept;
  void ring() noexcept;
  bool is_full() const noexcept { return num_held_ >= queue_size_; }
  bool has_stalled() noexcept;
  bool has_given_up(Peer& peer, std::chrono::milliseconds patience) noexcept;
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
  const uint64_t completion_flags_;
  Regions& regions_;
  Peers& peers_;
  std::vector<Completion>& ready_;
  std::deque<Slot> slots_;
  std::vector<Slot*> free_;     // no list: each link would be a miss that the next one waits for
  Peer* waiting_ = nullptr;     // peers with a list, by Peer::next_waiting
  const bool shares_queue_;     // all peers have one send queue
  const size_t queue_size_;     // of it
  uint32_t chain_length_ = 0;   // writes with FI_MORE since the NIC was rung
  PeerId chain_peer_ = 0;       // of the last one
  uint32_t num_in_flight_ = 0;  // accepted, no completion yet
  uint32_t num_posted_ = 0;
  size_t num_held_ = 0;    // by libfabric
  bool completed_ = true;  // something has, since last_completion_ was set
  platform::Clock::time_point last_completion_;
  std::optional<Failure> first_failure_;
  base::Status broken_;  // what every write ends with
};

}  // namespace moe_p2p::provider::libfabric
