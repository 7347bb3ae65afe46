// A queue of fixed capacity with removal from its middle: the fast path takes the oldest element,
// the adversary any. Never allocates after construction.
#pragma once

#include <bit>
#include <cstddef>
#include <utility>
#include <vector>

namespace moe_p2p::provider::loopback {

template <typename T>
class Pool {
 public:
  explicit Pool(size_t capacity) : items_(std::bit_ceil(capacity)), capacity_(capacity) {}

  bool empty() const noexcept { return head_ == tail_; }
  bool full() const noexcept { return size() == capacity_; }
  size_t size() const noexcept { return tail_ - head_; }

  void push(const T& item) noexcept { slot(tail_++) = item; }
  T& operator[](size_t i) noexcept { return slot(head_ + i); }
  T pop() noexcept { return slot(head_++); }
  // Removes element i; the newest takes its place.
  T take(size_t i) noexcept { return std::exchange((*this)[i], slot(--tail_)); }
  void clear() noexcept { head_ = tail_; }

 private:
  T& slot(size_t position) noexcept { return items_[position & (items_.size() - 1)]; }

  std::vector<T> items_;
  size_t capacity_;
  size_t head_ = 0, tail_ = 0;
};

}  // namespace moe_p2p::provider::loopback
