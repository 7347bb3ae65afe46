#include "platform/cuda_context.h"

#include <map>
#include <mutex>

#include "base/log.h"

namespace moe_p2p::platform {

namespace {

constexpr int kRelaxedCapture = 2;  // as in cuda.h

}  // namespace

PrimaryContext::PrimaryContext(int device) {
  const auto check = [device](int error, const char* what) {
    MOE_P2P_CHECK(error == 0, base::Code::kTransport, what, " of cuda:", device, ": ",
                  driver_error(error));
  };
  check(driver().init(0), "starting the CUDA driver");
  check(driver().device_get(&handle_, device), "looking up the device");
  check(driver().context_retain(&context_, handle_), "retaining the primary context");
}

PrimaryContext::~PrimaryContext() { driver().context_release(handle_); }

const PrimaryContext& context_of(int device) {
  static std::mutex mutex;
  static auto* const contexts = new std::map<int, PrimaryContext>;
  const std::lock_guard lock(mutex);
  return contexts->try_emplace(device, device).first->second;
}

void relax_captures() noexcept {
  int mode = kRelaxedCapture;
  driver().capture_mode(&mode);
}

ControlGuard::ControlGuard(const PrimaryContext& context) noexcept
    : current_(context), mode_(kRelaxedCapture) {
  driver().capture_mode(&mode_);
}

ControlGuard::~ControlGuard() { driver().capture_mode(&mode_); }

}  // namespace moe_p2p::platform
