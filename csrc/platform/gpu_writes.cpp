#include "platform/gpu_writes.h"

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// As in cuda.h of CUDA 11.3 and later.
constexpr int kFlushOptions = 117, kWritesOrdering = 118;
constexpr int kFlushByHost = 1;
constexpr int kTargetCurrentContext = 0;
// For which readers writes are ordered, or a flush is made.
constexpr int kOwner = 100, kAllDevices = 200;

}  // namespace

GpuWriteFlush::GpuWriteFlush(int device, bool for_neighbours)
    : driver_(driver()), readers_(for_neighbours ? kAllDevices : kOwner) {
  const auto check = [device](int error, const char* what) {
    MOE_P2P_CHECK(error == 0, Code::kUnavailable, what, " of GPU ", device, ": ",
                  driver_error(error));
  };
  int handle = 0, ordering = 0, options = 0;
  check(driver_.init(0), "starting the CUDA driver");
  check(driver_.device_get(&handle, device), "looking up the device");
  check(driver_.device_attribute(&ordering, kWritesOrdering, handle), "asking for the write order");
  check(driver_.device_attribute(&options, kFlushOptions, handle), "asking for ways to flush");
  if (ordering >= readers_) return;
  MOE_P2P_CHECK((options & kFlushByHost) != 0 && driver_.flush_writes, Code::kUnavailable, "GPU ",
                device, " neither orders what a NIC writes (ordering ", ordering,
                ") nor can flush; it cannot receive from a NIC");
  context_.emplace(device);
}

int GpuWriteFlush::flush() const noexcept {
  if (!context_) return 0;
  const ContextGuard current(*context_);
  return current.error() != 0 ? current.error()
                              : driver_.flush_writes(kTargetCurrentContext, readers_);
}

}  // namespace moe_p2p::platform
