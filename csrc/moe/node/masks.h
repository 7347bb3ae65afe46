// Which ranks are gone, as this rank sees it: one int32 of each, not 0 once it is masked. The words
// lie in memory of the caller, who reads and sets them too. Within a round of steps a mask is never
// taken back, so a thread that has seen one sees it from then on (docs/failure.md, "Masks").
#pragma once

#include <atomic>
#include <cstdint>

namespace moe_p2p::moe {

class Masks {
 public:
  // [W]; null: ranks are not masked, a rank that is gone breaks the communicator.
  explicit Masks(int32_t* words) noexcept : words_(words) {}

  bool enabled() const noexcept { return words_ != nullptr; }
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
};

}  // namespace moe_p2p::moe
