#include "provider/loopback/connection.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace moe_p2p::provider::loopback {
namespace {

// Small enough that the receiver copies one fragment while the sender writes the next, large enough
// that the 64-byte header does not count; at most a quarter of the ring.
uint32_t max_fragment_bytes(uint64_t ring_bytes) noexcept {
  return static_cast<uint32_t>(std::min<uint64_t>(ring_bytes / 4, 64 * 1024));
}

}  // namespace

Connection::Connection(PeerId id, std::shared_ptr<Segment> segment, Waker waker,
                       const std::string& own_segment, const std::string& own_waker, uint64_t seed,
                       uint64_t stream)
    : id_(id),
      segment_(std::move(segment)),
      claimed_(segment_->claim(own_segment, own_waker)),
      channel_(segment_->channel(claimed_.index)),
      max_fragment_bytes_(max_fragment_bytes(segment_->layout().ring_bytes)),
      waker_(std::move(waker)),
      // The channel's number sets ranks apart that were given the same seed.
      chaos_(seed, stream ^ static_cast<uint64_t>(claimed_.index) << 32),
      writes_(segment_->layout().window),
      unsent_(segment_->layout().window) {
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
}

void Connection::finish(uint32_t slot) noexcept {
  writes_[slot].in_use = false;
  free_slots_.push_back(slot);  // capacity was reached at construction: does not allocate
  --num_in_flight_;
}

bool Connection::pump(const RegionTable& regions, LinkModel& link) noexcept {
  ++round_;
  return chaos_.on() ? pump_shuffled(regions, link) : pump_in_order(regions, link);
}

bool Connection::pump_in_order(const RegionTable& regions, LinkModel& link) noexcept {
  const uint64_t head_before = head_;
  while (!unsent_.empty()) {
    OutgoingWrite& write = writes_[unsent_[0]];
    while (!write.all_sent())
      if (!send_fragment(write, unsent_[0], regions, link)) return head_ != head_before;
    unsent_.pop();
  }
  return head_ != head_before;
}

// Any fragment of any write may be next. One time in four it is the newest write, so that short
// ones overtake everything; held writes wait for their round while the others go on.
bool Connection::pump_shuffled(const RegionTable& regions, LinkModel& link) noexcept {
  const uint64_t head_before = head_;
  for (uint32_t budget = 1 + chaos_.below(32); budget > 0 && !unsent_.empty(); --budget) {
    const size_t newest = unsent_.size() - 1;
    const size_t i = chaos_.one_in(4) ? newest : chaos_.below(unsent_.size());
    OutgoingWrite& write = writes_[unsent_[i]];
    if (round_ < write.hold_until) continue;
    if (!send_fragment(write, unsent_[i], regions, link)) break;
    if (write.all_sent()) unsent_.take(i);
  }
  return head_ != head_before;
}

// Copies the next part of the piece under way. False when the ring has no room for it.
bool Connection::send_fragment(OutgoingWrite& write, uint32_t slot, const RegionTable& regions,
                               LinkModel& link) noexcept {
  const WorkRequest& request = write.request;
  if (write.cursor == write.cursor_end && write.pieces != 0) choose_piece(write);
  const uint64_t payload_at = (head_ + kLine) & channel_.ring_mask;
  uint32_t bytes = static_cast<uint32_t>(
      std::min<uint64_t>(std::min(write.cursor_end - write.cursor, max_fragment_bytes_),
                         channel_.ring_mask + 1 - payload_at));
  if (!has_room(kLine + align_up(bytes, kLine))) return false;

  uint32_t flags = request.has_imm ? Fragment::kHasImm : 0;
  const std::byte* source = request.local + write.cursor;
  if (bytes > 0 && !regions.find_local(request.local_key, source, bytes)) {
    write.status = {base::Code::kInvalidArgument, 0};
    write.pieces = 0;
    write.cursor = write.cursor_end;
    flags = Fragment::kAbort;
    bytes = 0;
  }
  if (bytes > 0) std::memcpy(channel_.ring + payload_at, source, bytes);
  auto* fragment = reinterpret_cast<Fragment*>(channel_.ring + (head_ & channel_.ring_mask));
  *fragment = {.remote_addr = request.remote_addr,
               .remote_key = request.remote_key,
               .arrival_ns = 0,
               .write_bytes = request.bytes,
               .offset = write.cursor,
               .bytes = bytes,
               .slot = slot,
               .imm = request.imm,
               .flags = flags};
  if (link.on()) {
    fragment->arrival_ns = link.transmit(now_ns(), kLine + bytes);
    write.complete_after_ns = fragment->arrival_ns + link.latency_ns();
  }
  write.begun = true;
  write.cursor += bytes;
  publish(*fragment);
  return true;
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
  if (head_ + bytes - known_tail_ <= ring_bytes) return true;
  // acquire: pairs with the release in Receiver::publish: the receiver has read what we overwrite.
  known_tail_ = channel_.record->tail.load(std::memory_order_acquire);
  return head_ + bytes - known_tail_ <= ring_bytes;
}

void Connection::publish(const Fragment& fragment) noexcept {
  head_ += ring_bytes_of(fragment);
  // release: pairs with the acquire in Receiver::poll_channel: header and payload are written.
  channel_.record->head.store(head_, std::memory_order_release);
}

const Ack* Connection::next_ack() noexcept {
  if (ack_tail_ == known_ack_head_) {
    // acquire: pairs with the release in Receiver::publish: the payload is where it belongs.
    known_ack_head_ = channel_.record->ack_head.load(std::memory_order_acquire);
    if (ack_tail_ == known_ack_head_) return nullptr;
  }
  return &channel_.acks[ack_tail_ & channel_.window_mask];
}

}  // namespace moe_p2p::provider::loopback
