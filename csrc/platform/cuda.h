// Launches kernels that moe_p2p/machine/jit.py compiled.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_p2p::platform {

struct Launch {
  uint64_t kernel = 0;  // CUfunction or CUkernel
  unsigned num_blocks = 0;
  unsigned num_threads = 0;
  unsigned shared_bytes = 0;  // dynamic, per block
  void* stream = nullptr;
  // The kernel may start before the previous one in the stream has ended (it waits by itself).
  bool overlap_previous = false;
};

// `params` is the kernel's one argument. Throws Error{kUnavailable} when there is no driver, and
// Error{kTransport} with the driver's own text when it refuses.
void launch_kernel(const Launch& launch, const void* params);

// True when this GPU memory may move between device and host (cudaMallocManaged), where no NIC and
// no copy engine of a peer finds it. False when the driver does not know.
bool is_managed(const void* address);

}  // namespace moe_p2p::platform
