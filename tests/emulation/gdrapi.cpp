// Stands in for GDRCopy's library where GPU memory is the host's. What gdr_map() gives is as the
// real mapping is: stores to it reach the memory some time later, each word by itself and in any
// order, and of several stores to one word the last alone may. Loads return what was stored last,
// but never what kernels have stored.
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t kPage = 65536;

struct Mapping {
  uint64_t address = 0, bytes = 0;
  uint64_t* staged = nullptr;
  std::vector<uint64_t> carried;  // of each word, the last value that has reached the memory
};

struct Gdr {
  std::mutex mutex;
  std::vector<Mapping> mappings;  // by handle
  std::mt19937 random{7};
  std::jthread carrier;

  // Carries some of the words that have changed.
  void carry(Mapping& mapping, bool all) {
    for (size_t i = 0; mapping.staged && i < mapping.carried.size(); ++i) {
      const uint64_t word = std::atomic_ref(mapping.staged[i]).load(std::memory_order_acquire);
      if (word == mapping.carried[i] || (!all && random() % 2 != 0)) continue;
      std::atomic_ref(reinterpret_cast<uint64_t*>(mapping.address)[i])
          .store(word, std::memory_order_release);
      mapping.carried[i] = word;
    }
  }
  void run(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      {
        const std::lock_guard lock(mutex);
        for (Mapping& mapping : mappings) carry(mapping, false);
      }
      std::this_thread::yield();
    }
  }
};

struct Handle {
  unsigned long number;
};
struct Info {
  uint64_t va, mapped_size;
  uint32_t page_size;
  uint64_t cycles;
  uint32_t cycles_per_ms;
  unsigned mapped : 1, wc : 1;
  int type;
};

}  // namespace

extern "C" {

void* gdr_open() {
  auto* gdr = new Gdr;
  gdr->carrier = std::jthread([gdr](const std::stop_token& stop) { gdr->run(stop); });
  return gdr;
}
int gdr_close(void* gdr) {
  delete static_cast<Gdr*>(gdr);
  return 0;
}
int gdr_pin_buffer(void* opaque, unsigned long address, size_t bytes, uint64_t, uint32_t,
                   Handle* handle) {
  if (address % kPage != 0 || bytes % kPage != 0) return 22;
  auto& gdr = *static_cast<Gdr*>(opaque);
  const std::lock_guard lock(gdr.mutex);
  handle->number = gdr.mappings.size();
  gdr.mappings.push_back({address, bytes, nullptr, {}});
  return 0;
}
int gdr_unpin_buffer(void*, Handle) { return 0; }
int gdr_map(void* opaque, Handle handle, void** to, size_t bytes) {
  auto& gdr = *static_cast<Gdr*>(opaque);
  const std::lock_guard lock(gdr.mutex);
  Mapping& mapping = gdr.mappings[handle.number];
  void* const made =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return 12;
  mapping.staged = static_cast<uint64_t*>(made);
  mapping.carried.assign(bytes / 8, 0);
  *to = made;
  return 0;
}
int gdr_unmap(void* opaque, Handle handle, void* at, size_t bytes) {
  auto& gdr = *static_cast<Gdr*>(opaque);
  const std::lock_guard lock(gdr.mutex);
  Mapping& mapping = gdr.mappings[handle.number];
  gdr.carry(mapping, true);
  mapping.staged = nullptr;
  return munmap(at, bytes);
}
int gdr_get_info_v2(void* opaque, Handle handle, Info* info) {
  auto& gdr = *static_cast<Gdr*>(opaque);
  const std::lock_guard lock(gdr.mutex);
  const Mapping& mapping = gdr.mappings[handle.number];
  *info = {mapping.address, mapping.bytes, kPage, 0, 0, 1, 1, 1};
  return 0;
}

}  // extern "C"
