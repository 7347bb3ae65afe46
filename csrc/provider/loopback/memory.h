// The registered memory of one NIC, and its windows: GPU memory of peers that is mapped here. Any
// thread adds and removes both while the polling thread uses them; the polling thread never waits.
//
// A key is  1 remote | 23 owner | 28 generation | 12 index : this refuses a key that was given
// back, a key of another NIC, and a local key in place of a remote one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "provider/loopback/channel.h"
#include "provider/provider.h"

namespace moe_p2p::provider::loopback {

class RegionTable {
 public:
  // Too small: a NIC cannot map memory of more peers on this host. Searched from the
  // one that was found last.
  static constexpr uint32_t kMaxWindows = 1024;

  // `owner` distinguishes the keys of different NICs. Remote addresses are virtual, or count from
  // the region's start; GPU memory's always count from it, because peers map it at another address.
  // header: of this NIC's segment; null: no memory is lent.
  RegionTable(uint32_t owner, bool offset_addressing, SegmentHeader* header = nullptr);

  // --- any thread --- Throws Error{kResourceExhausted} when all regions are taken.
  MemoryKey add(const MemorySpan& span);
  // When it returns the polling thread does not use the region any more. Returns the region's kind.
  // Throws Error{kInvalidArgument} for an unknown key.
  MemoryKind remove(const MemoryKey& key);
  // GPU memory is no longer lent to peers. Their NICs either have announced a copy by then, or see
  // this before they begin one.
  void close() noexcept;
  // Likewise for windows, by the peer's key. lent: its owner may take it back at any time. unmap()
  // returns false for an unknown key.
  void map(uint64_t remote_key, const MemorySpan& local, bool lent);
  bool unmap(uint64_t remote_key);

  // --- polling thread --- Surrounds every use of find_*() and its results: remove() and unmap()
  // wait for the end of the current pass.
  class Pass {
   public:
    explicit Pass(RegionTable& table) noexcept : pass_(table.pass_) {
      // seq_cst: together with the load in matches(), pairs with retire(); see there.
      pass_.store(pass_.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    }
    ~Pass() {
      // release: pairs with the acquire in retire(): copies of this pass precede its return.
      pass_.store(pass_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    std::atomic<uint64_t>& pass_;
  };

  // Target of a peer's write of `bytes`; null when it is not allowed.
  struct Target {
    std::byte* data = nullptr;
    MemoryKind kind = MemoryKind::kHost;
  };
  Target find_remote(uint64_t key, uint64_t addr, uint64_t bytes) const noexcept {
    const Region& region = regions_[key & kIndexMask];
    if ((key & kRemoteBit) == 0 || !matches(region, key & ~kRemoteBit)) return {};
    const uint64_t offset = addr - region.remote_addr;
    if (!contains(region, offset, bytes)) return {};
    return {region.data + offset, region.kind};
  }
  // Kind of [local, local + bytes) under this local key; nothing when it may not be read.
  std::optional<MemoryKind> find_local(uint64_t key, const std::byte* local,
                                       uint64_t bytes) const noexcept {
    const Region& region = regions_[key & kIndexMask];
    if (!matches(region, key)) return std::nullopt;
    const auto offset = reinterpret_cast<uint64_t>(local) - reinterpret_cast<uint64_t>(region.data);
    if (!contains(region, offset, bytes)) return std::nullopt;
    return region.kind;
  }
  // A window whose owner does not take it back.
  bool has_kept_window(uint64_t remote_key) const noexcept {
    const Region* const window = window_of(remote_key);
    return window != nullptr && !window->lent;
  }
  // Where GPU memory of a peer is mapped here; null when not all of it is.
  struct Window {
    std::byte* data = nullptr;
    bool lent = false;
  };
  Window find_window(uint64_t remote_key, uint64_t addr, uint64_t bytes) const noexcept {
    const Region* const window = window_of(remote_key);
    if (window == nullptr || !contains(*window, addr, bytes)) return {};
    return {window->data + addr, window->lent};
  }
  // Where the owner of a lent window says whether it still lends it: the key, or another value.
  static std::atomic<uint64_t>& lent_word(SegmentHeader& owner, uint64_t remote_key) noexcept {
    return owner.lent[remote_key & kIndexMask];
  }

 private:
  static constexpr uint64_t kIndexMask = kMaxRegions - 1;
  static constexpr int kGenerationShift = 12;
  static constexpr uint64_t kGenerationMask = 0xfffffff;
  static constexpr int kOwnerShift = 40;
  static constexpr uint64_t kOwnerMask = 0x7fffff;
  static constexpr uint64_t kRemoteBit = uint64_t{1} << 63;

  struct Region {
    // The local key, or a window's peer's key; 0 while free. seq_cst store by publish() and
    // retire(), seq_cst load by matches().
    std::atomic<uint64_t> key{0};
    std::byte* data = nullptr;  // from here: changes only while no pass can see the key
    uint64_t bytes = 0;
    uint64_t remote_addr = 0;
    uint64_t generation = 0;
    MemoryKind kind = MemoryKind::kHost;
    bool lent = false;
  };

  const Region* window_of(uint64_t remote_key) const noexcept {
    const uint32_t end = num_windows_.load(std::memory_order_acquire);  // pairs with map()
    for (uint32_t i = 0; i < end; ++i) {
      const Region& window = windows_[last_window_];
      if (matches(window, remote_key)) return &window;
      last_window_ = last_window_ + 1 < end ? last_window_ + 1 : 0;
    }
    return nullptr;
  }
  static void publish(Region& region, uint64_t key, const MemorySpan& span, uint64_t remote_addr);
  void retire(Region& region);
  static bool matches(const Region& region, uint64_t key) noexcept {
    return key != 0 && region.key.load(std::memory_order_seq_cst) == key;
  }
  static bool contains(const Region& region, uint64_t offset, uint64_t bytes) noexcept {
    return offset <= region.bytes && bytes <= region.bytes - offset;
  }

  const uint64_t owner_;
  const bool offset_addressing_;
  std::vector<Region> regions_;           // [kMaxRegions]
  std::vector<Region> windows_;           // [kMaxWindows], the first free one is taken
  std::atomic<uint32_t> num_windows_{0};  // one past the highest that was ever taken
  mutable uint32_t last_window_ = 0;      // that was found; polling thread
  SegmentHeader* const header_;
  std::vector<uint32_t> free_;
  std::mutex mutex_;               // between control calls
  std::atomic<uint64_t> pass_{0};  // odd during a pass of the polling thread
};

}  // namespace moe_p2p::provider::loopback
