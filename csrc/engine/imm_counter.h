// Counting immediates. 32 bits are what every NIC carries:
//   keyed      1 | communicator 9 | phase 2 | step slot 4 | part 2 | is last 1 | source 13    (MoE)
//   free form  0 | user value 31                                    (KV, weights, users)
// A counter only ever grows. Keyed immediates go to the sink of their communicator; one for a
// communicator that is not here (an older epoch) is counted as discarded and dropped.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

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
  uint32_t source;  // says who is missing
  uint32_t part = 0;
  bool is_last = true;  // of its parts

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

// Receives the keyed immediates of one communicator, on the polling thread.
class ImmSink {
 public:
  virtual ~ImmSink() = default;
  virtual void on_imm(const ImmKey& key) noexcept = 0;
};

// A free-form counter; waiters sleep on `event`.
struct ImmCounter {
  // release in ImmTable::deliver(), acquire in the reader: the payload is visible with the count.
  std::atomic<uint64_t> count{0};
  platform::EventCount event{};

  // Any thread. False when the deadline passed before `expected` immediates had come.
  bool wait(uint64_t expected, platform::Deadline deadline,
            const platform::WaitPolicy& policy = {});
};

class ImmTable {
 public:
  static constexpr uint32_t kMaxFreeForm = 4096;

  ImmTable();

  // Polling thread.
  void deliver(uint32_t imm) noexcept;
  void set_sink(uint32_t communicator, ImmSink* sink) noexcept;  // null removes it

  // Any thread. The counter of a free-form value, made at first sight by either side (an immediate
  // may arrive before anybody waits for it). Null when all kMaxFreeForm are taken.
  ImmCounter* find_or_add(uint32_t value) noexcept;

  uint64_t discarded() const noexcept { return discarded_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    std::atomic<uint32_t> tag{0};  // value + 1; 0 = free. Taken once, never given back.
    ImmCounter counter;
  };
  std::unique_ptr<Entry[]> free_form_;
  std::array<ImmSink*, ImmKey::kMaxCommunicators> sinks_{};
  std::atomic<uint64_t> discarded_{0};
};

}  // namespace moe_p2p::engine
