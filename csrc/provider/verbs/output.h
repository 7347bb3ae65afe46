// The completions of one poll. One completion of the NIC may complete many writes: what the
// caller's array cannot hold waits in Backlog. Polling thread only.
#pragma once

#include <bit>
#include <span>
#include <vector>

#include "provider/provider.h"

namespace moe_p2p::provider::verbs {

class Backlog {
 public:
  // Cannot overflow: it holds at most the writes in flight and the immediates of one poll.
  explicit Backlog(size_t max_entries)
      : entries_(std::bit_ceil(max_entries)), mask_(entries_.size() - 1) {}
  bool empty() const noexcept { return head_ == tail_; }
  void push(const Completion& completion) noexcept { entries_[tail_++ & mask_] = completion; }
  Completion pop() noexcept { return entries_[head_++ & mask_]; }

 private:
  std::vector<Completion> entries_;
  size_t mask_, head_ = 0, tail_ = 0;
};

class Output {
 public:
  Output(std::span<Completion> completions, Backlog& backlog) noexcept
      : completions_(completions), backlog_(backlog) {
    while (!backlog_.empty() && room() > 0) show(backlog_.pop());
  }
  void write(uint64_t wr_id, base::Status status) noexcept {
    put({.kind = Completion::Kind::kWrite, .imm = 0, .wr_id = wr_id, .status = status});
  }
  void immediate(uint32_t imm) noexcept {
    put({.kind = Completion::Kind::kImmediate, .imm = imm, .wr_id = 0, .status = {}});
  }
  size_t room() const noexcept { return completions_.size() - count_; }
  size_t count() const noexcept { return count_; }
  size_t num_writes() const noexcept { return num_writes_; }

 private:
  void put(const Completion& completion) noexcept {
    if (room() > 0) {
      show(completion);
    } else {
      backlog_.push(completion);
    }
  }
  void show(const Completion& completion) noexcept {
    completions_[count_++] = completion;
    num_writes_ += completion.kind == Completion::Kind::kWrite ? 1 : 0;
  }

  std::span<Completion> completions_;
  Backlog& backlog_;
  size_t count_ = 0;
  size_t num_writes_ = 0;
};

}  // namespace moe_p2p::provider::verbs
