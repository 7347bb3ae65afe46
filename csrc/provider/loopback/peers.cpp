#include "provider/loopback/peers.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <span>

namespace moe_p2p::provider::loopback {

namespace {

// Small enough that the receiver copies one fragment while the sender writes the next, large enough
// that the cost of the 64-byte header is negligible; at most a quarter of the ring.
uint32_t max_fragment_bytes(uint64_t ring_bytes) noexcept {
  return static_cast<uint32_t>(std::min<uint64_t>(ring_bytes / 4, 64 * 1024));
}

// Traffic of lower classes keeps at most so much of a modelled link busy at a time. Too small: the
// link stands idle between two polls, of which one that launches copies takes ten microseconds. Too
// large: urgent writes wait for it; real NICs take turns between their queue pairs after some
// packets.
constexpr int64_t kLowerBacklogNs = 5'000;
// And a GPU copies at most so much for them at a time, with the fragment that passes it. Too small:
// each of the driver's calls carries little. Too large: where a GPU copies more slowly than the
// link is modelled, what waits in its stream grows without end, and urgent copies, waits for the
// device and the next launches wait behind it.
constexpr uint64_t kLowerCopyBytes = 192 << 10;
// Of these, copies of so much are for the copy engines. Too small: a call of the driver for each.
// Too large: kernels that want all their blocks at once wait until multiprocessors have copied.
constexpr uint64_t kLowerByEngine = 128 << 10;
// While urgent writes are under way no copy begins for them, for so long. Too small: the polling
// thread asks the driver for copies, some microseconds each, when it should look for what comes.
// Too large: lower classes stand still beside writes without end.
constexpr int64_t kLowerPatienceNs = 50'000;

}  // namespace

Connection::Connection(PeerId id, std::shared_ptr<Segment> segment, Waker waker,
                       const std::string& own_segment, const std::string& own_waker,
                       const Config& config, uint64_t stream, int priority, uint64_t tag,
                       InFlight& in_flight)
    : id_(id),
      segment_(std::move(segment)),
      claimed_(segment_->claim(own_segment, own_waker, tag)),
      channel_(segment_->channel(claimed_.index)),
      max_fragment_bytes_(max_fragment_bytes(segment_->layout().ring_bytes)),
      priority_(priority),
      class_in_flight_(in_flight[static_cast<size_t>(priority)]),
      waker_(std::move(waker)),
      // The channel's number separates ranks with the same seed.
      chaos_(config.seed, stream ^ static_cast<uint64_t>(claimed_.index) << 32),
      writes_(segment_->layout().window),
      unsent_(segment_->layout().window),
      reads_(segment_->layout().window) {
  for (uint32_t slot = segment_->layout().window; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

void Connection::enqueue(const WorkRequest& request) noexcept {
  const uint32_t slot = free_slots_.back();
  free_slots_.pop_back();
  OutgoingWrite& write = writes_[slot];
  write = OutgoingWrite{};
  write.request = request;
  write.cursor_end = request.bytes;
  write.in_use = true;
  if (chaos_.on()) {
    write.hold_until = round_ + chaos_.hold_polls();
    if (request.bytes > 0) {
      const uint64_t wanted = std::min<uint64_t>(chaos_.num_pieces(), request.bytes);
      write.piece_bytes = static_cast<uint32_t>((request.bytes + wanted - 1) / wanted);
      const uint64_t num = (uint64_t{request.bytes} + write.piece_bytes - 1) / write.piece_bytes;
      write.pieces = ~uint64_t{0} >> (64 - num);
      write.cursor_end = 0;
    }
  }
  unsent_.push(slot);
  ++num_in_flight_;
  ++class_in_flight_;
}

void Connection::finish(uint32_t slot) noexcept {
  writes_[slot].in_use = false;
  free_slots_.push_back(slot);  // within its capacity: does not allocate
  --num_in_flight_;
  --class_in_flight_;
}

bool Connection::pump(const SendContext& context) noexcept {
  ++round_;
  const uint64_t head_before = head_;
  if (!publish_staged(context.copies)) return false;
  if (chaos_.on()) {
    pump_shuffled(context);
  } else {
    pump_in_order(context);
  }
  return head_ != head_before;
}

void Connection::pump_in_order(const SendContext& context) noexcept {
  while (!unsent_.empty() && !gives_way(context)) {
    const uint32_t slot = unsent_[0];
    const bool sent = send_part(slot, context);
    if (writes_[slot].nothing_to_send()) unsent_.pop();  // also when its last fragment is staged
    if (!sent) return;
  }
}

// Sends any piece of any write next. One time in four it takes the newest write, so that short
// writes overtake everything; held writes wait for their round while the others continue.
void Connection::pump_shuffled(const SendContext& context) noexcept {
  for (uint32_t budget = 1 + chaos_.below(32); budget > 0 && !unsent_.empty(); --budget) {
    const size_t newest = unsent_.size() - 1;
    const size_t i = chaos_.one_in(4) ? newest : chaos_.below(unsent_.size());
    const uint32_t slot = unsent_[i];
    if (round_ < writes_[slot].hold_until) continue;
    const bool sent = send_part(slot, context);
    if (writes_[slot].nothing_to_send()) unsent_.take(i);  // also when its last fragment is staged
    if (!sent) return;
  }
}

// Sends the next part of the current piece. False when it has to wait for room.
bool Connection::send_part(uint32_t slot, const SendContext& context) noexcept {
  if (staged_.under_way) return false;
  OutgoingWrite& write = writes_[slot];
  if (write.abort_flags != 0) return send_abort(slot);
  if (write.cursor == write.cursor_end && write.pieces != 0) choose_piece(write);
  if (write.request.bytes == 0) return send_fragment(slot, context);
  const auto kind = context.regions.find_local(
      write.request.local_key, write.request.local + write.cursor, write.cursor_end - write.cursor);
  if (!kind) {
    abort(write, Fragment::kAbort, {base::Code::kInvalidArgument, 0});
    return send_abort(slot);
  }
  if (!write.request.is_read && is_in_place(write.request, *kind, context))
    return announce(slot, context);
  if (*kind == MemoryKind::kCuda) return start_copy(slot, context);
  return write.request.is_read ? send_read(slot, context) : send_fragment(slot, context);
}

bool Connection::send_read(uint32_t slot, const SendContext& context) noexcept {
  OutgoingWrite& read = writes_[slot];
  const uint32_t bytes = next_bytes(read);
  if (!has_room(kLine + align_up(bytes, kLine))) return false;
  read.reading = true;
  read.read_in_place = false;
  read.read_bytes = bytes;
  read.read_at = head_;
  reads_.push(slot);
  publish(begin_fragment(slot, bytes, Fragment::kRead, context));
  return true;
}

bool Connection::land(uint32_t slot, base::Code code, const SendContext& context) noexcept {
  OutgoingWrite& read = writes_[slot];
  const WorkRequest& request = read.request;
  std::byte* const to = request.local + (read.cursor - read.read_bytes);
  const std::byte* const from = channel_.ring + ((read.read_at + kLine) & channel_.ring_mask);
  base::Status status{code, 0};
  if (read.read_in_place) {
    read.reading = false;
    read.status = status;
    return true;
  }
  if (landing_) {
    const Copies::State state = context.copies.state_of(landing_ticket_);
    if (state == Copies::State::kUnderWay) return false;
    if (state == Copies::State::kFailed) status = context.copies.failure();
    landing_ = false;
  } else if (status.ok()) {
    const auto kind = context.regions.find_local(request.local_key, to, read.read_bytes);
    if (kind == MemoryKind::kCuda) {
      if (context.copies.full()) return false;
      const auto started = context.copies.start_by_ring(to, from, read.read_bytes);
      landing_ = started.status.ok();
      landing_ticket_ = started.ticket;
      if (landing_) return land(slot, code, context);
      status = started.status;
    } else if (kind) {
      std::memcpy(to, from, read.read_bytes);
    } else {
      status = {base::Code::kInvalidArgument, 0};
    }
  }
  reads_.pop();  // acknowledgements come in the order of the ring
  read.reading = false;
  read.status = status;
  return true;
}

bool Connection::read_goes_on(uint32_t slot) noexcept {
  if (!writes_[slot].status.ok() || writes_[slot].all_sent()) return false;
  unsent_.push(slot);
  return true;
}

bool Connection::send_fragment(uint32_t slot, const SendContext& context) noexcept {
  const OutgoingWrite& write = writes_[slot];
  const uint32_t bytes = next_bytes(write);
  if (!has_room(kLine + align_up(bytes, kLine))) return false;
  if (bytes > 0) std::memcpy(next_payload(), write.request.local + write.cursor, bytes);
  publish(begin_fragment(slot, bytes, 0, context));
  return true;
}

// Bytes of the current piece in the next fragment: the payload does not wrap.
uint32_t Connection::next_bytes(const OutgoingWrite& write) noexcept {
  const uint64_t to_end = channel_.ring_mask + 1 - ((head_ + kLine) & channel_.ring_mask);
  return static_cast<uint32_t>(
      std::min<uint64_t>(std::min(write.cursor_end - write.cursor, max_fragment_bytes_), to_end));
}

// send_fragment() for GPU memory: starts the copy of the payload into the ring.
bool Connection::stage(uint32_t slot, const SendContext& context) noexcept {
  OutgoingWrite& write = writes_[slot];
  const uint32_t bytes = next_bytes(write);
  if (!has_room(kLine + align_up(bytes, kLine)) || context.copies.full()) return false;
  const std::byte* const from = write.request.local + write.cursor;
  const Fragment fragment = begin_fragment(slot, bytes, 0, context);
  const auto started = context.copies.start_by_ring(next_payload(), from, bytes);
  if (!started.status.ok()) {
    abort(write, Fragment::kAbort, started.status);
    return send_abort(slot);
  }
  staged_ = {.fragment = fragment, .ticket = started.ticket, .under_way = true};
  return publish_staged(context.copies);
}

// False while the copy runs.
bool Connection::publish_staged(Copies& copies) noexcept {
  if (!staged_.under_way) return true;
  const Copies::State state = copies.state_of(staged_.ticket);
  if (state == Copies::State::kUnderWay) return false;
  staged_.under_way = false;
  if (staged_.dropped) return true;
  if (state == Copies::State::kDone) {
    publish(staged_.fragment);
  } else {
    give_up(staged_.fragment.slot, copies.failure());
  }
  return true;
}

bool Connection::send_by_ring(uint32_t slot, const SendContext& context) noexcept {
  return writes_[slot].request.is_read ? send_read(slot, context) : stage(slot, context);
}

// The payload takes no room in the ring. Windows that are kept may be host memory; what is read
// from their owner goes by the ring.
bool Connection::start_copy(uint32_t slot, const SendContext& context) noexcept {
  OutgoingWrite& write = writes_[slot];
  const WorkRequest& request = write.request;
  const RegionTable::Window window =
      context.regions.find_window(request.remote_key, request.remote_addr, request.bytes);
  if (!window.data || (request.is_read && !window.lent)) return send_by_ring(slot, context);
  if (copies_later(context)) return false;
  const uint32_t bytes = next_bytes_to_copy(write, context);
  const bool by_engine = is_lower(context) && bytes >= kLowerByEngine;
  const platform::LentBytes lent{window.lent ? bytes : 0, by_engine};
  if (context.copies.full(lent)) return false;
  std::byte *to = window.data + write.cursor, *from = request.local + write.cursor;
  // The receiver refuses what comes through the ring.
  if (window.lent && !is_lent(request.remote_key, lent, context.copies))
    return send_by_ring(slot, context);
  uint32_t flags = Fragment::kInPlace;
  if (request.is_read) {
    std::swap(to, from);
    flags |= Fragment::kRead;
    write.reading = write.read_in_place = true;
  }
  const Fragment fragment = begin_fragment(slot, bytes, flags, context);
  base::Status status{base::Code::kInvalidArgument, 0};
  if (!window.lent)
    status = context.copies.start(*this, fragment, to, from);
  else if (from + bytes <= to || to + bytes <= from)
    status = context.copies.start_lent(*this, fragment, to, from, lent);
  else
    context.copies.withdraw(lent);  // no order of copying is right for all bytes
  if (status.ok()) return true;
  abort(write, Fragment::kAbort, status);
  return send_abort(slot);
}

// Whether the owner still lends the memory; a copy that follows is known to it then.
bool Connection::is_lent(uint64_t remote_key, const platform::LentBytes& lent,
                         Copies& copies) noexcept {
  copies.announce(lent);
  // seq_cst: pairs with RegionTable::remove() at the owner.
  const auto& word = RegionTable::lent_word(segment_->header(), remote_key);
  if (word.load(std::memory_order_seq_cst) == remote_key) return true;
  copies.withdraw(lent);
  return false;
}

// Whether the timed NIC has nothing to carry: the payload is there, or nobody will look at it.
bool Connection::is_in_place(const WorkRequest& request, MemoryKind kind,
                             const SendContext& context) const noexcept {
  return (context.in_place && context.regions.has_kept_window(request.remote_key)) ||
         (context.hollow && kind == MemoryKind::kCuda);
}

// Sends what a write in place needs: its time on the link, and the header.
bool Connection::announce(uint32_t slot, const SendContext& context) noexcept {
  if (!has_room(kLine)) return false;
  const uint32_t bytes = next_bytes_in_place(writes_[slot], context);
  publish(begin_fragment(slot, bytes, Fragment::kInPlace, context));
  return true;
}

// More urgent writes must not wait for all that lower classes have to send.
bool Connection::gives_way(const SendContext& context) const noexcept {
  return is_lower(context) && (context.copies.bytes_under_way() >= kLowerCopyBytes ||
                               context.link.backlog_ns(context.time.now_ns()) > kLowerBacklogNs);
}

// Nor for the driver.
bool Connection::copies_later(const SendContext& context) const noexcept {
  const auto more_urgent = std::span(context.in_flight).first(static_cast<size_t>(priority_));
  return is_lower(context) && std::ranges::any_of(more_urgent, std::identity{}) &&
         context.time.now_ns() - last_sent_ns_ < kLowerPatienceNs;
}

// What takes no room in the ring goes at once, unless others wait for the link meanwhile.
uint32_t Connection::next_bytes_in_place(const OutgoingWrite& write,
                                         const SendContext& context) const noexcept {
  const uint32_t bytes = write.cursor_end - write.cursor;
  return is_lower(context) ? std::min(bytes, max_fragment_bytes_) : bytes;
}

// Of a copy, which takes a call of the driver: as much as leaves within the time that a lower class
// may keep the link busy.
uint32_t Connection::next_bytes_to_copy(const OutgoingWrite& write,
                                        const SendContext& context) const noexcept {
  const uint32_t bytes = write.cursor_end - write.cursor;
  if (!is_lower(context)) return bytes;
  const uint64_t most = std::min(kLowerCopyBytes, context.link.bytes_in(kLowerBacklogNs));
  return static_cast<uint32_t>(std::min<uint64_t>(
      bytes, std::max<uint64_t>(most / max_fragment_bytes_, 1) * max_fragment_bytes_));
}

bool Connection::publish_copied(const Fragment& fragment) noexcept {
  if (staged_.under_way || !has_room(kLine)) return false;
  publish(fragment);
  return true;
}

bool Connection::send_abort(uint32_t slot) noexcept {
  if (!has_room(kLine)) return false;
  OutgoingWrite& write = writes_[slot];
  publish({.remote_addr = write.request.remote_addr,
           .remote_key = write.request.remote_key,
           .arrival_ns = 0,
           .write_bytes = write.request.bytes,
           .offset = 0,
           .bytes = 0,
           .slot = slot,
           .imm = 0,
           .flags = write.abort_flags,
           .flag_addr = 0,
           .flag_value = 0});
  write.begun = true;
  return true;
}

// Copies::look_at drops fragments that wait.
void Connection::abort(OutgoingWrite& write, uint32_t flags, base::Status status) noexcept {
  write.abort_flags = flags;
  write.status = status;
  write.reading = false;
  write.pieces = 0;
  write.cursor_end = write.cursor;
  write.begun = false;
}

void Connection::give_up(uint32_t slot, base::Status status) noexcept {
  OutgoingWrite& write = writes_[slot];
  if (write.nothing_to_send()) unsent_.push(slot);
  abort(write, Fragment::kAbort, status);
}

// Makes the header of the next `bytes` of the current piece, which count as sent from here on.
Fragment Connection::begin_fragment(uint32_t slot, uint32_t bytes, uint32_t flags,
                                    const SendContext& context) noexcept {
  OutgoingWrite& write = writes_[slot];
  Fragment fragment{.remote_addr = write.request.remote_addr,
                    .remote_key = write.request.remote_key,
                    .arrival_ns = 0,
                    .write_bytes = write.request.bytes,
                    .offset = write.cursor,
                    .bytes = bytes,
                    .slot = slot,
                    .imm = write.request.imm,
                    .flags = flags | (write.request.has_imm ? Fragment::kHasImm : 0) |
                             (write.request.has_flag ? Fragment::kHasFlag : 0),
                    .flag_addr = write.request.flag_addr,
                    .flag_value = write.request.flag_value};
  if (LinkModel& link = context.link; link.on()) {
    last_sent_ns_ = context.time.now_ns();
    fragment.arrival_ns = link.transmit(last_sent_ns_, kLine + bytes, !write.begun);
    write.complete_after_ns = fragment.arrival_ns + link.latency_ns();
  }
  write.begun = true;
  write.cursor += bytes;
  return fragment;
}

void Connection::choose_piece(OutgoingWrite& write) noexcept {
  uint64_t left = write.pieces;
  for (uint32_t skip = chaos_.below(std::popcount(left)); skip > 0; --skip) left &= left - 1;
  const auto piece = static_cast<uint32_t>(std::countr_zero(left));
  write.pieces &= ~(uint64_t{1} << piece);
  write.cursor = piece * write.piece_bytes;
  write.cursor_end = static_cast<uint32_t>(
      std::min<uint64_t>(uint64_t{write.cursor} + write.piece_bytes, write.request.bytes));
}

bool Connection::has_room(uint64_t bytes) noexcept {
  const uint64_t ring_bytes = channel_.ring_mask + 1;
  // Reads that have not landed keep their part of the ring.
  const uint64_t read_at = reads_.empty() ? ~uint64_t{0} : writes_[reads_[0]].read_at;
  if (head_ + bytes - std::min(known_tail_, read_at) <= ring_bytes) return true;
  // acquire: pairs with the release in Receiver::publish: the receiver has read what we overwrite.
  known_tail_ = channel_.record->tail.load(std::memory_order_acquire);
  return head_ + bytes - std::min(known_tail_, read_at) <= ring_bytes;
}

void Connection::publish(const Fragment& fragment) noexcept {
  *reinterpret_cast<Fragment*>(channel_.ring + (head_ & channel_.ring_mask)) = fragment;
  head_ += ring_bytes_of(fragment);
  // release: pairs with the acquire in Receiver::poll_channel: header and payload are written.
  channel_.record->head.store(head_, std::memory_order_release);
}

const Ack* Connection::next_ack() noexcept {
  if (ack_tail_ == known_ack_head_) {
    // acquire: pairs with the release in Receiver::publish: the payload is in place.
    known_ack_head_ = channel_.record->ack_head.load(std::memory_order_acquire);
    if (ack_tail_ == known_ack_head_) return nullptr;
  }
  return &channel_.acks[ack_tail_ & channel_.window_mask];
}

}  // namespace moe_p2p::provider::loopback
