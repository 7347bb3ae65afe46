#include "provider/libfabric/sender.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "provider/libfabric/fence.h"

namespace moe_p2p::provider::libfabric {

using base::Code;
using base::Status;
using platform::Clock;

namespace {

// Posts per doorbell. Too small: the doorbell rings for every few writes. Too large: the first
// write of a chain waits for the last, and the smallest send queue (256) must hold several chains.
constexpr uint32_t kChain = 16;

// The first write to find a connection down waits while it is made again. Too small: the write
// fails although the peer is alive. Too large: a dead peer is reported this late.
constexpr auto kReconnect = std::chrono::milliseconds(1000);

// A write over tcp that has to wait so long may have no connection: whether there is anybody at all
// is asked from then on. Too small: each new connection is asked about. Too large: a process that
// has ended is found this late.
constexpr auto kConnects = std::chrono::milliseconds(50);

}  // namespace

Writes::Writes(const Session& session, const Config& config, Regions& regions, Peers& peers,
               std::vector<Completion>& ready)
    : session_(session),
      max_in_flight_(config.max_in_flight),
      timeout_(config.timeout),
      // shm of libfabric 1.17 delivers an empty write and then never completes it.
      bytes_when_empty_(config.provider == "shm" ? 1 : 0),
      over_rxm_(is_tcp_of_rxm(config, *session.info)),
      completion_flags_(kCompletion | (session.info->tx_attr->op_flags & kDeliveryComplete)),
      // A read's completion is its delivery. Without the flag shm reads the peer's memory itself,
      // and looks at no key (smr_rma.c, smr_do_fast_rma, of 1.17).
      read_flags_(kCompletion | (config.provider == "shm" ? kDeliveryComplete : 0)),
      regions_(regions),
      peers_(peers),
      ready_(ready),
      shares_queue_(config.is_efa()),
      queue_size_(shares_queue_ ? session.info->tx_attr->size : ~size_t{0}) {
  // Twice: slots of peers given up on the data path stay taken until libfabric returns them.
  add_slots(size_t{over_rxm_ ? 3u : 2u} * max_in_flight_);
}

void Writes::add_slots(size_t count) {
  free_.reserve(slots_.size() + count);
  for (size_t i = 0; i < count; ++i) {
    slots_.emplace_back();
    release(slots_.back());
  }
}

void Writes::refill() {
  if (free_.size() < max_in_flight_) add_slots(max_in_flight_ - free_.size());
}

void Writes::release(Slot& slot) noexcept {
  slot.state = Slot::State::kFree;
  free_.push_back(&slot);  // within its capacity
}

// --- accepting ---

size_t Writes::accept(std::span<const WorkRequest> requests) noexcept {
  const size_t used = num_in_flight_ + ready_.size();
  const size_t room =
      std::min<size_t>(free_.size(), max_in_flight_ - std::min<size_t>(used, max_in_flight_));
  const size_t count = std::min(requests.size(), room);
  for (const WorkRequest& request : requests.first(count)) {
    Slot& slot = *free_.back();
    free_.pop_back();
    ++num_in_flight_;
    accept(request, slot);
  }
  return count;
}

// Inline, as are the next two: a write costs less than 80 ns on shm, calls included.
inline void Writes::accept(const WorkRequest& request, Slot& slot) noexcept {
  slot.wr_id = request.wr_id;
  slot.region = nullptr;
  slot.bytes = request.bytes;
  slot.imm = request.imm;
  slot.peer = request.peer;
  slot.has_imm = request.has_imm;
  slot.is_read = request.is_read;
  slot.bytes_sent = false;
  slot.state = Slot::State::kWaiting;
  Peer* peer = peers_.find(request.peer);
  if (!broken_.ok()) return complete(slot, broken_);
  if (!peer) return complete(slot, {Code::kClosed, 0});
  if (request.bytes == 0) {
    slot.region = &regions_.scratch();  // at both ends
    slot.bytes = bytes_when_empty_;
    slot.local = slot.region->span.data;
    slot.remote_addr = peer->address.scratch_addr;
    slot.remote_key = peer->address.scratch_key;
  } else {
    Region* region = regions_.find(request.local_key);
    if (!region || !region->contains(request.local, request.bytes))
      return complete(slot, {Code::kInvalidArgument, 0});
    slot.region = region;
    slot.local = request.local;
    slot.remote_addr = request.remote_addr;
    slot.remote_key = request.remote_key;
  }
  enqueue(slot, *peer);
}

inline void Writes::enqueue(Slot& slot, Peer& peer) noexcept {
  slot.next = nullptr;
  (peer.first ? peer.last->next : peer.first) = &slot;
  peer.last = &slot;
  ++(slot.is_read ? slot.region->num_reads : slot.region->num_writes);
  list(peer);
}

inline void Writes::list(Peer& peer) noexcept {
  if (std::exchange(peer.listed, true)) return;
  peer.next_waiting = waiting_;
  waiting_ = &peer;
}

void Writes::announce(Peer& peer, uint64_t announcement) {
  if (std::ranges::count(peer.announced, announcement) != 0) return;
  peer.announced.push_back(announcement);
  list(peer);
}

bool Writes::probe(Peer& peer) {
  if (peer.probe == Peer::Probe::kNone && post_empty(peer, Slot::State::kProbe, {}) == 0)
    peer.probe = Peer::Probe::kPosted;
  return peer.probe == Peer::Probe::kAnswered;
}

namespace {

bool is_posted(const Slot& slot) {
  return slot.state != Slot::State::kFree && slot.state != Slot::State::kWaiting;
}

}  // namespace

bool Writes::has_posted_to(const base::Bytes& name, What what) const noexcept {
  return std::ranges::any_of(slots_, [&](const Slot& slot) {
    return is_posted(slot) && (what == What::kAll || slot.is_read) &&
           peers_.name_of(slot.peer) == name;
  });
}

bool Writes::is_connected(const Peer& peer) {
  refill();
  return has_posted_to(peer.address.name) || post_empty(peer, Slot::State::kAbandoned, {}) == 0;
}

bool Writes::may_close_endpoint() const noexcept {
  return !over_rxm_ || std::ranges::none_of(slots_, [](const Slot& slot) {
    return is_posted(slot) && slot.is_read;
  });
}

// ofi_rxm of 1.17 crashes when it ends a connection that it does not have: after one that failed at
// once, or that the peer refused because its own is on its way (rxm_conn.c, rxm_av_remove_handler).
// There is none of these while it takes what is posted; where it is to be asked again later, it has
// begun another one.
bool Writes::may_end_connection(const Peer& peer, bool waited) {
  if (!over_rxm_) return true;
  if (has_posted_to(peer.address.name, What::kReads)) return false;
  if (!peer.entry->refused) return true;
  refill();
  const ssize_t result = post_empty(peer, Slot::State::kAbandoned, {});
  return result == 0 || (result == -EAGAIN && (waited || has_posted_to(peer.address.name)));
}

// --- posting ---

void Writes::pump() noexcept {
  for (Peer** link = &waiting_; *link;) {
    Peer& peer = **link;
    if (push(peer)) {
      peer.listed = false;
      *link = peer.next_waiting;
    } else {
      link = &peer.next_waiting;
    }
  }
  // Other providers send writes with FI_MORE by themselves, and shm crashes on a write to a peer
  // that left.
  if (shares_queue_ && chain_length_ > 0) ring();
}

// Posts what the peer is to be announced. Returns what push() returns where that fails.
std::optional<bool> Writes::announce(Peer& peer) noexcept {
  if (peer.num_announced == peer.announced.size()) return std::nullopt;
  const ssize_t result = post_announced(peer);
  if (result == 0) {
    peer.refused_since.reset();
    return std::nullopt;
  }
  const bool busy = result == -EAGAIN;
  const int why = has_given_up(peer, busy ? timeout_ : std::min(timeout_, kReconnect));
  if (why == 0) return false;
  fail(peer, busy ? Status{Code::kPeerDead, why} : status_of(static_cast<int>(-result)));
  return true;
}

// After a write that was not taken: what push() returns, or nothing if that write alone has failed.
std::optional<bool> Writes::give_up(Peer& peer, bool busy, Status status) noexcept {
  const Status stalled{Code::kPeerDead, ETIMEDOUT};
  if (busy && is_full()) {
    if (!has_stalled()) return false;
    if (num_posted_ == 0) return fail(peer, stalled), true;
    fail_if(stalled, [](const Slot& other) { return other.state == Slot::State::kPosted; });
    completed_ = true;  // the writes that filled the queue are given up; the rest may go
    return false;
  }
  if (!busy && status.code != Code::kPeerDead) return std::nullopt;
  const int why = has_given_up(peer, busy ? timeout_ : std::min(timeout_, kReconnect));
  if (why == 0) return false;
  fail(peer, busy ? Status{Code::kPeerDead, why} : status);
  return true;
}

// True when nothing of the peer waits any more.
bool Writes::push(Peer& peer) noexcept {
  if (const auto ended = announce(peer)) return *ended;
  while (Slot* slot = peer.first) {
    if (slot->is_read && shares_queue_ && chain_length_ > 0) ring();
    if (slot->is_read && shares_queue_ && chain_length_ > 0)
      return false;  // again at the next poll
    const bool more = !slot->is_read && chain_length_ + 1 < kChain && goes_on(*slot, peer);
    ssize_t result = 0;
    if (over_rxm_ && slot->has_imm && slot->bytes != 0 && !slot->bytes_sent)
      result = post_bytes(*slot, peer);
    if (result == 0) result = post(*slot, peer, more ? kMore : 0, slot->imm);
    const Status status = result == 0 ? Status{} : status_of(static_cast<int>(-result));
    if (result != 0)
      if (const auto ended = give_up(peer, result == -EAGAIN, status)) return *ended;
    peer.refused_since.reset();
    peer.first = slot->next;
    if (result == 0) {
      chain_length_ = more ? chain_length_ + 1 : 0;
      chain_peer_ = peer.id;
      slot->state = Slot::State::kPosted;
      ++num_posted_;
      ++num_held_;
    } else {
      complete(*slot, status);
    }
  }
  return true;
}

// True when another write will be posted right after this one. Before its handshake EFA holds a
// write back and reports it as taken: it then does not ring for earlier writes, and libfabric
// without the commit 3b01e1417 posts the write later with its FI_MORE, when nothing may follow.
bool Writes::goes_on(const Slot& slot, const Peer& peer) const noexcept {
  if (slot.next) return !slot.next->is_read;
  const Peer* next = shares_queue_ && peer.answered ? peer.next_waiting : nullptr;
  return next && next->first && !next->first->is_read && next->answered && !next->refused_since;
}

// Ends a chain whose continuation was refused or failed, with an empty write without completion.
void Writes::ring() noexcept {
  Peer* peer = peers_.find(chain_peer_);
  if (!peer) peer = peers_.find_answered();
  // Again at the next poll, if not now.
  if (!peer || post_empty(*peer, Slot::State::kAbandoned, {}) != 0) return;
  chain_length_ = 0;
}

// Of no write of the engine's.
ssize_t Writes::post_empty(const Peer& peer, Slot::State state,
                           std::optional<uint64_t> data) noexcept {
  if (free_.empty()) return -EAGAIN;
  Slot& slot = *free_.back();
  slot.region = &regions_.scratch();
  slot.local = slot.region->span.data;
  slot.bytes = bytes_when_empty_;
  slot.remote_addr = peer.address.scratch_addr;
  slot.remote_key = peer.address.scratch_key;
  slot.peer = peer.id;
  slot.has_imm = data.has_value();
  return post_beside(slot, peer, state, data.value_or(0));
}

ssize_t Writes::post_bytes(Slot& slot, const Peer& peer) noexcept {
  if (free_.empty()) return -EAGAIN;
  Slot& bytes = *free_.back();
  bytes.region = slot.region;
  bytes.local = slot.local;
  bytes.bytes = slot.bytes;
  bytes.remote_addr = slot.remote_addr;
  bytes.remote_key = slot.remote_key;
  bytes.peer = slot.peer;
  bytes.has_imm = false;
  const ssize_t result = post_beside(bytes, peer, Slot::State::kAbandoned, 0);
  slot.bytes_sent = result == 0;
  return result;
}

// `slot`: the last free one, filled.
ssize_t Writes::post_beside(Slot& slot, const Peer& peer, Slot::State state,
                            uint64_t data) noexcept {
  slot.is_read = false;
  slot.bytes_sent = false;
  if (const ssize_t result = post(slot, peer, 0, data); result != 0) return result;
  free_.pop_back();
  slot.state = state;
  ++slot.region->num_writes;
  ++num_held_;
  return 0;
}

ssize_t Writes::post_announced(Peer& peer) noexcept {
  for (; peer.num_announced < peer.announced.size(); ++peer.num_announced) {
    const uint64_t data = peer.announced[peer.num_announced];
    if (const ssize_t result = post_empty(peer, Slot::State::kAbandoned, data); result != 0)
      return result;
  }
  return 0;
}

inline ssize_t Writes::post(Slot& slot, const Peer& peer, uint64_t flags, uint64_t data) noexcept {
  iovec local{const_cast<std::byte*>(slot.local), slot.bytes};
  RmaIov remote{slot.remote_addr, slot.bytes, slot.remote_key};
  if (slot.bytes_sent) {
    local.iov_len = 0;
    remote = {peer.address.scratch_addr, 0, peer.address.scratch_key};
  }
  const RmaMessage message{.msg_iov = &local,
                           .desc = &slot.region->descriptor,
                           .iov_count = 1,
                           .addr = peer.entry->fi_addr,
                           .rma_iov = &remote,
                           .rma_iov_count = 1,
                           .context = &slot.context,
                           .data = data};
  if (slot.has_imm) flags |= kRemoteCqData;
  Endpoint& endpoint = *session_.endpoint;
  const ssize_t result =
      slot.is_read ? endpoint.rma->readmsg(&endpoint, &message, flags | read_flags_)
                   : endpoint.rma->writemsg(&endpoint, &message, flags | completion_flags_);
  peer.entry->refused = result != 0;
  return result;
}

// The clock is read when a full queue refuses, not at each completion.
bool Writes::has_stalled() noexcept {
  const auto now = Clock::now();
  if (std::exchange(completed_, false)) last_completion_ = now;
  return now - last_completion_ >= timeout_;
}

// Returns the error: 0 within `patience`, which counts from the first refusal, unless nobody is
// there.
int Writes::has_given_up(Peer& peer, std::chrono::milliseconds patience) noexcept {
  const auto now = Clock::now();
  if (!peer.refused_since) peer.refused_since = now;
  const auto refused_for = now - *peer.refused_since;
  if (refused_for >= patience) return ETIMEDOUT;
  const base::Bytes& name = peer.address.name;
  if (!over_rxm_ || refused_for < std::min(timeout_, kConnects)) return 0;
  return peer.listener.is_gone(name, now) && !has_posted_to(name) ? ECONNREFUSED : 0;
}

// --- completing ---

// Failures that the caller caused are not the NIC's.
void Writes::note(const Slot& slot, Status status, int prov_errno) noexcept {
  if (status.ok() || status.code == Code::kClosed || first_failure_) return;
  first_failure_ = {status, prov_errno, slot.bytes, slot.peer, slot.is_read};
}

void Writes::show(const Slot& slot, Status status) noexcept {
  note(slot, status, 0);
  --num_in_flight_;
  ready_.push_back({.wr_id = slot.wr_id, .status = status});  // within its capacity
}

void Writes::leave(const Slot& slot) noexcept {
  --(slot.is_read ? slot.region->num_reads : slot.region->num_writes);
}

void Writes::complete(Slot& slot, Status status) noexcept {
  show(slot, status);
  if (slot.region) leave(slot);
  release(slot);
}

bool Writes::owns(const void* op_context) const noexcept {
  return std::ranges::any_of(slots_, [&](const Slot& slot) { return &slot == op_context; });
}

std::optional<Completion> Writes::finish(void* op_context, Status status, int prov_errno) noexcept {
  Slot& slot = *static_cast<Slot*>(op_context);
  const bool wanted = slot.state == Slot::State::kPosted;
  if (wanted) note(slot, status, prov_errno);
  completed_ = true;
  --num_held_;
  if (shares_queue_)
    if (Peer* peer = peers_.find(slot.peer)) peer->answered = status.ok();
  if (!status.ok() || slot.state == Slot::State::kProbe)
    if (Peer* peer = peers_.find(slot.peer)) {
      if (!status.ok()) peer->num_announced = 0;  // what it had announced may be lost
      if (slot.state == Slot::State::kProbe) peer->probe = Peer::Probe::kAnswered;
    }
  const uint64_t wr_id = slot.wr_id;
  leave(slot);
  release(slot);
  if (!wanted) return std::nullopt;
  --num_posted_;
  --num_in_flight_;
  return Completion{.wr_id = wr_id, .status = status};
}

template <typename Concerns>
void Writes::fail_if(Status status, Concerns&& concerns) noexcept {
  for (Peer* peer = waiting_; peer; peer = peer->next_waiting) {
    Slot* kept = nullptr;
    for (Slot *slot = peer->first, *next = nullptr; slot; slot = next) {
      next = slot->next;
      if (concerns(*slot)) {
        (kept ? kept->next : peer->first) = next;
        complete(*slot, status);
      } else {
        kept = slot;
      }
    }
    peer->last = kept;
  }
  for (Slot& slot : slots_) {
    if (slot.state != Slot::State::kPosted || !concerns(slot)) continue;
    slot.state = Slot::State::kAbandoned;
    --num_posted_;
    show(slot, status);
  }
}

void Writes::fail(Peer& peer, Status status) noexcept {
  peer.refused_since.reset();
  fail_if(status, [&](const Slot& slot) { return slot.peer == peer.id; });
}
void Writes::fail(const Region& region, Status status) noexcept {
  fail_if(status, [&](const Slot& slot) { return slot.region == &region; });
}
void Writes::fail_all(Status status) noexcept {
  broken_ = status;
  fail_if(status, [](const Slot&) { return true; });
}

}  // namespace moe_p2p::provider::libfabric
