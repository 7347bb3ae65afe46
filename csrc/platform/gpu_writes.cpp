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

int attribute_of(int device, int attribute, const char* asking) {
  const DriverTable& cuda = driver();
  const auto check = [device](int error, const char* what) {
    MOE_P2P_CHECK(error == 0, Code::kUnavailable, what, " of GPU ", device, ": ",
                  driver_error(error));
  };
  int handle = 0, value = 0;
  check(cuda.init(0), "starting the CUDA driver");
  check(cuda.device_get(&handle, device), "looking up the device");
  check(cuda.device_attribute(&value, attribute, handle), asking);
  return value;
}

}  // namespace

bool orders_writes(int device) {
  return attribute_of(device, kWritesOrdering, "asking for the write order") >= kOwner;
}

GpuWriteFlush::GpuWriteFlush(int device, bool for_neighbours, bool always)
    : driver_(driver()), readers_(for_neighbours ? kAllDevices : kOwner), always_(always) {
  ordering_ = attribute_of(device, kWritesOrdering, "asking for the write order");
  const int options = attribute_of(device, kFlushOptions, "asking for ways to flush");
  if (ordering_ >= readers_ && !always_) return;
  MOE_P2P_CHECK((options & kFlushByHost) != 0 && driver_.flush_writes, Code::kUnavailable, "GPU ",
                device, " neither orders what a NIC writes (ordering ", ordering_,
                ") nor can flush; it cannot receive from a NIC");
  context_.emplace(device);
}

int GpuWriteFlush::flush(bool neighbours_read) const noexcept {
  const int readers = neighbours_read ? readers_ : kOwner;
  if (!context_ || (ordering_ >= readers && !always_)) return 0;
  static thread_local const bool relaxed = (relax_captures(), true);
  static_cast<void>(relaxed);
  const ContextGuard current(*context_);
  return current.error() != 0 ? current.error()
                              : driver_.flush_writes(kTargetCurrentContext, readers);
}

}  // namespace moe_p2p::platform
