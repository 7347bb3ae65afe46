#include "provider/loopback/segment.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/letter.h"
#include "base/log.h"
#include "platform/row_copies.h"

namespace moe_p2p::provider::loopback {

using base::Code;

namespace {

// The segments mapped by this process. A forked child begins with none: it must not use its
// parent's segments, and another thread may have held the lock.
struct Mapped {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Segment>> segments;
};

Mapped*& mapped_slot() {
  static auto* all = [] {
    platform::at_fork([] { mapped_slot() = new Mapped; });
    return new Mapped;  // outlives every Domain, static ones included
  }();
  return all;
}
Mapped& mapped() { return *mapped_slot(); }

std::shared_ptr<Segment> remember(std::shared_ptr<Segment> segment) {
  auto& segments = mapped().segments;
  std::erase_if(segments, [](const auto& entry) { return entry.second.expired(); });
  segments[segment->name()] = segment;
  return segment;
}

void copy_name(char (&to)[kMaxName], const std::string& name) {
  MOE_P2P_CHECK(name.size() < kMaxName, Code::kInvalidArgument, "shared memory name ", name,
                " is longer than ", kMaxName - 1, " characters");
  std::memcpy(to, name.c_str(), name.size() + 1);
}

// A NIC that sends here.
struct SendingNic {
  platform::ProcessName process;
  bool open = false;  // it has not given its channels back, before which its copies end
};

// Its copies that had begun by now. A process that is gone needs no deadline.
bool await_copies_of(const std::string& name, const SendingNic& nic, platform::Deadline deadline) {
  using platform::LentCopies;
  std::shared_ptr<Segment> peer;
  try {
    peer = Segment::open(name);
  } catch (const base::Error&) {  // it has closed, or was killed and somebody has cleaned up
    if (!nic.open) return true;
  }
  const auto since = peer ? LentCopies::begun(peer->header().copies) : LentCopies::Begun{};
  std::optional<platform::Deadline> gone;  // when its GPU certainly writes no more
  while (!peer || !LentCopies::ended(peer->header().copies, since)) {
    const auto now = platform::Clock::now();
    if (!gone && (!peer || !peer->process_alive()))
      gone = now + std::chrono::nanoseconds(kEndOfGpuWorkNs);
    if (gone && (now > *gone || nic.process.has_ended())) break;
    if (!gone && now > deadline) return false;
    sched_yield();
  }
  return true;
}

}  // namespace

std::shared_ptr<Segment> Segment::create(const Config& config) {
  const SegmentLayout layout{config.ring_bytes, config.num_channels, config.window};
  auto shm = platform::SharedMemory::create("nic", layout.total_bytes(), /*reserve=*/false);
  shm.reserve(0, layout.block(0));  // claim() reserves the channels' pages
  auto* header = reinterpret_cast<SegmentHeader*>(shm.data());
  header->magic = kSegmentMagic;
  header->letter = base::letter();
  header->ring_bytes = layout.ring_bytes;
  header->num_channels = layout.num_channels;
  header->window = layout.window;
  std::lock_guard lock(mapped().mutex);
  return remember(std::make_shared<Segment>(std::move(shm), /*own_process=*/true));
}

uint64_t Segment::reserved_bytes(const Config& config, uint32_t num_claimed) noexcept {
  const SegmentLayout layout{config.ring_bytes, config.num_channels, config.window};
  return layout.block(std::min(num_claimed, layout.num_channels));
}

std::shared_ptr<Segment> Segment::open(const std::string& name) {
  std::lock_guard lock(mapped().mutex);
  const auto it = mapped().segments.find(name);
  if (it != mapped().segments.end())
    if (auto segment = it->second.lock()) return segment;
  return remember(
      std::make_shared<Segment>(platform::SharedMemory::open(name), /*own_process=*/false));
}

Segment::Segment(platform::SharedMemory shm, bool own_process)
    : shm_(std::move(shm)), own_process_(own_process) {
  MOE_P2P_CHECK(shm_.size() >= sizeof(SegmentHeader) && header().magic == kSegmentMagic &&
                    header().letter == base::letter(),
                Code::kInvalidArgument, "shared memory ", name(),
                " is no loopback segment of this version");
  layout_ = {header().ring_bytes, header().num_channels, header().window};
  MOE_P2P_CHECK(layout_.total_bytes() == shm_.size(), Code::kInvalidArgument, "loopback segment ",
                name(), " has ", shm_.size(), " bytes, its header gives ", layout_.total_bytes());
}

Channel Segment::channel(uint32_t index) const noexcept {
  std::byte* const base = shm_.data();
  std::byte* const block = base + layout_.block(index);
  return {.index = index,
          .record = reinterpret_cast<ChannelRecord*>(base + layout_.record(index)),
          .claim = reinterpret_cast<Claim*>(block),
          .acks = reinterpret_cast<Ack*>(block + layout_.acks()),
          .partials = reinterpret_cast<Partial*>(block + layout_.partials()),
          .ring = block + layout_.ring(),
          .ring_mask = layout_.ring_bytes - 1,
          .window_mask = layout_.window - 1};
}

Segment::Claimed Segment::claim(const std::string& sender_segment, const std::string& sender_waker,
                                uint64_t tag) {
  uint32_t num_closing = 0;
  for (uint32_t i = 0; i < layout_.num_channels; ++i) {
    const Channel channel = this->channel(i);
    auto& state = channel.record->state;
    // acquire: pairs with the release in Receiver::free_channel; the counters are at zero.
    uint64_t word = state.load(std::memory_order_acquire);
    if (state_of(word) == ChannelState::kClosing) ++num_closing;
    const uint64_t generation = generation_of(word);
    if (state_of(word) != ChannelState::kFree ||
        !state.compare_exchange_strong(word, channel_word(generation, ChannelState::kClaiming),
                                       std::memory_order_acq_rel))
      continue;
    try {
      shm_.reserve(layout_.block(i), layout_.block_bytes());
      copy_name(channel.claim->sender_segment, sender_segment);
      copy_name(channel.claim->sender_waker, sender_waker);
      channel.claim->sender = platform::ProcessName::own();
      channel.claim->tag = tag;
    } catch (...) {
      state.store(channel_word(generation, ChannelState::kFree), std::memory_order_release);
      throw;
    }
    // release: pairs with the acquire in Receiver::rescan; the claim is complete.
    const Claimed claimed{i, channel_word(generation, ChannelState::kOpen)};
    state.store(claimed.word, std::memory_order_release);
    header().changes.fetch_add(1, std::memory_order_release);
    return claimed;
  }
  throw base::Error(Code::kResourceExhausted,
                    base::concat("all ", layout_.num_channels, " channels of loopback segment ",
                                 name(), " are taken, ", num_closing,
                                 " of them wait for a poll of their owner to be freed; raise the "
                                 "setting channels there"));
}

void Segment::release(const Claimed& claimed) noexcept {
  if (shm_.inherited()) return;
  auto& state = channel(claimed.index).record->state;
  uint64_t word = claimed.word;
  // release: pairs with the acquire in Receiver::rescan; this sender does not use the ring any
  // more.
  const uint64_t generation = generation_of(word);
  const uint64_t closing = channel_word(generation, ChannelState::kClosing);
  if (state.compare_exchange_strong(word, closing, std::memory_order_acq_rel) ||
      (word == channel_word(generation, ChannelState::kSevered) &&
       state.compare_exchange_strong(word, closing, std::memory_order_acq_rel)))
    header().changes.fetch_add(1, std::memory_order_release);
}

// From each NIC with a channel here, also one that has begun to leave.
bool Segment::await_lent_copies(platform::Deadline deadline) const {
  std::map<std::string, SendingNic> peers;
  for (uint32_t i = 0; i < layout_.num_channels; ++i) {
    const Channel channel = this->channel(i);
    // acquire: pairs with the release in claim(); the name is written.
    const uint64_t word = channel.record->state.load(std::memory_order_acquire);
    const ChannelState now = state_of(word);
    if (now == ChannelState::kFree || now == ChannelState::kClaiming) continue;
    SendingNic& nic = peers[channel.claim->sender_segment];
    nic.process = channel.claim->sender;
    nic.open |= now != ChannelState::kClosing;
  }
  return std::ranges::all_of(
      peers, [&](const auto& peer) { return await_copies_of(peer.first, peer.second, deadline); });
}

void Segment::close() noexcept {
  if (!shm_.inherited()) header().closed.store(1, std::memory_order_release);
}

}  // namespace moe_p2p::provider::loopback
