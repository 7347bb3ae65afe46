#include "provider/loopback/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "provider/loopback/link_model.h"

namespace moe_p2p::provider::loopback {

using base::Code;

namespace {

// Immediates the adversary may hold back at a time. Too small: it cannot report an immediate long
// after its neighbours.
constexpr size_t kMaxHeld = 256;
// A killed sender holds its channel until this check finds it: one channel per interval.
constexpr uint32_t kLookIntervalPolls = 256;
constexpr int64_t kLookIntervalNs = 50'000'000;
// In place of `changes` of the segment: the next poll looks at all channels.
constexpr uint64_t kLookAgain = ~uint64_t{0};

}  // namespace

Receiver::Receiver(const Config& config, int nic, Segment& segment, RegionTable& regions,
                   Copies& copies, const TimeSource& time)
    : early_imm_(config.early_imm),
      early_flag_(config.early_flag),
      ordered_(config.ordered),
      in_place_(config.in_place),
      segment_(segment),
      regions_(regions),
      copies_(copies),
      time_(time),
      chaos_(config.seed, static_cast<uint64_t>(nic) << 8 | 4),
      incoming_(config.num_channels),
      held_(kMaxHeld) {
  active_.reserve(config.num_channels);
  flags_.reserve(kMaxHeld);
  late_.reserve(kMaxHeld);
  for (uint32_t i = 0; i < config.num_channels; ++i) incoming_[i].channel = segment.channel(i);
}

void Receiver::poll(Output& output) noexcept {
  // acquire: pairs with Segment::claim and Segment::release.
  if (segment_.header().changes.load(std::memory_order_acquire) != seen_changes_) rescan();
  left_over_ = false;
  if (is_severing() && held_.empty() && late_.empty() && flags_.empty())
    // release: pairs with has_severed(). Of a poll before, whose immediates the engine has.
    severed_until_.store(seen_changes_, std::memory_order_release);
  if (chaos_.on()) {
    show_held(output);
    store_held();
  }
  const auto num = static_cast<uint32_t>(active_.size());
  if (num == 0) return;
  first_ = chaos_.on() ? chaos_.below(num) : (first_ + 1) % num;
  for (uint32_t i = 0; i < num; ++i) poll_channel(incoming_[active_[(first_ + i) % num]], output);
  if (polls_until_look_-- == 0) find_dead_senders();
}

// --- channels come and go ---

void Receiver::rescan() noexcept {
  // Loaded before the records: the next poll sees a change in between again.
  seen_changes_ = segment_.header().changes.load(std::memory_order_acquire);
  active_.clear();
  for (uint32_t i = 0; i < incoming_.size(); ++i) {
    Incoming& incoming = incoming_[i];
    // acquire: pairs with Segment::claim (the claim is written) and Segment::release.
    auto& state = incoming.channel.record->state;
    uint64_t word = state.load(std::memory_order_acquire);
    if (loopback::state_of(word) == ChannelState::kOpen &&
        is_severed(incoming.channel.claim->tag)) {
      // Fails where the sender has released it: `word` is what it is now.
      const uint64_t severed = channel_word(generation_of(word), ChannelState::kSevered);
      if (state.compare_exchange_strong(word, severed, std::memory_order_acq_rel)) word = severed;
    }
    if (loopback::state_of(word) == ChannelState::kClosing) {
      if (incoming.copying && state_of(incoming) == Copies::State::kUnderWay)
        seen_changes_ = kLookAgain;  // a GPU still reads the ring
      else
        free_channel(incoming, word);
    }
    if (loopback::state_of(word) == ChannelState::kSevered) {
      incoming.word = word;
      if (incoming.copying && state_of(incoming) == Copies::State::kUnderWay)
        seen_changes_ = kLookAgain;
      active_.push_back(i);  // for find_dead_senders()
      continue;
    }
    if (loopback::state_of(word) != ChannelState::kOpen) continue;
    if (incoming.word != word) attach(incoming, word);
    active_.push_back(i);  // capacity reserved
  }
}

void Receiver::attach(Incoming& incoming, uint64_t word) noexcept {
  incoming.word = word;
  incoming.tail = incoming.ack_head = 0;
  incoming.copying = false;
  incoming.dead_since_ns = 0;
  incoming.waker = Waker(incoming.channel.claim->sender_waker);
}

// The sender has released the channel, so all of it is ours. Fragments in it are lost; the sender
// has reported their writes as failed.
void Receiver::free_channel(Incoming& incoming, uint64_t word) noexcept {
  const Channel& channel = incoming.channel;
  std::memset(channel.partials, 0, (channel.window_mask + 1) * sizeof(Partial));
  channel.record->head.store(0, std::memory_order_relaxed);  // published by the store of state
  channel.record->tail.store(0, std::memory_order_relaxed);
  channel.record->ack_head.store(0, std::memory_order_relaxed);
  incoming.word = 0;
  incoming.waker = Waker();
  // release: pairs with the acquire in Segment::claim.
  channel.record->state.store(channel_word(generation_of(word) + 1, ChannelState::kFree),
                              std::memory_order_release);
}

// Takes the channel back; a sender that is alive after all notices in Connection::peer_left().
void Receiver::begin_close(Incoming& incoming) noexcept {
  segment_.release({incoming.channel.index, incoming.word});
}

void Receiver::find_dead_senders() noexcept {
  polls_until_look_ = kLookIntervalPolls;
  const int64_t now = now_ns();
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookIntervalNs;
  Incoming& incoming = incoming_[active_[next_look_++ % active_.size()]];
  const Claim& claim = *incoming.channel.claim;
  if (platform::SharedMemory::owner_alive(claim.sender_segment)) return;
  if (incoming.dead_since_ns == 0) incoming.dead_since_ns = now;
  if (claim.sender.has_ended() || now - incoming.dead_since_ns > kEndOfGpuWorkNs)
    begin_close(incoming);
}

// --- severed ---

// A channel that is claimed later is refused by rescan(): the claim is a change too.
uint64_t Receiver::sever(uint64_t tag) {
  const std::lock_guard lock(severing_);
  for (const auto& known : all_severed_)
    if (known->tag == tag) return known->ticket;
  const Severed* const newest = severed_.load(std::memory_order_relaxed);
  Severed& added = *all_severed_.emplace_back(new Severed{tag, newest, 0});
  severed_.store(&added, std::memory_order_release);
  // release: pairs with rescan(), which then sees the tag.
  added.ticket = segment_.header().changes.fetch_add(1, std::memory_order_release) + 1;
  return added.ticket;
}

bool Receiver::is_severed(uint64_t tag) const noexcept {
  if (tag == 0) return false;
  const Severed* each = severed_.load(std::memory_order_acquire);
  while (each != nullptr && each->tag != tag) each = each->next;
  return each != nullptr;
}

// Whether somebody may wait for has_severed().
bool Receiver::is_severing() const noexcept {
  return severed_.load(std::memory_order_relaxed) != nullptr && seen_changes_ != kLookAgain &&
         severed_until_.load(std::memory_order_relaxed) != seen_changes_;
}

// --- fragments ---

void Receiver::poll_channel(Incoming& incoming, Output& output) noexcept {
  if (loopback::state_of(incoming.word) == ChannelState::kSevered) return;
  const Channel& channel = incoming.channel;
  // acquire: pairs with the release in Connection::publish: header and payload are there.
  const uint64_t head = channel.record->head.load(std::memory_order_acquire);
  if (head == incoming.tail) return;
  uint64_t budget = ~uint64_t{0};
  if (chaos_.on()) budget = chaos_.one_in(3) ? 0 : 1 + chaos_.below(16);
  const uint64_t tail_before = incoming.tail;
  while (incoming.tail != head) {
    left_over_ = true;  // unless this turn handles it
    if (budget-- == 0 || !has_room(output)) break;
    const auto* at = channel.ring + (incoming.tail & channel.ring_mask);
    const Fragment fragment = *reinterpret_cast<const Fragment*>(at);
    if (fragment.arrival_ns != 0 && time_.now_ns() < fragment.arrival_ns) break;
    if (!well_formed(incoming, fragment)) {
      begin_close(incoming);
      break;
    }
    if (early_flag_ && fragment.flags & Fragment::kHasFlag)  // a deliberate fault
      store({incoming.channel.index, fragment.remote_key, fragment.flag_addr, fragment.flag_value});
    if (early_imm_ && show_early(incoming, fragment, output)) break;
    std::byte* payload = channel.ring + ((incoming.tail + kLine) & channel.ring_mask);
    if (!copy(incoming, fragment, payload)) break;
    take(incoming, fragment, payload, output);
    incoming.tail += ring_bytes_of(fragment);
    publish(incoming);
    left_over_ = false;
  }
  if (incoming.tail != tail_before) incoming.waker.notify();
}

// Another process wrote the fragment. Whatever it contains, we must not use memory outside its
// channel.
bool Receiver::well_formed(const Incoming& incoming, const Fragment& fragment) const noexcept {
  const uint64_t payload_at = (incoming.tail + kLine) & incoming.channel.ring_mask;
  return fragment.slot <= incoming.channel.window_mask &&
         payload_bytes(fragment) <= incoming.channel.ring_mask + 1 - payload_at &&
         uint64_t{fragment.offset} + fragment.bytes <= fragment.write_bytes;
}

Copies::State Receiver::state_of(const Incoming& incoming) noexcept {
  if (!incoming.refused.ok()) return Copies::State::kFailed;
  return copies_.state_of(incoming.ticket);
}

// False until a GPU has copied the payload to its memory, or out of it for a read.
bool Receiver::copy(Incoming& incoming, const Fragment& fragment, std::byte* payload) noexcept {
  if (incoming.copying) return state_of(incoming) != Copies::State::kUnderWay;
  if (payload_bytes(fragment) == 0) return true;
  const auto target =
      regions_.find_remote(fragment.remote_key, fragment.remote_addr, fragment.write_bytes);
  if (!target.data || target.kind != MemoryKind::kCuda) return true;
  if (copies_.full()) return false;
  std::byte* const memory = target.data + fragment.offset;
  const bool read = fragment.flags & Fragment::kRead;
  const auto started =
      copies_.start_by_ring(read ? payload : memory, read ? memory : payload, fragment.bytes);
  incoming.copying = true;
  incoming.ticket = started.ticket;
  incoming.refused = started.status;
  return state_of(incoming) != Copies::State::kUnderWay;
}

void Receiver::take(Incoming& incoming, const Fragment& fragment, std::byte* payload,
                    Output& output) noexcept {
  Partial& partial = incoming.channel.partials[fragment.slot];
  if (fragment.flags & Fragment::kAbort) {
    partial = {};
    return finish(incoming, fragment, Code::kAborted, false, output);
  }
  const bool show_imm = (fragment.flags & Fragment::kHasImm) && !partial.imm_delivered;
  const Code placed = place(incoming, fragment, payload);
  if (fragment.flags & Fragment::kRead) return finish(incoming, fragment, placed, false, output);
  if (fragment.bytes == fragment.write_bytes) {  // one fragment: needs no Partial
    if (early_imm_) partial = {};
    return finish(incoming, fragment, placed, show_imm, output);
  }
  partial.bytes_received += fragment.bytes;
  if (partial.failed == 0) partial.failed = static_cast<uint16_t>(placed);
  if (partial.bytes_received != fragment.write_bytes) return;
  const auto code = static_cast<Code>(partial.failed);
  partial = {};
  finish(incoming, fragment, code, show_imm, output);
}

void Receiver::finish(Incoming& incoming, const Fragment& fragment, Code code, bool show_imm,
                      Output& output) noexcept {
  if (code == Code::kOk && fragment.flags & Fragment::kHasFlag) {
    const HeldFlag flag{incoming.channel.index, fragment.remote_key, fragment.flag_addr,
                        fragment.flag_value};
    if (chaos_.on()) {
      flags_.push_back(flag);
    } else if (!store(flag)) {
      code = Code::kRemoteAccess;
    }
  }
  // Cannot overflow: the sender has at most `window` unacknowledged writes.
  incoming.channel.acks[incoming.ack_head++ & incoming.channel.window_mask] = {
      fragment.slot, static_cast<int32_t>(code)};
  if (code == Code::kOk && show_imm) show(fragment.imm, output);
}

// Checks the range of the whole write, so that a write that does not fit changes no byte.
Code Receiver::place(Incoming& incoming, const Fragment& fragment, std::byte* payload) noexcept {
  const bool copied = std::exchange(incoming.copying, false);
  if (fragment.write_bytes == 0) return Code::kOk;  // immediate only, without an address
  const auto target =
      regions_.find_remote(fragment.remote_key, fragment.remote_addr, fragment.write_bytes);
  if (!target.data) return Code::kRemoteAccess;
  if (copied) return state_of(incoming) == Copies::State::kDone ? Code::kOk : Code::kTransport;
  const bool in_place = fragment.flags & Fragment::kInPlace;
  if (fragment.flags & Fragment::kRead) {
    if (in_place) return Code::kOk;
    if (target.kind == MemoryKind::kCuda) return Code::kInvalidArgument;
    std::memcpy(payload, target.data + fragment.offset, fragment.bytes);
    return Code::kOk;
  }
  if (in_place && in_place_) return Code::kOk;
  if (in_place != (target.kind == MemoryKind::kCuda)) return Code::kInvalidArgument;
  if (!in_place) std::memcpy(target.data + fragment.offset, payload, fragment.bytes);
  return Code::kOk;
}

void Receiver::publish(Incoming& incoming) noexcept {
  // release, both: pair with the acquires in Connection::next_ack and Connection::has_room.
  incoming.channel.record->ack_head.store(incoming.ack_head, std::memory_order_release);
  incoming.channel.record->tail.store(incoming.tail, std::memory_order_release);
}

// --- immediates ---

bool Receiver::has_room(const Output& output) const noexcept {
  return chaos_.on() ? !held_.full() && flags_.size() < kMaxHeld : !output.full();
}

void Receiver::show(uint32_t imm, Output& output) noexcept {
  if (chaos_.on() && ordered_ && late_.size() < kMaxHeld && chaos_.one_in(4)) {
    late_.push_back({imm, num_polls_ + 4 * chaos_.hold_polls()});
    return;
  }
  if (chaos_.on()) return held_.push(imm);
  output.put_imm(imm);
}

void Receiver::show_held(Output& output) noexcept {
  ++num_polls_;
  const bool hurry = is_severing();
  std::erase_if(late_, [&](const LateImmediate& late) {
    if ((late.until > num_polls_ && !hurry) || output.full()) return false;
    output.put_imm(late.imm);
    return true;
  });
  while (!held_.empty() && !output.full() && (hurry || !chaos_.one_in(8)))
    output.put_imm(held_.take(chaos_.below(held_.size())));
}

// --- flags ---

// False where no memory is registered there.
bool Receiver::store(const HeldFlag& flag) noexcept {
  const auto target = regions_.find_remote(flag.remote_key, flag.addr, sizeof flag.value);
  if (!target.data) return false;
  // release: pairs with whoever reads the flag and then the payload.
  std::atomic_ref(*reinterpret_cast<uint64_t*>(target.data))
      .store(flag.value, std::memory_order_release);
  return true;
}

// Any channel's oldest next.
void Receiver::store_held() noexcept {
  const bool hurry = is_severing();
  for (size_t i = 0; i < flags_.size() && (hurry || !chaos_.one_in(8));) {
    const auto same = [&](const HeldFlag& earlier) { return earlier.channel == flags_[i].channel; };
    const auto first = std::ranges::find_if(flags_, same);
    if (hurry || !chaos_.one_in(4)) {
      store(*first);
      flags_.erase(first);
    } else {
      ++i;
    }
  }
}

// mutate=early_imm, a deliberate fault: reports the immediate at the first fragment, and copies the
// payload at the next poll or later. Tests must catch it.
bool Receiver::show_early(Incoming& incoming, const Fragment& fragment, Output& output) noexcept {
  Partial& partial = incoming.channel.partials[fragment.slot];
  if (!(fragment.flags & Fragment::kHasImm) || partial.imm_delivered) return false;
  partial.imm_delivered = 1;
  show(fragment.imm, output);
  return true;
}

}  // namespace moe_p2p::provider::loopback
