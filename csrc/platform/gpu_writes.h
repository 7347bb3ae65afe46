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

class GpuWriteFlush {
 public:
  // For memory of `device` that the device itself reads, or with `for_neighbours` other GPUs as
  // well. Throws Error{kUnavailable} without a driver, or when the device orders too little and
  // cannot flush.
  GpuWriteFlush(int device, bool for_neighbours);

  bool needed() const noexcept { return context_.has_value(); }
  // When it returns 0, all writes whose completions were seen before are visible to the readers.
  // Otherwise returns a CUresult. Polling thread; about a microsecond (1.4 us on a H200, driver
  // 580).
  int flush() const noexcept;

 private:
  const DriverTable& driver_;
  const int readers_;
  std::optional<PrimaryContext> context_;
};

}  // namespace moe_p2p::platform
