// The NICs of one GPU, opened and addressed together. Control path: may block, allocate and throw;
// any thread. A step that fails at one NIC is undone at the NICs before it, and its Error names the
// failing NIC. The polling thread uses the Domains directly, not through this class.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory_region.h"
#include "engine/request.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

using DomainFactory =
    std::function<std::unique_ptr<provider::Domain>(const provider::DomainOptions&)>;

class DomainGroup {
 public:
  // Opens NICs 0 .. num_nics-1. Every Error's text begins with `label`.
  DomainGroup(int num_nics, const provider::DomainOptions& options, const DomainFactory& factory,
              std::string label);

  int size() const noexcept { return static_cast<int>(domains_.size()); }
  provider::Domain& operator[](int nic) const noexcept {
    return *domains_[static_cast<size_t>(nic)];
  }

  bool needs_gpu_flush() const noexcept;  // any NIC does
  bool orders_writes() const noexcept;    // all NICs do
  EngineAddress address() const;
  // One id per local NIC. NIC i connects to the peer's NIC i mod its count.
  std::vector<provider::PeerId> connect(const EngineAddress& address, int priority, uint64_t tag);
  // Tries every NIC even when one of them fails; then throws the first failure.
  void disconnect(const std::vector<provider::PeerId>& rails);
  std::vector<provider::MemoryKey> register_memory(const provider::MemorySpan& span);
  // Tries every NIC, as disconnect() does.
  // withdrawn: by NIC, what an earlier call that threw got done; not done again.
  void unregister_memory(const std::vector<provider::MemoryKey>& keys,
                         std::vector<bool>& withdrawn);
  void announce(const RemoteRegion& region) const;  // Domain::announce() at every NIC
  std::string why_no_fence() const;  // Domain::why_no_fence() of the first NIC that has a reason
  // Domain::sever() at every NIC. Throws Error{kTimeout} at the deadline.
  void sever(uint64_t tag, platform::Deadline deadline);
  bool lends(const RemoteRegion& region) const;  // its peer does, to all NICs
  // Gives every NIC the window under the key of its rail, or drops it when `local` has no bytes.
  // Tries every NIC, as disconnect() does.
  void map_remote(const RemoteRegion& region, const provider::MemorySpan& local, bool lent = false);
  // What failed first at each NIC, in the providers' words; empty without a failure.
  std::string failure() const;
  // Closes all NICs; nothing completes any more.
  void close() noexcept { domains_.clear(); }

 private:
  std::string label_;
  std::vector<std::unique_ptr<provider::Domain>> domains_;
};

}  // namespace moe_p2p::engine
