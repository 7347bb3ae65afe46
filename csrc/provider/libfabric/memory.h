// Registered memory of one NIC. Changed by control calls, read by the polling thread, under the
// Domain's gate; open(), which takes long, runs outside the gate where libfabric allows that.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "provider/libfabric/session.h"
#include "provider/provider.h"

namespace moe_p2p::provider::libfabric {

struct Region {
  MemorySpan span;
  Owned<MemoryRegion> mr;  // null: given back, the key is not used again
  void* descriptor = nullptr;
  bool leaving = false;  // being given back: takes no new writes
  bool closed = false;   // at libfabric; half a write may lie there (LibfabricDomain)
  // From here or, for reads, to here; accepted and not returned by libfabric.
  uint32_t num_writes = 0, num_reads = 0;

  bool contains(const std::byte* data, uint64_t bytes) const noexcept {
    return mr != nullptr && !leaving && data >= span.data && bytes <= span.bytes &&
           static_cast<uint64_t>(data - span.data) <= span.bytes - bytes;
  }
};

// Of each NIC's first region, its scratch, where we choose keys: peers write nothing there without
// knowing it (LibfabricDomain::end_half_writes).
inline constexpr uint64_t kScratchKey = 1;

class Regions {
 public:
  Regions(const Session& session, std::string name);

  // Registers at the NIC. One caller at a time; may run beside all other calls.
  Owned<MemoryRegion> open(const MemorySpan& span);
  MemoryKey add(const MemorySpan& span, Owned<MemoryRegion> mr);
  MemoryKey add(const MemorySpan& span) { return add(span, open(span)); }
  // Returns what to close, now or outside the gate.
  [[nodiscard]] Owned<MemoryRegion> remove(const MemoryKey& key);
  // For key.local_key; throws Error{kInvalidArgument} when it is not registered.
  Region& at(const MemoryKey& key);

  // Null: not a key of this NIC.
  Region* find(uint64_t local_key) noexcept {
    const uint64_t index = local_key - first_key_;
    return index < regions_.size() ? regions_[index].get() : nullptr;
  }
  Region& scratch() noexcept { return *regions_.front(); }  // the region added first

 private:
  uint64_t next_key();

  const Session& session_;
  const std::string name_;
  std::mt19937_64 random_{std::random_device{}()};
  const uint64_t first_key_ = random_() >> 1;  // keys of another NIC must not be found here
  std::vector<std::unique_ptr<Region>>
      regions_;  // each stays in place: posted writes point into it
};

}  // namespace moe_p2p::provider::libfabric
