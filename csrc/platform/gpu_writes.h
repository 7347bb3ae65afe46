// A NIC's writes into GPU memory are not always visible to all readers at once. A GPU reports for
// whom they are ordered (0: no reader, 100: the GPU that owns the memory, 200: all GPUs). Below 200
// the thread that sees a NIC's completion must flush before it notifies GPUs that read the memory
// over NVLink, below 100 before it notifies any reader. Used by the engine's polling thread.
#pragma once

#include <cstdint>
#include <optional>

#include "platform/cuda_context.h"
#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

// Whether the device orders what NICs write for its own kernels. Throws Error{kUnavailable} without
// a driver.
bool orders_writes(int device);

class GpuWriteFlush {
 public:
  // For memory of `device` that the device itself reads, or with `for_neighbours` other GPUs as
  // well. Throws Error{kUnavailable} without a driver, or when the device orders too little and
  // cannot flush.
  // always: flushes whatever the device orders, for a flag that reaches it by another way.
  GpuWriteFlush(int device, bool for_neighbours, bool always = false);

  bool needed() const noexcept { return context_.has_value(); }
  // When it returns 0, all writes whose completions were seen before are visible to the device and,
  // if this is for neighbours and they read, to them. Otherwise returns a CUresult. Polling thread;
  // about a microsecond (on a H200, driver 580, 1.4 us for all devices, 0.35 for the owner).
  int flush(bool neighbours_read = true) const noexcept;

 private:
  const DriverTable& driver_;
  const int readers_;
  const bool always_;
  int ordering_ = 0;  // for whom the device orders writes by itself
  std::optional<PrimaryContext> context_;
};

}  // namespace moe_p2p::platform
