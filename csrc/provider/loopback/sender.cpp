#include "provider/loopback/sender.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace moe_p2p::provider::loopback {

using base::Code;

namespace {

// How long a peer may be silent before a system call checks that it lives, and between two checks.
constexpr int64_t kStalledLookNs = 20'000'000;
// Polls without an acknowledgement after which the peer's flags are read, which costs a cache line.
constexpr uint32_t kStalledLookPolls = 64;

Completion completion_of(const WorkRequest& request, base::Status status) noexcept {
  Completion completion;
  completion.wr_id = request.wr_id;
  completion.status = status;
  return completion;
}

}  // namespace

Sender::Sender(const Config& config, int nic, RegionTable& regions, Copies& copies,
               const TimeSource& time)
    : config_(config),
      stream_(static_cast<uint64_t>(nic) << 8 | 1),
      link_(config.gbps, config.latency_us, config.post_us, config.message_us),
      copies_(copies),
      time_(time),
      context_{regions,         link_,         time,         copies,
               config.in_place, config.hollow, most_urgent_, of_class_},
      chaos_(config.seed, stream_ ^ 2),
      trace_(config.trace, nic),
      owned_(kMaxPeers),
      table_(std::make_unique<std::atomic<Connection*>[]>(kMaxPeers)),
      fail_at_(config.fail_nth),
      ready_(config.max_in_flight) {}

Sender::~Sender() {
  for (auto& connection : owned_)
    if (connection && table_[connection->id() % kMaxPeers].load(std::memory_order_acquire)) {
      connection->release();
      connection->notify();
    }
}

PeerId Sender::connect(std::shared_ptr<Segment> segment, const std::string& peer_waker,
                       const std::string& own_segment, const std::string& own_waker, int priority,
                       uint64_t tag) {
  std::lock_guard lock(mutex_);
  delete_removed();
  uint32_t index = 0;
  while (index < kMaxPeers && owned_[index]) ++index;
  MOE_P2P_CHECK(index < kMaxPeers, Code::kResourceExhausted, "all ", kMaxPeers,
                " connections of this loopback NIC are in use; disconnect some");
  const PeerId id = ++num_connects_ * kMaxPeers + index;
  most_urgent_.store(std::min(most_urgent_.load(std::memory_order_relaxed), priority),
                     std::memory_order_relaxed);
  owned_[index] =
      std::make_unique<Connection>(id, std::move(segment), Waker(peer_waker.c_str()), own_segment,
                                   own_waker, config_, stream_, priority, tag, of_class_);
  table_[index].store(owned_[index].get(), std::memory_order_release);
  if (index >= table_end_.load(std::memory_order_relaxed))  // only written under mutex_
    table_end_.store(index + 1, std::memory_order_release);
  return id;
}

void Sender::request_close(PeerId peer) {
  std::lock_guard lock(mutex_);
  delete_removed();
  Connection* connection = owned_[peer % kMaxPeers].get();
  MOE_P2P_CHECK(connection && connection->id() == peer &&
                    !connection->close_requested.load(std::memory_order_relaxed),
                Code::kInvalidArgument, "disconnecting peer ", peer, ", which is not connected");
  connection->close_requested.store(true, std::memory_order_release);
  // release: pairs with the acquire in close_requested_connections(), which then sees the flag.
  close_requests_.fetch_add(1, std::memory_order_release);
}

bool Sender::lends(PeerId peer, uint64_t remote_key) {
  std::lock_guard lock(mutex_);
  const Connection* connection = owned_[peer % kMaxPeers].get();
  if (!connection || connection->id() != peer) return false;
  const Segment& segment = connection->segment();
  return !segment.closed() &&
         RegionTable::lent_word(segment.header(), remote_key).load() == remote_key;
}

void Sender::fail_write(uint64_t nth) noexcept { fail_at_.store(nth, std::memory_order_relaxed); }

void Sender::delete_removed() {
  for (uint32_t i = 0; i < table_end_.load(std::memory_order_relaxed); ++i)
    if (owned_[i] && !table_[i].load(std::memory_order_acquire)) owned_[i].reset();
}

Connection* Sender::find(PeerId peer) const noexcept {
  Connection* connection = table_[peer % kMaxPeers].load(std::memory_order_acquire);
  if (!connection || connection->id() != peer) return nullptr;
  return connection->close_requested.load(std::memory_order_acquire) ? nullptr : connection;
}

size_t Sender::post(std::span<const WorkRequest> requests) noexcept {
  size_t count = 0;
  trace_.begin_batch();
  while (count < requests.size() && in_flight_ < config_.max_in_flight && accept(requests[count]))
    ++count;
  if (count < requests.size()) trace_.add(Trace::Entry::Kind::kFull, requests[count], 0);
  copies_.launch();
  notify_touched();
  return count;
}

// False when the peer's window is full. Without an adversary the bytes leave at once.
bool Sender::accept(const WorkRequest& request) noexcept {
  Connection* connection = find(request.peer);
  Code code = Code::kOk;
  if (abandoned_) {
    code = Code::kTransport;
  } else if (!connection) {
    code = Code::kClosed;
  } else if (connection->broken) {
    code = Code::kPeerDead;
  } else if (request.bytes > config_.max_write_bytes) {
    code = Code::kInvalidArgument;
  } else if (connection->window_full()) {
    return false;
  }
  ++in_flight_;
  if (++num_accepted_ == fail_at_.load(std::memory_order_relaxed)) code = Code::kTransport;
  if (code != Code::kOk) {
    ready_.push(completion_of(request, {code, 0}));
    return true;
  }
  trace_.add(Trace::Entry::Kind::kPosted, request, connection->priority());
  connection->enqueue(request);
  if (!chaos_.on() && connection->pump(context_)) touch(*connection);
  return true;
}

void Sender::touch(Connection& connection) noexcept {
  if (connection.touched) return;
  if (num_touched_ == touched_.size()) notify_touched();
  connection.touched = true;
  touched_[num_touched_++] = &connection;
}

void Sender::notify_touched() noexcept {
  for (; num_touched_ > 0; --num_touched_) {
    Connection& connection = *touched_[num_touched_ - 1];
    connection.touched = false;
    connection.notify();
  }
}

void Sender::pump() noexcept {
  // First, also when nothing is in flight: fragments of a write that was given up must be dropped
  // before its slot is used again.
  copies_.publish([this](Connection& connection) { touch(connection); });
  notify_touched();
  if (in_flight_ == 0) return;
  const uint32_t end = table_end_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < end; ++i) {
    Connection* connection = table_[i].load(std::memory_order_acquire);
    if (!connection || connection->close_requested.load(std::memory_order_acquire)) continue;
    if (connection->has_unsent() && connection->pump(context_)) connection->notify();
  }
  copies_.launch();
}

void Sender::complete_writes(Output& output) noexcept {
  if (close_requests_.load(std::memory_order_acquire) != 0) close_requested_connections();
  if (in_flight_ == 0) return;
  poll_time_ns_ = 0;
  show_ready(output);
  const uint32_t end = table_end_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < end && !output.full(); ++i) {
    Connection* connection = table_[i].load(std::memory_order_acquire);
    if (!connection || connection->num_in_flight() == 0) continue;
    reap(*connection, output);
    if (connection->stalled_polls > 0) look_after(*connection);
  }
}

void Sender::reap(Connection& connection, Output& output) noexcept {
  ++connection.stalled_polls;
  while (chaos_.on() || !output.full()) {
    const Ack* ack = connection.next_ack();
    if (!ack) return;
    connection.stalled_polls = 0;
    const uint32_t slot = ack->slot;
    OutgoingWrite& write = connection.write(slot);
    if (write.complete_after_ns != 0 && time_.now_ns() < write.complete_after_ns) return;
    const base::Status status{static_cast<Code>(ack->code), 0};
    if (write.in_use && write.reading) {
      if (!connection.land(slot, status.code, context_)) return;
      connection.pop_ack();
      if (connection.read_goes_on(slot)) continue;
    } else {
      connection.pop_ack();
    }
    if (!write.in_use) continue;
    trace_.add(Trace::Entry::Kind::kEnded, write.request, connection.priority());
    show(completion_of(write.request, write.status.ok() ? status : write.status), output);
    connection.finish(slot);
  }
}

// With an adversary completions wait in the pool for show_ready() to pick them.
void Sender::show(const Completion& completion, Output& output) noexcept {
  if (chaos_.on()) return ready_.push(completion);
  output.put(completion);
  --in_flight_;
}

void Sender::show_ready(Output& output) noexcept {
  while (!ready_.empty() && !output.full()) {
    if (chaos_.on() && chaos_.one_in(4)) return;
    output.put(chaos_.on() ? ready_.take(chaos_.below(ready_.size())) : ready_.pop());
    --in_flight_;
  }
}

// Checks a peer that owes acknowledgements and sends none. That it closed, which simulations have
// too, is checked by the count of polls, with an adversary by that alone, so that a replay does not
// depend on the clock.
void Sender::look_after(Connection& connection) noexcept {
  bool gone = connection.stalled_polls % kStalledLookPolls == 0 && connection.peer_left();
  const int64_t now = poll_time_ns();
  if (connection.stalled_polls == 1) connection.next_look_ns = now + kStalledLookNs;
  if (!gone && now >= connection.next_look_ns) {
    connection.next_look_ns = now + kStalledLookNs;
    gone = !connection.segment().process_alive() || (!chaos_.on() && connection.peer_left());
  }
  if (!gone || copies_.fills_memory_for(connection)) return;  // a later poll looks again
  connection.broken = true;
  fail_all(connection, Code::kPeerDead);
}

// Reads the clock once per poll, and never while acknowledgements arrive.
int64_t Sender::poll_time_ns() noexcept {
  if (poll_time_ns_ == 0) poll_time_ns_ = now_ns();
  return poll_time_ns_;
}

void Sender::fail_all(Connection& connection, Code code) noexcept {
  connection.drop_unsent();
  copies_.forget(connection);
  const uint32_t window = connection.segment().layout().window;
  for (uint32_t slot = 0; slot < window; ++slot) {
    OutgoingWrite& write = connection.write(slot);
    if (!write.in_use) continue;
    trace_.add(Trace::Entry::Kind::kEnded, write.request, connection.priority());
    ready_.push(completion_of(write.request, {code, 0}));
    connection.finish(slot);
  }
}

void Sender::close_requested_connections() noexcept {
  const uint32_t end = table_end_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < end; ++i) {
    Connection* connection = table_[i].load(std::memory_order_acquire);
    if (!connection || !connection->close_requested.load(std::memory_order_acquire)) continue;
    if (copies_.fills_memory_for(*connection)) continue;  // the next poll tries again
    fail_all(*connection, Code::kClosed);
    if (connection->is_copying(copies_)) continue;  // the next poll tries again
    remove(*connection);
    close_requests_.fetch_sub(1, std::memory_order_relaxed);  // the next poll finds a new one
  }
}

// The polling thread's last use of the connection: delete_removed() may free it at once.
void Sender::remove(Connection& connection) noexcept {
  connection.release();
  connection.notify();
  table_[connection.id() % kMaxPeers].store(nullptr, std::memory_order_release);
}

void Sender::abandon() noexcept {
  if (std::exchange(abandoned_, true)) return;
  const uint32_t end = table_end_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < end; ++i) {
    Connection* connection = table_[i].load(std::memory_order_acquire);
    if (!connection) continue;
    connection->broken = true;
    fail_all(*connection, Code::kTransport);
    connection->release();
    connection->notify();
  }
}

bool Sender::idle() const noexcept {
  return in_flight_ == 0 && close_requests_.load(std::memory_order_acquire) == 0;
}

}  // namespace moe_p2p::provider::loopback
