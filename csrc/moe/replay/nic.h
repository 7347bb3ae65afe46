// The NIC of a replay: takes every post and does nothing with it. What completes, and what arrives,
// is what the recording says.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <vector>

#include "base/wire.h"
#include "provider/provider.h"

namespace moe_p2p::moe::replay {

class Nic final : public provider::Domain {
 public:
  // Finds the oldest post that is like the recorded one and gives it the recorded id. False: none.
  bool name(uint32_t imm, uint64_t bytes, uint64_t id) {
    const auto found = std::ranges::find_if(posted_, [&](const provider::WorkRequest& work) {
      return work.has_imm && work.imm == imm && work.bytes == bytes;
    });
    if (found == posted_.end()) return false;
    named_[id].push_back(found->wr_id);
    posted_.erase(found);
    return true;
  }
  // So many posts of the id; posts of others than the exchange have none here.
  void complete(uint64_t id, uint64_t count, base::Status status) {
    std::deque<uint64_t>& posts = named_[id];
    for (; count > 0 && !posts.empty(); --count, posts.pop_front())
      ready_.push_back({.wr_id = posts.front(), .status = status});
  }
  void arrive(uint32_t imm) {
    ready_.push_back(
        {.kind = provider::Completion::Kind::kImmediate, .imm = imm, .wr_id = 0, .status = {}});
  }
  // Posts that the recorded NIC has not taken.
  size_t num_unnamed() const noexcept { return posted_.size(); }

  const char* provider_name() const noexcept override { return "replay"; }
  provider::DomainLimits limits() const noexcept override { return {}; }
  bool needs_gpu_flush() const noexcept override { return false; }
  base::Bytes address() const override { return base::Bytes(1); }
  provider::PeerId connect(std::span<const std::byte>) override { return next_++; }
  void disconnect(provider::PeerId) override {}
  provider::MemoryKey register_memory(const provider::MemorySpan& span) override {
    const uint64_t key = next_++;
    return {key, key, reinterpret_cast<uint64_t>(span.data)};
  }
  void unregister_memory(const provider::MemoryKey&) override {}
  size_t post(std::span<const provider::WorkRequest> requests) noexcept override {
    posted_.insert(posted_.end(), requests.begin(), requests.end());
    return requests.size();
  }
  size_t poll(std::span<provider::Completion> completions) noexcept override {
    const size_t count = std::min(completions.size(), ready_.size());
    std::copy_n(ready_.begin(), count, completions.begin());
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }
  bool idle() const noexcept override { return ready_.empty(); }

 private:
  provider::PeerId next_ = 1;
  std::vector<provider::WorkRequest> posted_;
  std::map<uint64_t, std::deque<uint64_t>> named_;  // by recorded id, the oldest first
  std::vector<provider::Completion> ready_;
};

}  // namespace moe_p2p::moe::replay
