// Which ranks are gone, as this rank sees it: one int32 of each, not 0 once it is masked. The words
// lie in memory of the caller, who reads and sets them too. Within a round of steps a mask is never
// taken back, so a thread that has seen one sees it from then on (docs/failure.md, "Masks").
#pragma once

#include <atomic>
#include <cstdint>

namespace moe_p2p::moe {

class Masks {
 public:
  // [W]; null: ranks are not masked, a rank that is gone breaks the communicator. fixed: the same,
  // but for those that are masked from the first step on, because they are not there.
  explicit Masks(int32_t* words, bool fixed = false) noexcept : words_(words), fixed_(fixed) {}

  bool enabled() const noexcept { return words_ != nullptr; }
  // A rank that is gone is masked.
  bool grow() const noexcept { return words_ && !fixed_; }
  // relaxed, both: a mask means that something will not arrive; no data depends on it.
  bool has(int rank) const noexcept {
    return words_ && std::atomic_ref(words_[rank]).load(std::memory_order_relaxed) != 0;
  }
  void add(int rank) const noexcept {
    std::atomic_ref(words_[rank]).store(1, std::memory_order_relaxed);
  }
  void remove(int rank) const noexcept {
    std::atomic_ref(words_[rank]).store(0, std::memory_order_relaxed);
  }

 private:
  int32_t* words_;
  bool fixed_;
};

}  // namespace moe_p2p::moe
