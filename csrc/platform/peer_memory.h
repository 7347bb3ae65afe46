// GPU memory of one process that another one of this host maps, so that copies between GPUs go
// over NVLink and not through the host. Whole allocations are named by handles of the driver, which
// gives them for what cudaMalloc returned (torch's own allocator does), and not for virtual memory
// (its expandable segments) or pools. Control path only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/wire.h"

namespace moe_p2p::platform {

// What another process of this host needs to map the memory.
struct GpuMemoryDescription {
  base::Bytes bytes;
  std::string why_not;  // the driver gives no handle of it, and bytes is empty
};
GpuMemoryDescription describe_gpu_memory(const void* data, uint64_t bytes, int device);

// While it is open the driver keeps the memory, also when its owner has freed it or has ended; and
// it maps nothing else that the owner has at the same address by then (CUDA_ERROR_ALREADY_MAPPED).
// Memory may be opened several times: the driver counts.
class PeerMemory {
 public:
  // Maps what describe_gpu_memory() described for `device`. Throws Error{kUnavailable} with the
  // driver's text when it refuses, Error{kInvalidArgument} for other bytes.
  PeerMemory(std::span<const std::byte> description, int device);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  std::byte* data() const noexcept { return data_; }

 private:
  const int device_;
  uint64_t opened_ = 0;  // 0: memory of this process
  std::byte* data_ = nullptr;
};

}  // namespace moe_p2p::platform
