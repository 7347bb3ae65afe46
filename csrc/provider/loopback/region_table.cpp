#include "provider/loopback/region_table.h"

#include <sched.h>

#include "base/log.h"

namespace moe_p2p::provider::loopback {

using base::Code;

// Every index that a key can name exists, so a lookup needs no range check.
RegionTable::RegionTable(uint32_t owner, bool offset_addressing)
    : owner_(owner & kOwnerMask), offset_addressing_(offset_addressing), regions_(kMaxRegions) {
  for (uint32_t i = kMaxRegions; i > 0; --i) free_.push_back(i - 1);
}

MemoryKey RegionTable::add(const MemorySpan& span) {
  std::lock_guard lock(mutex_);
  MOE_P2P_CHECK(!free_.empty(), Code::kResourceExhausted, "all ", kMaxRegions,
                " memory regions of this loopback NIC are taken; register larger spans");
  const uint32_t index = free_.back();
  free_.pop_back();
  Region& region = regions_[index];
  region.data = span.data;
  region.bytes = span.bytes;
  region.remote_addr = offset_addressing_ ? 0 : reinterpret_cast<uint64_t>(span.data);
  region.generation = region.generation % kGenerationMask + 1;  // never 0, so no key is 0
  const uint64_t key = owner_ << kOwnerShift | region.generation << kGenerationShift | index;
  // Publishes the fields above to matches().
  region.key.store(key, std::memory_order_seq_cst);
  return {.local_key = key, .remote_key = key | kRemoteBit, .remote_addr = region.remote_addr};
}

// Either the polling thread's key load comes after our store and it sees the region gone, or its
// pass began before and our load sees it odd. Four seq_cst operations (store pass, load key; store
// key, load pass): with anything weaker both sides may read the old value.
void RegionTable::remove(const MemoryKey& key) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<uint32_t>(key.local_key & kIndexMask);
  Region& region = regions_[index];
  MOE_P2P_CHECK(matches(region, key.local_key), Code::kInvalidArgument,
                "unregistering a key that is not registered at this loopback NIC");
  region.key.store(0, std::memory_order_seq_cst);
  const uint64_t pass = pass_.load(std::memory_order_seq_cst);
  // acquire: pairs with the release in ~Pass.
  while (pass % 2 != 0 && pass_.load(std::memory_order_acquire) == pass) sched_yield();
  free_.push_back(index);
}

}  // namespace moe_p2p::provider::loopback
