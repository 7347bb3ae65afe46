// The registered memory of one NIC. Any thread adds and removes regions while the polling thread
// looks them up and copies; the polling thread never waits.
//
// A key is  1 remote | 23 owner | 28 generation | 12 index : one that was given back, one of another
// NIC, and a local key where a remote one belongs are all refused.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "provider/provider.h"

namespace moe_p2p::provider::loopback {

class RegionTable {
 public:
  // Too small: a KV cache that registers its layers one by one is refused.
  static constexpr uint32_t kMaxRegions = 1u << 12;

  // `owner` tells the keys of different NICs apart. Remote addresses are virtual, or count from the
  // region's start.
  RegionTable(uint32_t owner, bool offset_addressing);

  // --- any thread ---
  // Throws Error{kResourceExhausted} when all are taken.
  MemoryKey add(const MemorySpan& span);
  // When it returns the polling thread touches the region no more. Throws Error{kInvalidArgument}
  // for a key that is not here.
  void remove(const MemoryKey& key);

  // --- polling thread ---
  // Around all use of pointers from find_*: remove() waits for the end of a pass that is under way.
  class Pass {
   public:
    explicit Pass(RegionTable& table) noexcept : pass_(table.pass_) {
      // seq_cst: with the load in matches() on one side and remove() on the other; see remove().
      pass_.store(pass_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    }
    ~Pass() {
      // release: pairs with the acquire in remove(): copies of this pass come before its return.
      pass_.store(pass_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    std::atomic<uint64_t>& pass_;
  };

  // Where a peer's write of `bytes` goes, or null.
  std::byte* find_remote(uint64_t key, uint64_t addr, uint64_t bytes) const noexcept {
    const Region& region = regions_[key & kIndexMask];
    if ((key & kRemoteBit) == 0 || !matches(region, key & ~kRemoteBit)) return nullptr;
    const uint64_t offset = addr - region.remote_addr;
    return contains(region, offset, bytes) ? region.data + offset : nullptr;
  }
  // May [local, local + bytes) be read under this local key?
  bool find_local(uint64_t key, const std::byte* local, uint64_t bytes) const noexcept {
    const Region& region = regions_[key & kIndexMask];
    if (!matches(region, key)) return false;
    const auto offset = reinterpret_cast<uint64_t>(local) - reinterpret_cast<uint64_t>(region.data);
    return contains(region, offset, bytes);
  }

 private:
  static constexpr uint64_t kIndexMask = kMaxRegions - 1;
  static constexpr int kGenerationShift = 12;
  static constexpr uint64_t kGenerationMask = 0xfffffff;
  static constexpr int kOwnerShift = 40;
  static constexpr uint64_t kOwnerMask = 0x7fffff;
  static constexpr uint64_t kRemoteBit = uint64_t{1} << 63;

  struct Region {
    // The local key, 0 while free. seq_cst store by add() and remove(), seq_cst load by matches().
    std::atomic<uint64_t> key{0};
    std::byte* data = nullptr;  // the rest changes only while no pass can see the key
    uint64_t bytes = 0;
    uint64_t remote_addr = 0;
    uint64_t generation = 0;
  };

  static bool matches(const Region& region, uint64_t local_key) noexcept {
    return local_key != 0 && region.key.load(std::memory_order_seq_cst) == local_key;
  }
  static bool contains(const Region& region, uint64_t offset, uint64_t bytes) noexcept {
    return offset <= region.bytes && bytes <= region.bytes - offset;
  }

  const uint64_t owner_;
  const bool offset_addressing_;
  std::vector<Region> regions_;
  std::vector<uint32_t> free_;
  std::mutex mutex_;               // add() and remove() of several threads
  std::atomic<uint64_t> pass_{0};  // odd while the polling thread is in a pass
};

}  // namespace moe_p2p::provider::loopback
