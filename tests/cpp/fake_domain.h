// A network inside one process for tests: NICs that copy memory when they are polled, in an order
// drawn from a seed, and that can hold completions, take posts only in part, and fail on demand.
// Every rule a real NIC would enforce (address, key and NIC belong together; limits) is checked
// here, so that a mistake of the engine becomes a failed completion.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <type_traits>
#include <vector>

#include "base/log.h"
#include "engine/domain_group.h"
#include "provider/provider.h"

namespace moe_p2p::test {

struct FakeOptions {
  uint64_t seed = 1;
  provider::DomainLimits limits = {};
  bool short_posts = false;  // post() takes a part of what it is given
  bool copy = true;          // false: memory is never touched, spans may be imaginary
};

class FakeDomain;

class FakeNetwork {
 public:
  explicit FakeNetwork(FakeOptions options = {}) : options_(options), random_(options.seed) {}

  engine::DomainFactory factory();
  // NICs in the order in which they were opened.
  FakeDomain& nic(size_t index) { return *nics_.at(index); }

 private:
  friend class FakeDomain;
  size_t draw(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }

  FakeOptions options_;
  std::mutex mutex_;  // guards everything of the network and of its NICs
  std::mt19937_64 random_;
  std::vector<FakeDomain*> nics_;  // null once closed
};

class FakeDomain final : public provider::Domain {
 public:
  struct Posted {
    provider::WorkRequest work;
    size_t to = 0;  // NIC
  };

  FakeDomain(FakeNetwork& network, const provider::DomainOptions& options)
      : network_(network), options_(options) {
    const std::lock_guard lock(network_.mutex_);
    id_ = network_.nics_.size();
    network_.nics_.push_back(this);
  }
  ~FakeDomain() override {
    const std::lock_guard lock(network_.mutex_);
    network_.nics_[id_] = nullptr;
  }

  // --- what a test may do ---
  void hold(bool held) {
    locked([&] { held_ = held; });
  }  // nothing completes
  void refuse(bool refused) {
    locked([&] { refused_ = refused; });
  }  // post() takes nothing
  void fail_next(size_t count, base::Status status) {
    locked([&] { fail_count_ = count, fail_status_ = status; });
  }
  void refuse_connections(bool refused) {
    locked([&] { refuse_connections_ = refused; });
  }
  void refuse_memory(bool refused) {
    locked([&] { refuse_memory_ = refused; });
  }
  void reach_gpus() {
    locked([&] { reaches_gpus_ = true; });
  }
  std::vector<Posted> posted() {
    return locked([&] { return posted_; });
  }
  size_t max_in_flight() {
    return locked([&] { return max_in_flight_; });
  }
  size_t num_in_flight() {
    return locked([&] { return in_flight_.size(); });
  }
  size_t num_regions() {
    return locked([&] { return regions_.size(); });
  }
  size_t num_peers() {
    return locked([&] { return peers_.size(); });
  }

  // --- provider::Domain ---
  const char* provider_name() const noexcept override { return "fake"; }
  provider::DomainLimits limits() const noexcept override { return network_.options_.limits; }

  base::Bytes address() const override {
    base::WireWriter out;
    out.put(static_cast<uint64_t>(id_));
    return out.take();
  }
  provider::PeerId connect(std::span<const std::byte> address) override {
    const std::lock_guard lock(network_.mutex_);
    const auto to = base::WireReader(address, "fake address").get<uint64_t>();
    MOE_P2P_CHECK(!refuse_connections_, base::Code::kPeerDead, "fake NIC refuses to connect");
    peers_[next_peer_] = to;
    return next_peer_++;
  }
  void disconnect(provider::PeerId peer) override {
    const std::lock_guard lock(network_.mutex_);
    peers_.erase(peer);
  }
  provider::MemoryKey register_memory(const provider::MemorySpan& span) override {
    const std::lock_guard lock(network_.mutex_);
    MOE_P2P_CHECK(!refuse_memory_, base::Code::kResourceExhausted, "fake NIC has no key left");
    MOE_P2P_CHECK(span.kind == provider::MemoryKind::kHost || reaches_gpus_,
                  base::Code::kUnavailable, "fake NIC cannot reach CUDA memory");
    // Keys are unique in the network, so that the key of another NIC is always wrong.
    const uint64_t key = 1 + id_ + 1000 * ++num_registered_;
    regions_[key] = span;
    return {key, key + 1'000'000, reinterpret_cast<uint64_t>(span.data)};
  }
  void unregister_memory(const provider::MemoryKey& key) override {
    const std::lock_guard lock(network_.mutex_);
    regions_.erase(key.local_key);
  }

  size_t post(std::span<const provider::WorkRequest> requests) noexcept override {
    const std::lock_guard lock(network_.mutex_);
    if (refused_) return 0;
    size_t count = requests.size();
    if (network_.options_.short_posts) count = network_.draw(count + 1);
    for (const auto& work : requests.first(count)) {
      const auto peer = peers_.find(work.peer);
      posted_.push_back({work, peer == peers_.end() ? SIZE_MAX : peer->second});
      in_flight_.push_back(posted_.back());
    }
    max_in_flight_ = std::max(max_in_flight_, in_flight_.size());
    return count;
  }

  size_t poll(std::span<provider::Completion> completions) noexcept override {
    const std::lock_guard lock(network_.mutex_);
    size_t count = 0;
    while (count < completions.size() && !inbox_.empty()) {
      completions[count++] = {
          .kind = provider::Completion::Kind::kImmediate, .imm = take_any(inbox_), .status = {}};
    }
    std::shuffle(in_flight_.begin(), in_flight_.end(), network_.random_);
    std::vector<Posted> kept;
    for (const Posted& posted : in_flight_) {
      // Held back by the test, or by chance; a write whose peer was disconnected completes anyway.
      const bool lost = !peers_.contains(posted.work.peer);
      if (count == completions.size() || (!lost && (held_ || network_.draw(3) == 0)))
        kept.push_back(posted);
      else
        completions[count++] = {.wr_id = posted.work.wr_id, .status = execute(posted)};
    }
    in_flight_.swap(kept);
    return count;
  }

  bool idle() const noexcept override {
    const std::lock_guard lock(network_.mutex_);
    return in_flight_.empty();
  }

 private:
  template <typename Step>
  std::invoke_result_t<Step> locked(Step&& step) {
    const std::lock_guard lock(network_.mutex_);
    return step();
  }

  template <typename T>
  T take_any(std::vector<T>& items) {
    std::swap(items[network_.draw(items.size())], items.back());
    const T item = items.back();
    items.pop_back();
    return item;
  }

  static bool contains(const provider::MemorySpan& span, uint64_t address, uint64_t bytes) {
    const auto begin = reinterpret_cast<uint64_t>(span.data);
    return address >= begin && bytes <= span.bytes && address - begin <= span.bytes - bytes;
  }

  base::Status execute(const Posted& posted) {
    using base::Code;
    const auto& work = posted.work;
    if (fail_count_ > 0) {
      --fail_count_;
      return fail_status_;
    }
    if (!peers_.contains(work.peer)) return {Code::kPeerDead, 1};
    FakeDomain* to = network_.nics_.at(posted.to);
    if (to == nullptr) return {Code::kPeerDead, 2};
    if (work.bytes > network_.options_.limits.max_write_bytes) return {Code::kTransport, 3};
    if (work.bytes > 0) {
      const auto source = regions_.find(work.local_key);
      if (source == regions_.end() ||
          !contains(source->second, reinterpret_cast<uint64_t>(work.local), work.bytes))
        return {Code::kTransport, 4};
      const auto target = to->regions_.find(work.remote_key - 1'000'000);
      if (target == to->regions_.end() || !contains(target->second, work.remote_addr, work.bytes))
        return {Code::kRemoteAccess, 5};
      if (work.is_read && work.has_imm) return {Code::kTransport, 6};
      if (network_.options_.copy && work.is_read)
        std::memcpy(work.local, reinterpret_cast<const void*>(work.remote_addr), work.bytes);
      else if (network_.options_.copy)
        std::memcpy(reinterpret_cast<void*>(work.remote_addr), work.local, work.bytes);
    }
    if (work.has_imm) to->inbox_.push_back(work.imm);
    if (work.has_imm && to->options_.waker) platform::notify_all(*to->options_.waker);
    return {};
  }

  FakeNetwork& network_;
  const provider::DomainOptions options_;
  size_t id_ = 0;
  provider::PeerId next_peer_ = 1;
  uint64_t num_registered_ = 0;
  std::map<provider::PeerId, size_t> peers_;
  std::map<uint64_t, provider::MemorySpan> regions_;
  std::vector<Posted> posted_, in_flight_;
  std::vector<uint32_t> inbox_;
  bool held_ = false, refused_ = false, refuse_connections_ = false, refuse_memory_ = false,
       reaches_gpus_ = false;
  size_t fail_count_ = 0;
  base::Status fail_status_;
  size_t max_in_flight_ = 0;
};

inline engine::DomainFactory FakeNetwork::factory() {
  return [this](const provider::DomainOptions& options) {
    return std::make_unique<FakeDomain>(*this, options);
  };
}

}  // namespace moe_p2p::test
