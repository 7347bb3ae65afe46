// GPU memory that this process maps, by GDRCopy: a library and a driver of NVIDIA that pin GPU
// memory and map it through the GPU's PCIe window. For words that the CPU stores and a kernel waits
// for. The mapping is write-combined: stores leave the core with a fence, and a load takes a round
// trip.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_p2p::platform {

class MappedGpuMemory {
 public:
  // Throws Error{kUnavailable} that names what is missing: library, driver, or what they refuse.
  // The memory begins on a page of 64 KiB and is whole pages.
  MappedGpuMemory(uint64_t address, uint64_t bytes, const std::vector<std::string>& files = {});
  ~MappedGpuMemory();  // before the memory is freed
  MappedGpuMemory(const MappedGpuMemory&) = delete;
  MappedGpuMemory& operator=(const MappedGpuMemory&) = delete;

  // Stores the aligned word there; fence() sends what was stored before on its way. One thread.
  void store(uint64_t offset, uint64_t value) noexcept {
    *reinterpret_cast<volatile uint64_t*>(data_ + offset) = value;
  }
  static void fence() noexcept;

 private:
  struct Functions;
  void release() noexcept;

  const Functions& functions_;
  const uint64_t bytes_;
  void* library_ = nullptr;   // gdr_t
  unsigned long handle_ = 0;  // gdr_mh_t
  bool pinned_ = false;
  void* mapped_ = nullptr;
  char* data_ = nullptr;
};

}  // namespace moe_p2p::platform
