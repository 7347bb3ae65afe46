#include "engine/domain_group.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/context.h"
#include "base/log.h"

namespace moe_p2p::engine {

using base::Code;
using base::Error;
using base::with_context;

namespace {

// Runs step(0 .. count-1), all of them, then throws the first failure.
template <typename Step>
void for_all(size_t count, Step&& step) {
  std::optional<Error> first;
  for (size_t i = 0; i < count; ++i) {
    try {
      step(i);
    } catch (const Error& error) {
      if (!first) first = error;
    }
  }
  if (first) throw *first;
}

// Returns make(0 .. count-1). When one throws, undoes what was already made.
template <typename Made, typename Make, typename Undo>
std::vector<Made> all_or_none(size_t count, Make&& make, Undo&& undo) {
  std::vector<Made> made;
  try {
    for (size_t i = 0; i < count; ++i) made.push_back(make(i));
  } catch (...) {
    try {
      for_all(made.size(), [&](size_t i) { undo(i, made[i]); });
    } catch (const Error& error) {
      MOE_P2P_LOG(base::LogLevel::kWarning,
                  "undoing a step that failed at a later NIC: ", error.what());
    }
    throw;
  }
  return made;
}

std::string describe(const provider::MemorySpan& span) {
  const std::string size = base::concat(span.bytes, " bytes of ");
  return span.kind == provider::MemoryKind::kCuda
             ? base::concat(size, "CUDA memory of device ", span.device)
             : size + "host memory";
}

}  // namespace

DomainGroup::DomainGroup(int num_nics, const provider::DomainOptions& options,
                         const DomainFactory& factory, std::string label)
    : label_(std::move(label)) {
  MOE_P2P_CHECK(num_nics >= 1 && num_nics <= kMaxNics, Code::kInvalidArgument, label_,
                ": num_nics is ", num_nics, ", must be 1 to ", kMaxNics);
  for (int nic = 0; nic < num_nics; ++nic) {
    provider::DomainOptions nic_options = options;
    nic_options.nic = nic;
    domains_.push_back(with_context(base::concat(label_, ": opening NIC ", nic),
                                    [&] { return factory(nic_options); }));
  }
}

bool DomainGroup::needs_gpu_flush() const noexcept {
  return std::ranges::any_of(domains_,
                             [](const auto& domain) { return domain->needs_gpu_flush(); });
}

bool DomainGroup::orders_writes() const noexcept {
  return std::ranges::all_of(domains_, [](const auto& domain) { return domain->orders_writes(); });
}

EngineAddress DomainGroup::address() const {
  EngineAddress address;
  for (const auto& domain : domains_) address.nics.push_back(domain->address());
  return address;
}

std::vector<provider::PeerId> DomainGroup::connect(const EngineAddress& address, int priority,
                                                   uint64_t tag) {
  MOE_P2P_CHECK(!address.nics.empty(), Code::kInvalidArgument, label_,
                ": connecting to an address without NICs");
  const auto make = [&](size_t nic) {
    const size_t remote_nic = nic % address.nics.size();
    return with_context(
        base::concat(label_, ": connecting NIC ", nic, " to NIC ", remote_nic, " of the peer"),
        [&] { return domains_[nic]->connect_for(address.nics[remote_nic], priority, tag); });
  };
  const auto undo = [&](size_t nic, provider::PeerId peer) { domains_[nic]->disconnect(peer); };
  return all_or_none<provider::PeerId>(domains_.size(), make, undo);
}

void DomainGroup::disconnect(const std::vector<provider::PeerId>& rails) {
  for_all(rails.size(), [&](size_t nic) {
    with_context(base::concat(label_, ": disconnecting NIC ", nic),
                 [&] { domains_[nic]->disconnect(rails[nic]); });
  });
}

std::vector<provider::MemoryKey> DomainGroup::register_memory(const provider::MemorySpan& span) {
  MOE_P2P_CHECK(span.data != nullptr && span.bytes > 0, Code::kInvalidArgument, label_,
                ": registering ", describe(span), " at address ",
                static_cast<const void*>(span.data), ": must be memory of at least one byte");
  const auto make = [&](size_t nic) {
    return with_context(base::concat(label_, ": registering ", describe(span), " at NIC ", nic),
                        [&] { return domains_[nic]->register_memory(span); });
  };
  const auto undo = [&](size_t nic, const provider::MemoryKey& key) {
    domains_[nic]->unregister_memory(key);
  };
  return all_or_none<provider::MemoryKey>(domains_.size(), make, undo);
}

void DomainGroup::unregister_memory(const std::vector<provider::MemoryKey>& keys,
                                    std::vector<bool>& withdrawn) {
  withdrawn.resize(keys.size());
  for_all(keys.size(), [&](size_t nic) {
    if (withdrawn[nic]) return;
    with_context(base::concat(label_, ": unregistering memory at NIC ", nic),
                 [&] { domains_[nic]->unregister_memory(keys[nic]); });
    withdrawn[nic] = true;
  });
}

void DomainGroup::announce(const RemoteRegion& region) const {
  for (size_t nic = 0; nic < domains_.size(); ++nic)
    domains_[nic]->announce(region.rails[nic].peer, region.rails[nic].remote_key);
}

std::string DomainGroup::why_no_fence() const {
  for (const auto& domain : domains_)
    if (std::string why = domain->why_no_fence(); !why.empty()) return why;
  return {};
}

void DomainGroup::sever(uint64_t tag, platform::Deadline deadline) {
  for (const auto& domain : domains_) domain->sever(tag, {});  // begins at all of them
  for_all(domains_.size(), [&](size_t nic) {
    MOE_P2P_CHECK(domains_[nic]->sever(tag, deadline), Code::kTimeout, label_,
                  ": the queue pairs of a peer have not ended at NIC ", nic,
                  " in time; does a thread poll it?");
  });
}

void DomainGroup::map_remote(const RemoteRegion& region, const provider::MemorySpan& local,
                             bool lent) {
  for_all(domains_.size(), [&](size_t nic) {
    with_context(base::concat(label_, ": mapping ", describe(local), " of a peer at NIC ", nic),
                 [&] { domains_[nic]->map_remote(region.rails[nic].remote_key, local, lent); });
  });
}

bool DomainGroup::lends(const RemoteRegion& region) const {
  for (size_t nic = 0; nic < domains_.size(); ++nic)
    if (!domains_[nic]->lends(region.rails[nic].peer, region.rails[nic].remote_key)) return false;
  return true;
}

std::string DomainGroup::failure() const {
  std::string all;
  for (const auto& domain : domains_) {
    const std::string one = domain->failure();
    if (!one.empty()) all += (all.empty() ? "" : "; ") + one;
  }
  return all;
}

}  // namespace moe_p2p::engine
