#include "provider/verbs/sender.h"

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace moe_p2p::provider::verbs {

using base::Code;
using base::Status;

namespace {

// Writes given to the NIC with one doorbell. Too small: a doorbell per few writes. Too large: the
// first completion of a long backlog is late.
constexpr uint32_t kMaxChain = 64;
// Immediates that one poll may add to the backlog.
constexpr size_t kMaxImmediates = 64;

// A slot's wr_id has its index in the lower half, and above it how often it was given up. A
// marker's wr_id has the bit kMarker, its peer and lane.
constexpr uint64_t kMarker = uint64_t{1} << 62;
constexpr uint64_t kSlotMask = 0xffffffff, kGivenUp = uint64_t{1} << 32;

bool is_full(int error) noexcept { return error == ENOMEM || error == EAGAIN || error == EBUSY; }

}  // namespace

Kick::Kick() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  MOE_P2P_CHECK(fd_ >= 0, Code::kResourceExhausted,
                "verbs: making an eventfd: ", std::strerror(errno));
}
Kick::~Kick() { close(fd_); }
void Kick::operator()() const noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
}
void Kick::clear() const noexcept {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);
}

Sender::Sender(const Nic& nic, PeerTable& peers, const Kick& kick, FirstFailure& failure)
    : nic_(nic),
      ops_(nic.context->ops),
      peers_(peers),
      kick_(kick),
      failure_(failure),
      inline_bytes_(nic.config.inline_bytes),
      slots_(nic.config.max_in_flight),
      backlog_(nic.config.max_in_flight + kMaxImmediates) {
  for (size_t i = slots_.size(); i > 0; --i) {
    Slot& slot = slots_[i - 1];
    slot.wr.wr_id = i - 1;
    slot.wr.sg_list = &slot.sge;
    slot.wr.next = reinterpret_cast<SendWr*>(free_);
    free_ = &slot;
  }
}

size_t Sender::post(std::span<const WorkRequest> requests) noexcept {
  Output output({}, backlog_);  // the next poll reports what fails at once
  size_t num = 0;
  for (; num < requests.size(); ++num) {
    const WorkRequest& request = requests[num];
    if (free_ == nullptr || num_open_ == slots_.size()) break;
    if (request.has_flag && free_->next() == nullptr) break;
    Peer* peer = peers_.find(request.peer);
    ++num_open_;
    if (peer == nullptr) {
      output.write(request.wr_id, {Code::kClosed, 0});
      continue;
    }
    Lane& lane = *peer->lanes[peer->next_lane];
    if (lane.dead) {
      output.write(request.wr_id, lane.failure);
      continue;
    }
    accept(lane, request);
    // Changes the lane after a few writes only: each change costs a doorbell.
    if (peer->lanes.size() > 1 && lane.num_unposted % 8 == 0)
      peer->next_lane = (peer->next_lane + 1) % static_cast<uint32_t>(peer->lanes.size());
  }
  post_waiting(output);
  return num;
}

void Sender::accept(Lane& lane, const WorkRequest& request) noexcept {
  Slot& slot = *free_;
  free_ = slot.next();
  slot.wr_id = request.wr_id;
  slot.has_flag = request.has_flag;
  slot.sge = {reinterpret_cast<uint64_t>(request.local), request.bytes,
              static_cast<uint32_t>(request.local_key)};
  SendWr& wr = slot.wr;
  wr.num_sge = request.bytes > 0 ? 1 : 0;
  wr.opcode = request.is_read ? kOpRead : request.has_imm ? kOpWriteImm : kOpWrite;
  wr.imm_data = htonl(request.imm);
  const bool small = request.bytes > 0 && request.bytes <= inline_bytes_ && !request.is_read;
  wr.send_flags = small && !(request.local_key & kCudaKey) ? unsigned{kSendInline} : 0;
  wr.remote_addr = request.remote_addr;
  wr.rkey = static_cast<uint32_t>(request.remote_key);
  append(lane, slot);
  if (!request.has_flag) return;
  Slot& behind = *free_;
  free_ = behind.next();
  behind.wr_id = request.wr_id;
  behind.has_flag = false;
  behind.flag = request.flag_value;
  behind.sge = {reinterpret_cast<uint64_t>(&behind.flag), sizeof behind.flag, 0};
  behind.wr.num_sge = 1;
  behind.wr.opcode = kOpWrite;
  behind.wr.send_flags = kSendInline;
  behind.wr.remote_addr = request.flag_addr;
  behind.wr.rkey = wr.rkey;
  append(lane, behind);
}

void Sender::append(Lane& lane, Slot& slot) noexcept {
  SendWr& wr = slot.wr;
  wr.next = nullptr;
  slot.lane = &lane;
  if (lane.head == nullptr) {
    lane.head = &slot;
  } else {
    lane.tail->wr.next = &wr;
  }
  lane.tail = &slot;
  if (lane.unposted == nullptr) lane.unposted = &slot;
  ++lane.num_unposted;
  queue_for_posting(lane);
}

void Sender::queue_for_posting(Lane& lane) noexcept {
  if (lane.waiting) return;
  lane.waiting = true;
  lane.next_waiting = waiting_;
  waiting_ = &lane;
}

void Sender::post_waiting(Output& output) noexcept {
  Lane* lane = std::exchange(waiting_, nullptr);
  while (lane != nullptr) {
    Lane* next = lane->next_waiting;
    lane->waiting = false;
    post_lane(*lane, output);
    lane = next;
  }
}

void Sender::post_lane(Lane& lane, Output& output) noexcept {
  while (lane.unposted != nullptr && !lane.broken) {
    const int error = post_chain(lane);
    if (error == 0) continue;
    if (is_full(error)) {
      queue_for_posting(lane);  // tries again at the next poll
      return;
    }
    const Status status{Code::kTransport, -error};
    keep_failure(*lane.unposted, status, 0);
    end_lane(lane, status, output);
  }
}

// Counts what the driver takes, also when it refuses the rest of a chain.
int Sender::post_chain(Lane& lane) noexcept {
  Slot* const first = lane.unposted;
  Slot* last = lane.tail;
  uint32_t num = lane.num_unposted;
  if (num > kMaxChain) {
    last = first;
    for (num = 1; num < kMaxChain; ++num) last = last->next();
  }
  last->wr.send_flags |= kSendSignaled;
  Slot* const rest = last->next();
  last->wr.next = nullptr;
  SendWr* bad = nullptr;
  const int error = ops_.post_send(lane.qp, &first->wr, &bad);
  last->wr.next = reinterpret_cast<SendWr*>(rest);
  Slot* next = rest;
  if (error != 0) {
    num = 0;
    for (next = first; &next->wr != bad; next = next->next()) ++num;
  }
  lane.unposted = next;
  lane.num_unposted -= num;
  lane.num_posted += num;
  return error < 0 ? errno : error;
}

void Sender::finish_head(Lane& lane, Status status, Output& output) noexcept {
  Slot& slot = *lane.head;
  lane.head = slot.next();
  if (lane.unposted == &slot) {
    lane.unposted = lane.head;
    --lane.num_unposted;
  }
  if (!slot.has_flag) output.write(slot.wr_id, status);
  slot.lane = nullptr;
  slot.wr.next = reinterpret_cast<SendWr*>(free_);
  free_ = &slot;
}

void Sender::fail_all(Lane& lane, Status status, Output& output) noexcept {
  lane.dead = true;
  lane.failure = status;
  lane.refused_flag = false;
  while (lane.head != nullptr) finish_head(lane, status, output);
  lane.num_posted = 0;
  must_look_ = true;  // the peer may be done
}

void Sender::complete(const Wc& wc, Output& output) noexcept {
  if (wc.wr_id & kMarker) return marker_came(wc, output);
  Slot& slot = slots_[wc.wr_id & kSlotMask];
  if (slot.wr.wr_id != wc.wr_id || slot.lane == nullptr) return;  // given up
  Lane& lane = *slot.lane;
  if (wc.status != kWcSuccess) {
    if (!lane.failed) begin_break(lane, wc, output);
    return;  // flushed like all later writes: the marker ends them
  }
  finish_before(lane, &slot, output);
  finish_head(lane, {}, output);
  --lane.num_posted;
}

void Sender::finish_before(Lane& lane, const Slot* slot, Output& output) noexcept {
  for (; lane.head != slot; --lane.num_posted) finish_head(lane, {}, output);
}

// The first failed completion of a lane: all earlier writes were carried out.
void Sender::begin_break(Lane& lane, const Wc& wc, Output& output) noexcept {
  Slot& slot = slots_[wc.wr_id & kSlotMask];
  finish_before(lane, &slot, output);
  lane.failed = true;
  // acquire: pairs with the release in Control::end_peer, which breaks the queue pair afterwards.
  const Status status = status_of(wc.status, lane.peer->end.load(std::memory_order_acquire));
  if (wc.status != kWcFlushed) keep_failure(slot, status, wc.vendor_err);
  if (refused_only(status.code)) {
    lane.refused_flag = slot.has_flag;
    finish_head(lane, status, output);
    --lane.num_posted;
  }
  if (!lane.ending) end_lane(lane, status, output);
}

// Posts the marker: a write of no bytes, for which no key is checked. In a queue pair in error it
// is flushed after the others. When the driver refuses it, the lane's deadline ends the lane.
void Sender::end_lane(Lane& lane, Status failure, Output& output) noexcept {
  lane.broken = true;
  lane.failure = failure;
  if (lane.num_posted == 0) return ended(lane, output);
  lane.ending = true;
  SendWr marker{};
  marker.wr_id = kMarker | uint64_t{lane.peer->id} << 8 | lane.index;
  marker.opcode = kOpWrite;
  marker.send_flags = kSendSignaled;
  SendWr* bad = nullptr;
  static_cast<void>(ops_.post_send(lane.qp, &marker, &bad));
  lane.repair.store(Lane::Repair::kEnding, std::memory_order_release);  // Control::look_at_lane
  kick_();
}

void Sender::marker_came(const Wc& wc, Output& output) noexcept {
  Peer* peer = peers_.find(static_cast<PeerId>(wc.wr_id >> 8));
  Lane* lane = peer ? peer->lanes[wc.wr_id & 0xff].get() : nullptr;
  if (!lane || !lane->ending) return;
  auto expected = Lane::Repair::kEnding;
  // acq_rel: pairs with Control::look_at_lane, which may have given up just now.
  if (!lane->repair.compare_exchange_strong(expected, Lane::Repair::kNone,
                                            std::memory_order_acq_rel))
    return;
  lane->ending = false;
  // The queue pair never broke: all its writes were carried out.
  if (wc.status == kWcSuccess) finish_before(*lane, lane->unposted, output);
  ended(*lane, output);
}

// Called when the NIC has no writes of this lane any more.
void Sender::ended(Lane& lane, Output& output) noexcept {
  const Code end = lane.peer->end.load(std::memory_order_acquire);  // as in begin_break
  if (end != Code::kOk || !refused_only(lane.failure.code)) {
    fail_all(lane, end == Code::kOk ? lane.failure : Status{end, lane.failure.detail}, output);
    return;
  }
  if (std::exchange(lane.refused_flag, false)) finish_head(lane, lane.failure, output);
  lane.num_posted = lane.num_unposted = 0;
  for (Slot* slot = lane.head; slot != nullptr; slot = slot->next()) {
    slot->wr.send_flags &= ~kSendSignaled;
    ++lane.num_unposted;
  }
  lane.unposted = lane.head;
  lane.repair.store(Lane::Repair::kWanted, std::memory_order_release);  // Control::look_at_lane
  kick_();
}

// Called when the queue pair is destroyed. Later completions of these slots are ignored.
void Sender::give_up(Lane& lane, Output& output) noexcept {
  lane.ending = false;
  const Status status = {lane.peer->end.load(std::memory_order_acquire), lane.failure.detail};
  if (lane.head) keep_failure(*lane.head, lane.failure, 0);
  for (Slot* slot = lane.head; slot != lane.unposted; slot = slot->next())
    slot->wr.wr_id += kGivenUp;
  fail_all(lane, status.code == Code::kOk ? lane.failure : status, output);
}

void Sender::look_at_peers(Output& output) noexcept {
  must_look_ = false;
  for (auto& entry : peers_.entries) {
    Peer* peer = entry.load(std::memory_order_acquire);
    if (peer == nullptr || !look_at(*peer, output)) continue;
    entry.store(nullptr, std::memory_order_release);
    peer->released.store(true, std::memory_order_release);  // pairs with Control::look
    kick_();
  }
}

// Returns true when the peer can be dropped.
bool Sender::look_at(Peer& peer, Output& output) noexcept {
  // acquire: pairs with the release of the control side.
  const Code end = peer.end.load(std::memory_order_acquire);
  bool all_dead = true;
  for (const auto& owned : peer.lanes) {
    Lane& lane = *owned;
    // acquire: pairs with the release of the control side.
    const auto repair = lane.repair.load(std::memory_order_acquire);
    if (lane.ending) {
      if (repair == Lane::Repair::kGivenUp) give_up(lane, output);
    } else if (end != Code::kOk && !lane.dead) {
      end_lane(lane, {end, 0}, output);
    } else if (repair == Lane::Repair::kRepaired) {
      lane.repair.store(Lane::Repair::kNone, std::memory_order_relaxed);
      lane.broken = lane.failed = false;
      queue_for_posting(lane);
    }
    all_dead = all_dead && lane.dead;
  }
  return all_dead && peer.leaving.load(std::memory_order_acquire);
}

void Sender::keep_failure(const Slot& slot, Status status, uint32_t vendor_error) noexcept {
  failure_.keep({.status = status,
                 .vendor_error = vendor_error,
                 .peer = slot.lane->peer->id,
                 .remote_addr = slot.wr.remote_addr,
                 .remote_key = slot.wr.rkey,
                 .bytes = slot.sge.length,
                 .is_read = slot.wr.opcode == kOpRead});
}

}  // namespace moe_p2p::provider::verbs
