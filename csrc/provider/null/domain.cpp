#include "provider/null/domain.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "base/letter.h"
#include "base/wire.h"
#include "provider/settings.h"

namespace moe_p2p::provider {
namespace {

using base::Code;

constexpr uint32_t kAddressTag = 0x6c6c756e;  // "null"

DomainLimits parse_limits(const std::string& text) {
  const Settings settings("null", text, {"max_in_flight", "max_write_bytes"});
  const DomainLimits standard;
  DomainLimits limits;
  limits.max_in_flight =
      static_cast<uint32_t>(settings.integer("max_in_flight", standard.max_in_flight, 1, 1u << 20));
  limits.max_write_bytes = static_cast<uint32_t>(
      settings.integer("max_write_bytes", standard.max_write_bytes, 1, 1u << 31));
  return limits;
}

class NullDomain final : public Domain {
 public:
  explicit NullDomain(const DomainOptions& options)
      : nic_(options.nic), limits_(parse_limits(options.settings)) {
    done_.resize(limits_.max_in_flight);
  }

  const char* provider_name() const noexcept override { return "null"; }
  DomainLimits limits() const noexcept override { return limits_; }

  base::Bytes address() const override {
    base::WireWriter out;
    base::put_letter(out, kAddressTag);
    out.put(static_cast<int32_t>(nic_));
    return out.take();
  }
  PeerId connect(std::span<const std::byte> address) override {
    base::WireReader in(address, "null address");
    base::expect_letter(in, kAddressTag, Code::kInvalidArgument,
                        base::concat("null NIC ", nic_, ": the address to connect to"));
    (void)in.get<int32_t>();
    in.expect_end();
    return next_id_.fetch_add(1, std::memory_order_relaxed);  // only has to be unique
  }
  void disconnect(PeerId) override {}
  MemoryKey register_memory(const MemorySpan& span) override {
    const uint64_t key = next_id_.fetch_add(1, std::memory_order_relaxed);  // as in connect()
    return {key, key, reinterpret_cast<uint64_t>(span.data)};
  }
  void unregister_memory(const MemoryKey&) override {}

  size_t post(std::span<const WorkRequest> requests) noexcept override {
    const size_t count = std::min(requests.size(), done_.size() - num_done_);
    for (size_t i = 0; i < count; ++i) done_[num_done_ + i] = requests[i].wr_id;
    num_done_ += count;
    return count;
  }
  size_t poll(std::span<Completion> completions) noexcept override {
    const size_t count = std::min(completions.size(), num_done_);
    for (size_t i = 0; i < count; ++i) completions[i] = {.wr_id = done_[--num_done_], .status = {}};
    return count;
  }
  bool idle() const noexcept override { return num_done_ == 0; }

 private:
  const int nic_;
  const DomainLimits limits_;
  std::vector<uint64_t> done_;  // a stack: the newest completes first
  size_t num_done_ = 0;
  std::atomic<PeerId> next_id_{1};
};

}  // namespace

std::unique_ptr<Domain> make_null_domain(const DomainOptions& options) {
  return std::make_unique<NullDomain>(options);
}

}  // namespace moe_p2p::provider
