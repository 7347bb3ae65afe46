#include "provider/libfabric/domain.h"

#include <mutex>
#include <utility>

#include "base/log.h"
#include "provider/libfabric/fence.h"
#include "provider/libfabric/selection.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_libfabric_domain(const DomainOptions& options) {
  return std::make_unique<libfabric::LibfabricDomain>(options);
}

namespace libfabric {

using base::Code;
using platform::Clock;

namespace {

// How long a control call waits for writes in flight: unregister_memory() for writes that read the
// memory, the destructor for all. Too small: writes to a slow peer are lost. Too large: closing
// takes this long when a peer is dead.
constexpr auto kDrain = std::chrono::milliseconds(500);
// Polls after memory was given back, for writes that a software provider has received in part.
constexpr int kSettlePolls = 64;
constexpr size_t kCompletions = 64;

void warn_of_software(const Config& config) {
  static std::once_flag once;
  std::call_once(once, [&] {
    MOE_P2P_LOG(base::LogLevel::kWarning, "libfabric: provider=", config.provider,
                " was asked for. This is not RDMA: the CPU copies every byte; use provider=efa or "
                "transport verbs where there are NICs for it");
  });
}

}  // namespace

LibfabricDomain::LibfabricDomain(const DomainOptions& options)
    : config_(parse_config(options.settings)),
      sleeps_(options.waker != nullptr),
      session_(open_session(config_, options.nic)),
      name_(base::concat("libfabric NIC ", options.nic, " (", config_.provider, ", ",
                         describe(*session_.info), ")")),
      regions_(session_, name_),
      peers_(session_, name_),
      writes_(session_, config_, regions_, peers_, ready_) {
  if (config_.is_software()) warn_of_software(config_);
  ready_.reserve(config_.max_in_flight);
  const MemoryKey scratch = regions_.add({scratch_.data(), scratch_.size()});
  Address address = peers_.own_address();
  address.scratch_addr = scratch.remote_addr;
  address.scratch_key = scratch.remote_key;
  address_ = address.serialize(config_.provider);
}

// Still sends accepted writes and acknowledges received ones.
LibfabricDomain::~LibfabricDomain() {
  try {
    int quiet = 0;
    poll_until(Clock::now() + kDrain,
               [&] { return writes_.num_posted() == 0 && ++quiet > kSettlePolls; });
  } catch (const std::exception& error) {
    MOE_P2P_LOG(base::LogLevel::kWarning, name_, ": closing: ", error.what());
  }
}

DomainLimits LibfabricDomain::limits() const noexcept {
  const size_t most = session_.info->ep_attr->max_msg_size;
  return {.max_write_bytes = static_cast<uint32_t>(std::min<size_t>(config_.max_write_bytes, most)),
          .max_in_flight = config_.max_in_flight};
}

PeerId LibfabricDomain::connect(std::span<const std::byte> address) {
  Address parsed = Address::parse(address, config_.provider);
  const Gate::Control inside(gate_);
  return peers_.connect(std::move(parsed));
}

void LibfabricDomain::disconnect(PeerId peer) {
  const Gate::Control inside(gate_);
  Peer& leaving = peers_.at(peer);
  ready_.reserve(ready_.size() + config_.max_in_flight);
  writes_.fail(leaving, {Code::kClosed, 0});
  writes_.refill();
  peers_.disconnect(peer);
}

MemoryKey LibfabricDomain::register_memory(const MemorySpan& span) {
  const std::lock_guard lock(registering_);
  if (!session_.registers_beside_traffic()) {
    const Gate::Control inside(gate_);
    return regions_.add(span);
  }
  Owned<MemoryRegion> mr = regions_.open(span);
  const Gate::Control inside(gate_);
  return regions_.add(span, std::move(mr));
}

void LibfabricDomain::unregister_memory(const MemoryKey& key) {
  poll_until(Clock::now() + kDrain, [&] {
    Region& region = regions_.at(key);
    region.leaving = true;
    return region.num_writes + region.num_reads == 0;
  });
  {
    const std::lock_guard lock(registering_);
    Owned<MemoryRegion> mr;
    {
      const Gate::Control inside(gate_);
      // A software provider would still copy an answer there, whether or not the region is closed.
      const uint32_t num_reads = config_.is_software() ? regions_.at(key).num_reads : 0;
      MOE_P2P_CHECK(num_reads == 0, Code::kTimeout, name_, ": ", num_reads,
                    " reads into the memory to unregister are not answered after ", kDrain.count(),
                    " ms, and their peers may still answer: it stays registered, and must not be "
                    "freed before this NIC is closed");
      ready_.reserve(ready_.size() + config_.max_in_flight);
      writes_.fail(regions_.at(key), {Code::kClosed, 0});
      writes_.refill();
      mr = regions_.remove(key);
      if (!session_.registers_beside_traffic()) mr.reset();
    }
  }
  if (!config_.is_software()) return;
  int polls = 0;
  poll_until(Clock::now() + kDrain, [&] { return ++polls > kSettlePolls; });
}

std::string LibfabricDomain::why_no_fence() const {
  return libfabric::why_no_fence(config_, *session_.info);
}

std::string LibfabricDomain::failure() const {
  const Gate::Control inside(gate_);
  const auto& first = writes_.first_failure();
  return first ? base::concat(name_, ": ", libfabric::describe(*first)) : "";
}

template <typename Ready>
bool LibfabricDomain::poll_until(platform::Deadline deadline, Ready&& ready) {
  std::array<Completion, kCompletions> completions;
  while (Clock::now() <= deadline) {
    {
      const Gate::Control inside(gate_);
      if (ready()) return true;
      writes_.pump();
      const size_t count = read_queue(completions);
      ready_.reserve(ready_.size() + count + config_.max_in_flight);
      ready_.insert(ready_.end(), completions.begin(),
                    completions.begin() + static_cast<std::ptrdiff_t>(count));
    }
    sched_yield();
  }
  return false;
}

}  // namespace libfabric
}  // namespace moe_p2p::provider
