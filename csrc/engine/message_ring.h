// What the sender and the receiver of small messages have in common: how an inbox lies in memory,
// and the immediates that go with it. Part of the letter (csrc/letter.py).
//
// An inbox (inbox.h) is a directory and, for each sender, a ring of slots, all of them registered
// memory of the receiver. Everything is a write or a read by the sender (outbox.h):
//   claim    its name into the entry of a free ring, with an immediate; the receiver's polling
//            thread makes the first name that it sees there the owner; the sender reads the entry.
//   message  into slot n mod num_slots, with an immediate that names ring and slot. The receiver
//            takes slots in order, whatever order they arrive in.
//   room     the sender reads how many messages were taken.
//   bye      an immediate with the number of messages in all: once they are taken the ring is free.
// Each immediate carries the generation of its ring, so that one which comes late, after the ring
// has a new owner, is recognized.
#pragma once

#include <array>
#include <cstdint>

#include "engine/imm_counter.h"
#include "engine/memory_region.h"

namespace moe_p2p::engine {

// Messages of users, and those of barriers, which are taken apart from each other.
enum class Purpose : uint32_t { kMessages, kBarriers };
inline constexpr size_t kNumPurposes = 2;

struct MessageImm {
  // The last number of communicators: they do not take it (moe_p2p/engine/communicators.py).
  static constexpr uint32_t kCommunicator = ImmKey::kMaxCommunicators - 1;
  static constexpr uint32_t kGenerations = 1u << 4;
  enum class Kind : uint32_t { kClaim, kMessage, kBye };

  Kind kind;
  uint32_t ring;
  uint32_t generation;  // the low bits count
  uint32_t value = 0;   // kMessage: the slot; kBye: messages in all, the low 8 bits of it

  constexpr uint32_t pack() const noexcept {
    return ImmKey::kKeyedBit | kCommunicator << 22 | static_cast<uint32_t>(kind) << 20 |
           ring << 12 | generation % kGenerations << 8 | (value & 0xff);
  }
  static constexpr MessageImm unpack(uint32_t imm) noexcept {
    return {.kind = static_cast<Kind>(imm >> 20 & 3),
            .ring = imm >> 12 & 0xff,
            .generation = imm >> 8 & 0xf,
            .value = imm & 0xff};
  }
};
static_assert(InboxPlace::kMaxRings <= 256 && 2 * InboxPlace::kMaxSlots <= 256,
              "an immediate has 8 bits for a ring, and a bye names one number of messages only");

// One ring in the directory. `claim` is written by senders, the rest by the receiver.
struct RingEntry {
  uint64_t owner;  // the sender's name; 0: the ring is free
  uint64_t generation;
  uint64_t taken;  // messages of this owner
  uint64_t claim;
  std::array<RemoteKey, kMaxNics> keys;  // of the ring's memory, at the receiver's NICs
};
static_assert(sizeof(RingEntry) == 160);

// A sender's name: a random number, of which the lowest bit is its Purpose and the highest is 0.
constexpr Purpose purpose_of(uint64_t name) noexcept { return static_cast<Purpose>(name & 1); }

// A slot begins with this, its message follows.
struct SlotHead {
  uint32_t bytes;
  std::array<char, 60> label;  // of the sending engine, cut off, with a 0 behind it
};
static_assert(sizeof(SlotHead) == 64);

constexpr uint64_t slot_bytes(const InboxPlace& inbox) noexcept {
  return sizeof(SlotHead) + (uint64_t{inbox.max_bytes} + 63) / 64 * 64;
}
constexpr uint64_t ring_bytes(const InboxPlace& inbox) noexcept {
  return inbox.num_slots * slot_bytes(inbox);
}
constexpr uint64_t directory_bytes(const InboxPlace& inbox) noexcept {
  return inbox.num_rings * sizeof(RingEntry);
}

}  // namespace moe_p2p::engine
