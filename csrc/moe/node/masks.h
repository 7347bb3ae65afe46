// Which ranks are gone, as this rank sees it: one int32 of each, not 0 once it is masked. The words
// lie in memory of the caller, who reads and sets them too. Within a round of steps a mask is never
// taken back, so a thread that has seen one sees it from then on (docs/failure.md, "Masks").
#pragma once

#include <atomic>
#include <cstdint>

namespace moe_p2p::moe {

class Masks {
 public:
  // words: [W]; null: ranks are not masked, a rank that is gone breaks the communicator.
  // absent: [W], 1 for a rank that did not come to the set-up. It has no memory to write to, so it
  // stays masked: a caller who resets its word finds it set again. Written before the first call.
  // fixed: only absent ranks are masked; another that is gone breaks the communicator.
  explicit Masks(int32_t* words, const uint8_t* absent = nullptr, bool fixed = false) noexcept
      : words_(words), absent_(absent), fixed_(fixed) {}

  bool enabled() const noexcept { return words_ != nullptr; }
  // A rank that is gone is masked.
  bool grow() const noexcept { return words_ && !fixed_; }
  // relaxed, both: a mask means that something will not arrive; no data depends on it.
  bool has(int rank) const noexcept {
    if (!words_) return false;
    if (std::atomic_ref(words_[rank]).load(std::memory_order_relaxed) != 0) return true;
    if (!is_absent(rank)) return false;
    add(rank);
    return true;
  }
  // It is so at every rank, and from the first step on.
  bool is_absent(int rank) const noexcept { return absent_ && absent_[rank] != 0; }
  void add(int rank) const noexcept {
    std::atomic_ref(words_[rank]).store(1, std::memory_order_relaxed);
  }
  void remove(int rank) const noexcept {
    std::atomic_ref(words_[rank]).store(0, std::memory_order_relaxed);
  }

 private:
  int32_t* words_;
  const uint8_t* absent_;
  bool fixed_;
};

}  // namespace moe_p2p::moe
