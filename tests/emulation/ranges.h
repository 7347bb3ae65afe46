// Ranges of memory that accesses are looked up in, of which threads add and remove some meanwhile.
// Used in order.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "tests/emulation/order.h"

namespace moe_p2p::emulation::order {

class Ranges {
 public:
  bool have(const void* word) const {
    const auto at = reinterpret_cast<uintptr_t>(word);
    return std::any_of(all_.begin(), all_.begin() + num_.load(std::memory_order_acquire),
                       [&](const Range& range) { return range.begin <= at && at < range.end; });
  }
  void add(const void* at, size_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(at);
    const std::lock_guard lock(mutex_);
    size_t place = 0;
    while (place < num_ && all_[place].end != 0) ++place;
    if (place == all_.size()) fail("too many pieces of memory at once");
    all_[place].end = 0;
    all_[place].begin = begin;
    all_[place].end = begin + bytes;
    num_.store(std::max(num_.load(), place + 1), std::memory_order_release);
  }
  // Removes one that begins there: others may have added it too.
  void remove(const void* at) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(all_.begin(), all_.begin() + num_, [&](const Range& range) {
      return range.end != 0 && range.begin == reinterpret_cast<uintptr_t>(at);
    });
    if (found != all_.begin() + num_) found->end = 0;
  }

 private:
  struct Range {
    std::atomic<uintptr_t> begin, end;  // 0: none any more
  };

  std::mutex mutex_;
  std::array<Range, 256> all_{};
  std::atomic<size_t> num_{0};
};

}  // namespace moe_p2p::emulation::order
