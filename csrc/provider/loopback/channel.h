// Layout of a NIC's shared memory segment. The segment belongs to the receiver; every sender that
// connects claims one channel in it: a record of counters, an acknowledgement ring and a payload
// ring. Only plain words and offsets, because each process maps the segment at another address.
//
//   header | record[channels] | block[channels]        block = claim | acks | partials | ring
//
// A payload ring carries fragments: a 64-byte Fragment and its payload, padded to 64 bytes. Payload
// never wraps: a fragment ends at the ring's end and the write continues in the next one. For GPU
// memory of the peer that the sender has mapped, the ring carries no payload: the sender copies it
// into place before it puts the fragment into the ring. A read asks with a fragment whose payload
// the receiver fills in place; the sender copies it out before it uses that part of the ring again.
// Memory that a peer lends is read by our GPU: the fragment follows once the bytes are here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/abi/rows.h"
#include "platform/process.h"

namespace moe_p2p::provider::loopback {

inline constexpr uint64_t kLine = 64;
inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kSegmentMagic = 0x6d6f655f70327032;
// Longest shared memory name that a claim can carry, with its terminating zero.
inline constexpr size_t kMaxName = 128;

// Registered regions of a NIC, at most. Too small: a KV cache that registers its layers one by one
// is refused.
inline constexpr uint32_t kMaxRegions = 1u << 12;

struct alignas(kPage) SegmentHeader {
  uint64_t magic;
  uint64_t letter;  // base/letter.h
  uint64_t ring_bytes;
  uint32_t num_channels;
  uint32_t window;
  // Counts claims and releases of channels. Release by Segment::claim() and Segment::release();
  // acquire by Receiver::poll() and rescan(). The records are read only when it has changed.
  alignas(kLine) std::atomic<uint64_t> changes;
  // Not 0: the NIC is closed, its channels are not read any more. Release by Segment::close(),
  // acquire by Segment::closed().
  std::atomic<uint32_t> closed;
  // What this NIC's GPU copies into memory that peers lend; read by these peers.
  alignas(kPage) abi::CopyWords copies;
  // By region: the key under which its GPU memory is lent to peers, 0: it is not, or no more.
  // seq_cst: store by RegionTable, load by Connection::start_copy (see RegionTable::close()).
  alignas(kPage) std::atomic<uint64_t> lent[kMaxRegions];
};

// free -> claiming -> open by the sender (Segment::claim), -> closing by either end, -> free by the
// receiver with the next generation (Receiver::free_channel). open -> severed by the receiver,
// which takes nothing of it any more; its sender may still write there, so it is not freed before
// the sender, or its end, has made it closing.
enum class ChannelState : uint8_t { kFree = 0, kClaiming, kOpen, kClosing, kSevered };

constexpr uint64_t channel_word(uint64_t generation, ChannelState state) noexcept {
  return generation << 8 | static_cast<uint64_t>(state);
}
constexpr ChannelState state_of(uint64_t word) noexcept {
  return static_cast<ChannelState>(word & 0xff);
}
constexpr uint64_t generation_of(uint64_t word) noexcept { return word >> 8; }

// Each line is written by one end only (state excepted), so polling does not move it around.
struct ChannelRecord {
  // Bytes put into the ring. Release by Connection::publish, acquire by Receiver::poll_channel.
  alignas(kLine) std::atomic<uint64_t> head;
  // Bytes taken out of the ring. Release by Receiver::publish, acquire by Connection::has_room.
  alignas(kLine) std::atomic<uint64_t> tail;
  // Acknowledgements given. Release by Receiver::publish, acquire by Connection::next_ack.
  std::atomic<uint64_t> ack_head;
  // channel_word(). Every change is a release or acquire-release, every read an acquire.
  alignas(kLine) std::atomic<uint64_t> state;
};

// A process that is killed lets go of its locks before the driver has ended what its GPU does, so
// its channel is kept so long, or until the process itself is gone. Too small: copies of its GPU
// write to memory that its owner has taken back.
inline constexpr int64_t kEndOfGpuWorkNs = 100'000'000;

// The channel's sender. Written before the state becomes kOpen, constant from then on.
struct Claim {
  char sender_segment[kMaxName];  // shows whether the sender is alive
  char sender_waker[kMaxName];    // notified after acknowledgements; may be empty
  platform::ProcessName sender;
  uint64_t tag;  // for Domain::sever(); 0: none
};

struct Ack {
  uint32_t slot;
  int32_t code;  // base::Code
};

// The receiver's progress with a write of several fragments. Used by the receiver only; it lies
// here because a poll may not allocate for a new peer.
struct Partial {
  uint32_t bytes_received;
  uint16_t failed;         // base::Code of the first fragment that was refused
  uint16_t imm_delivered;  // mutate=early_imm only
};

struct alignas(kLine) Fragment {
  static constexpr uint32_t kHasImm = 1;
  static constexpr uint32_t kAbort = 2;  // the sender gives this write up and sends no more of it
  // The payload is already in its target GPU memory, of a read: in the sender's.
  static constexpr uint32_t kInPlace = 4;
  // The receiver fills the payload, from the memory named, and acknowledges this fragment alone.
  static constexpr uint32_t kRead = 8;
  static constexpr uint32_t kHasFlag = 16;

  uint64_t remote_addr;  // of the whole write, like remote_key and write_bytes
  uint64_t remote_key;
  int64_t arrival_ns;  // link model: not before this time; 0 = at once
  uint32_t write_bytes;
  uint32_t offset;  // of this fragment in the write
  uint32_t bytes;   // of this fragment
  uint32_t slot;
  uint32_t imm;
  uint32_t flags;
  uint64_t flag_addr;  // under the same key
  uint64_t flag_value;
};
static_assert(sizeof(Fragment) == kLine && sizeof(ChannelRecord) == 3 * kLine);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

constexpr uint64_t align_up(uint64_t bytes, uint64_t unit) noexcept {
  return (bytes + unit - 1) / unit * unit;
}
// Bytes that follow the header in the ring.
constexpr uint32_t payload_bytes(const Fragment& fragment) noexcept {
  return fragment.flags & Fragment::kInPlace ? 0 : fragment.bytes;
}
constexpr uint64_t ring_bytes_of(const Fragment& fragment) noexcept {
  return kLine + align_up(payload_bytes(fragment), kLine);
}

// Offsets in the segment, from the three numbers in the header.
struct SegmentLayout {
  uint64_t ring_bytes;
  uint32_t num_channels;
  uint32_t window;

  constexpr uint64_t record(uint32_t channel) const noexcept {
    return sizeof(SegmentHeader) + channel * sizeof(ChannelRecord);
  }
  constexpr uint64_t block(uint32_t channel) const noexcept {
    return align_up(record(num_channels), kPage) + channel * block_bytes();
  }
  // Offsets in a block.
  constexpr uint64_t acks() const noexcept { return sizeof(Claim); }
  constexpr uint64_t partials() const noexcept { return acks() + window * sizeof(Ack); }
  constexpr uint64_t ring() const noexcept {
    return align_up(partials() + window * sizeof(Partial), kLine);
  }
  constexpr uint64_t block_bytes() const noexcept { return align_up(ring() + ring_bytes, kPage); }
  constexpr uint64_t total_bytes() const noexcept { return block(num_channels); }
};

// One channel in the address space of either end.
struct Channel {
  uint32_t index = 0;
  ChannelRecord* record = nullptr;
  Claim* claim = nullptr;
  Ack* acks = nullptr;
  Partial* partials = nullptr;
  std::byte* ring = nullptr;
  uint64_t ring_mask = 0;
  uint32_t window_mask = 0;
};

}  // namespace moe_p2p::provider::loopback
