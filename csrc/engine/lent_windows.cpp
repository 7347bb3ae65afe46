#include "engine/lent_windows.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace moe_p2p::engine {
namespace {

// As for a descriptor that was resolved twice, for two classes.
bool same_keys(const RemoteRegion& a, const RemoteRegion& b) noexcept {
  return std::ranges::equal(a.rails, b.rails, {}, &RemoteRegion::Rail::remote_key,
                            &RemoteRegion::Rail::remote_key);
}

}  // namespace

LentWindows::LentWindows(DomainGroup& group, std::string label)
    : group_(group), label_(std::move(label)), used_(group[0].writes_to_lent_memory()) {}

base::Bytes LentWindows::describe(const provider::MemorySpan& span) {
  if (!used_ || span.kind != provider::MemoryKind::kCuda) return {};
  auto found = platform::describe_gpu_memory(span.data, span.bytes, span.device);
  if (found.bytes.empty() && !kept_.exchange(true))
    MOE_P2P_LOG(base::LogLevel::kInfo, label_, ": memory of GPU ", span.device,
                " cannot be mapped by other processes, so what they write to it goes through the "
                "host, which is slower, unless they map it in another way (torch's expandable "
                "segments and pools are such memory): ",
                found.why_not);
  return std::move(found.bytes);
}

void LentWindows::open(int device) {
  const std::lock_guard lock(mutex_);
  if (!used_ || device_ >= 0) return;
  device_ = device;
  for (Window& window : windows_) map(window);
}

void LentWindows::add(const RemoteRegion& region, const base::Bytes& shared) {
  if (!used_ || shared.empty()) return;
  const std::lock_guard lock(mutex_);
  if (std::ranges::any_of(windows_, [&](const Window& w) { return w.region == &region; })) return;
  drop_ended();
  windows_.push_back({&region, shared});
  if (device_ >= 0) map(windows_.back());
}

void LentWindows::drop_ended() {
  for (Window& window : windows_) {
    if (!window.memory || group_.lends(*window.region)) continue;
    try {
      unmap(window);
      window = {};
    } catch (const base::Error&) {  // copies run that had begun before; a later call tries again
    }
  }
  std::erase_if(windows_, [](const Window& window) { return window.region == nullptr; });
}

void LentWindows::map(Window& window) noexcept {
  const auto same = std::ranges::find_if(windows_, [&](const Window& other) {
    return other.memory && same_keys(*other.region, *window.region);
  });
  if (same != windows_.end()) {
    window.memory = same->memory;
    return;
  }
  try {
    window.memory = std::make_shared<platform::PeerMemory>(window.shared, device_);
    const provider::MemorySpan local{window.memory->data(), window.region->bytes,
                                     provider::MemoryKind::kCuda, device_};
    group_.map_remote(*window.region, local, /*lent=*/true);
  } catch (const base::Error& error) {
    window.memory.reset();
    if (std::exchange(refused_, true)) return;
    MOE_P2P_LOG(base::LogLevel::kWarning, label_,
                ": GPU memory of a peer is not mapped here, so writes to it go through the host, "
                "which is slower: ",
                error.what());
  }
}

bool LentWindows::remove(const RemoteRegion& region) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::ranges::find_if(windows_, [&](const Window& w) { return w.region == &region; });
  if (found == windows_.end()) return true;
  const bool last = found->memory.use_count() <= 1;
  unmap(*found);
  windows_.erase(found);
  return last;
}

void LentWindows::unmap(const Window& window) {
  if (window.memory.use_count() == 1) group_.map_remote(*window.region, {});
}

}  // namespace moe_p2p::engine
