#include "platform/cuda_context.h"

#include "base/log.h"

namespace moe_p2p::platform {

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

}  // namespace moe_p2p::platform
