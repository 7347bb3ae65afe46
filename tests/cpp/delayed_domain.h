// A NIC for tests that delays writes past whatever the test does meanwhile: it wraps a Domain of
// any provider, accepts work requests at once and, while it delays, gives them to the NIC only when
// it is told to. As a switch of a congested network may do, whose sender has long been given up.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/domain_group.h"
#include "provider/provider.h"

namespace moe_p2p::test {

class DelayedDomain final : public provider::Domain {
 public:
  explicit DelayedDomain(std::unique_ptr<Domain> nic) : nic_(std::move(nic)) {}

  // Polling thread.
  void delay(bool delayed) { delayed_ = delayed; }
  size_t num_delayed() const { return kept_.size(); }

  const char* provider_name() const noexcept override { return nic_->provider_name(); }
  provider::DomainLimits limits() const noexcept override { return nic_->limits(); }
  bool needs_gpu_flush() const noexcept override { return nic_->needs_gpu_flush(); }
  base::Bytes address() const override { return nic_->address(); }
  provider::PeerId connect(std::span<const std::byte> address) override {
    return nic_->connect(address);
  }
  provider::PeerId connect_for(std::span<const std::byte> address, int priority,
                               uint64_t tag) override {
    return nic_->connect_for(address, priority, tag);
  }
  bool sever(uint64_t tag, platform::Deadline deadline) override {
    return nic_->sever(tag, deadline);
  }
  void disconnect(provider::PeerId peer) override { nic_->disconnect(peer); }
  provider::MemoryKey register_memory(const provider::MemorySpan& span) override {
    return nic_->register_memory(span);
  }
  void unregister_memory(const provider::MemoryKey& key) override { nic_->unregister_memory(key); }
  std::string failure() const override { return nic_->failure(); }

  size_t post(std::span<const provider::WorkRequest> requests) noexcept override {
    if (!delayed_ && kept_.empty()) return nic_->post(requests);
    kept_.insert(kept_.end(), requests.begin(), requests.end());
    return requests.size();
  }
  size_t poll(std::span<provider::Completion> completions) noexcept override {
    if (!delayed_ && !kept_.empty())
      kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(nic_->post(kept_)));
    return nic_->poll(completions);
  }
  bool idle() const noexcept override { return kept_.empty() && nic_->idle(); }

 private:
  const std::unique_ptr<Domain> nic_;
  bool delayed_ = false;
  std::vector<provider::WorkRequest> kept_;
};

}  // namespace moe_p2p::test
