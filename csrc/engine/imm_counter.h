// Counts immediates. Every NIC carries 32 bits:
//   keyed      1 | communicator 9 | phase 2 | step slot 4 | part 2 | is last 1 | source 13    (MoE)
//   free form  0 | user value 31                         (KV, weights, users: who has which is in
//                                                        moe_p2p/engine/README.md)
// A counter grows until its value is given back. Keyed immediates go to the sink of their
// communicator; one for an unknown communicator (an older epoch) is counted as discarded and
// dropped.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "platform/wait.h"

namespace moe_p2p::engine {

struct ImmKey {
  static constexpr uint32_t kKeyedBit = 1u << 31;
  static constexpr uint32_t kMaxCommunicators = 1u << 9;
  static constexpr uint32_t kMaxPhases = 1u << 2;
  static constexpr uint32_t kMaxSlots = 1u << 4;
  static constexpr uint32_t kMaxParts = 1u << 2;
  static constexpr uint32_t kMaxSources = 1u << 13;

  uint32_t communicator;
  uint32_t phase;
  uint32_t slot;
  uint32_t source;  // the sending rank
  uint32_t part = 0;
  bool is_last = true;  // the last of its parts

  constexpr uint32_t pack() const noexcept {
    return kKeyedBit | communicator << 22 | phase << 20 | slot << 16 | part << 14 |
           uint32_t{is_last} << 13 | source;
  }
  static constexpr ImmKey unpack(uint32_t imm) noexcept {
    return {.communicator = imm >> 22 & 0x1ff,
            .phase = imm >> 20 & 3,
            .slot = imm >> 16 & 15,
            .source = imm & 0x1fff,
            .part = imm >> 14 & 3,
            .is_last = (imm >> 13 & 1) != 0};
  }
};

// Which GPUs read the data that a keyed immediate announces: none (it is in host memory), only the
// GPU that owns the memory, or other GPUs too. A NIC's writes may be ordered for the
// owner alone (gpu_flushes.h).
enum class Readers : uint8_t { kNobody, kOwner, kNeighbours };
using PhaseReaders = std::array<Readers, ImmKey::kMaxPhases>;
inline constexpr PhaseReaders kAnyReaders{Readers::kNeighbours, Readers::kNeighbours,
                                          Readers::kNeighbours, Readers::kNeighbours};

// Receives the keyed immediates of one communicator, on the polling thread.
class ImmSink {
 public:
  virtual ~ImmSink() = default;
  virtual void on_imm(const ImmKey& key) noexcept = 0;
};

class ImmTable {
 public:
  // Values counted at a time. Too small: users who number transfers must wait until others are
  // given back. Immediates of further values are discarded.
  static constexpr uint32_t kMaxFreeForm = 4096;

  ImmTable();

  // Polling thread. A free-form value gets its counter with its first immediate, with or without a
  // waiter.
  void deliver(uint32_t imm) noexcept;
  void set_sink(uint32_t communicator, ImmSink* sink,
                const PhaseReaders& readers = kAnyReaders) noexcept;  // null removes it
  Readers readers_of(uint32_t imm) const noexcept {
    if ((imm & ImmKey::kKeyedBit) == 0) return Readers::kNeighbours;
    const ImmKey key = ImmKey::unpack(imm);
    return sinks_[key.communicator].readers[key.phase];
  }

  // Any thread, free-form values only. Returns how often the value was counted since it was first
  // seen or last given back.
  uint64_t value(uint32_t imm) const;
  // Returns true once the value was counted `expected` times: the payloads are visible. False when
  // the deadline passed first.
  bool wait(uint32_t imm, uint64_t expected, platform::Deadline deadline,
            const platform::WaitPolicy& policy = {});
  // Gives the value back and returns how often it was counted. While it has waiters, returns
  // nothing and changes nothing. A later immediate counts from zero.
  std::optional<uint64_t> give_back(uint32_t imm);
  // False when other values have all counters: immediates of this value would be discarded.
  bool can_count(uint32_t imm) const noexcept;

  // Immediates that could not be counted: of unknown communicators, or of too many values.
  uint64_t discarded() const noexcept { return discarded_.load(std::memory_order_relaxed); }

 private:
  // Twice kMaxFreeForm, so that searches stay short when all counters are taken.
  static constexpr int kEntriesLog2 = 13;
  static constexpr uint32_t kEntries = 1u << kEntriesLog2;
  static_assert(kEntries == 2 * kMaxFreeForm);
  static constexpr uint32_t kFree = 0;
  static constexpr uint32_t kGivenBack = ~0u;  // free, but a search continues past it

  struct Entry {
    // value + 1, kFree or kGivenBack. Stored by the polling thread, except kGivenBack by
    // give_back(); release, pairs with the acquire in find(): the count was reset.
    std::atomic<uint32_t> tag{kFree};
    uint32_t num_waiting = 0;  // under mutex_
    // release in deliver(), acquire in value() and wait(): the payload is visible with the count.
    std::atomic<uint64_t> count{0};
    platform::EventCount event{};
  };
  static uint32_t home(uint32_t value) noexcept {
    return value * 0x9e3779b1u >> (32 - kEntriesLog2);
  }
  Entry& entry(uint32_t at) const noexcept { return entries_[at % kEntries]; }
  Entry* find(uint32_t value) const noexcept;
  Entry* find_or_add(uint32_t value) noexcept;

  const std::unique_ptr<Entry[]> entries_;
  std::atomic<uint32_t> num_taken_{0};
  platform::EventCount added_{};  // for wait() of a value that has no counter yet
  mutable std::mutex mutex_;      // between users: no counter in use is given back
  struct Sink {
    ImmSink* sink = nullptr;
    PhaseReaders readers = kAnyReaders;
  };
  std::array<Sink, ImmKey::kMaxCommunicators> sinks_{};
  std::atomic<uint64_t> discarded_{0};
};

}  // namespace moe_p2p::engine
