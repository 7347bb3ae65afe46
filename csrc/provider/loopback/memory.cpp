#include "provider/loopback/memory.h"

#include <sched.h>

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::provider::loopback {

using base::Code;

// Every index that fits into a key exists, so a lookup needs no range check.
RegionTable::RegionTable(uint32_t owner, bool offset_addressing, SegmentHeader* header)
    : owner_(owner & kOwnerMask),
      offset_addressing_(offset_addressing),
      regions_(kMaxRegions),
      windows_(kMaxWindows),
      header_(header) {
  for (uint32_t i = kMaxRegions; i > 0; --i) free_.push_back(i - 1);
}

MemoryKey RegionTable::add(const MemorySpan& span) {
  std::lock_guard lock(mutex_);
  MOE_P2P_CHECK(!free_.empty(), Code::kResourceExhausted, "all ", kMaxRegions,
                " memory regions of this loopback NIC are taken; register larger spans");
  const uint32_t index = free_.back();
  free_.pop_back();
  Region& region = regions_[index];
  region.generation = region.generation % kGenerationMask + 1;  // never 0, so no key is 0
  const uint64_t key = owner_ << kOwnerShift | region.generation << kGenerationShift | index;
  const bool from_start = offset_addressing_ || span.kind == MemoryKind::kCuda;
  publish(region, key, span, from_start ? 0 : reinterpret_cast<uint64_t>(span.data));
  if (header_ && span.kind == MemoryKind::kCuda)
    lent_word(*header_, key).store(key | kRemoteBit, std::memory_order_seq_cst);
  return {.local_key = key, .remote_key = key | kRemoteBit, .remote_addr = region.remote_addr};
}

MemoryKind RegionTable::remove(const MemoryKey& key) {
  std::lock_guard lock(mutex_);
  const auto index = static_cast<uint32_t>(key.local_key & kIndexMask);
  Region& region = regions_[index];
  MOE_P2P_CHECK(matches(region, key.local_key), Code::kInvalidArgument,
                "unregistering a key that is not registered at this loopback NIC");
  if (header_) lent_word(*header_, key.local_key).store(0, std::memory_order_seq_cst);
  retire(region);
  free_.push_back(index);
  return region.kind;
}

// Pairs with CopyQueue::announce() and the load in Connection::start_copy: four seq_cst operations
// (store word, load number of copies begun; store the number, load the word).
void RegionTable::close() noexcept {
  if (!header_) return;
  for (auto& word : header_->lent) word.store(0, std::memory_order_seq_cst);
}

void RegionTable::map(uint64_t remote_key, const MemorySpan& local, bool lent) {
  std::lock_guard lock(mutex_);
  const auto find = [this](uint64_t key) {
    return std::ranges::find_if(windows_, [key](const Region& w) { return w.key == key; });
  };
  MOE_P2P_CHECK(remote_key != 0 && find(remote_key) == windows_.end(), Code::kInvalidArgument,
                "mapping memory of a peer whose key ", remote_key,
                remote_key == 0 ? " is none" : " is mapped at this loopback NIC already");
  const auto free = find(0);
  MOE_P2P_CHECK(free != windows_.end(), Code::kResourceExhausted, "all ", kMaxWindows,
                " windows of this loopback NIC are taken; disconnect peers that left");
  free->lent = lent;
  publish(*free, remote_key, local, 0);
  const auto end = static_cast<uint32_t>(free - windows_.begin()) + 1;
  // release: pairs with window_of().
  if (end > num_windows_.load(std::memory_order_relaxed))
    num_windows_.store(end, std::memory_order_release);
}

bool RegionTable::unmap(uint64_t remote_key) {
  std::lock_guard lock(mutex_);
  for (Region& window : windows_)
    if (matches(window, remote_key)) {
      retire(window);
      return true;
    }
  return false;
}

void RegionTable::publish(Region& region, uint64_t key, const MemorySpan& span,
                          uint64_t remote_addr) {
  region.data = span.data;
  region.bytes = span.bytes;
  region.kind = span.kind;
  region.remote_addr = remote_addr;
  // Publishes the fields above to matches().
  region.key.store(key, std::memory_order_seq_cst);
}

// Either the polling thread's key load comes after our store and finds no region, or its pass began
// before and our load finds `pass_` odd. Four seq_cst operations (store pass, load key; store key,
// load pass): with anything weaker both sides may read the old value.
void RegionTable::retire(Region& region) {
  region.key.store(0, std::memory_order_seq_cst);
  const uint64_t pass = pass_.load(std::memory_order_seq_cst);
  // acquire: pairs with the release in ~Pass.
  while (pass % 2 != 0 && pass_.load(std::memory_order_acquire) == pass) sched_yield();
}

}  // namespace moe_p2p::provider::loopback
