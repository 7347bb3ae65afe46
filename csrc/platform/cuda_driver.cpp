#include "platform/cuda_driver.h"

#include <dlfcn.h>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

#if defined(MOE_P2P_TESTING)
const DriverTable* stand_in = nullptr;
#endif

template <typename Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  MOE_P2P_CHECK(function, Code::kUnavailable, "libcuda.so.1 has no ", name,
                "; the driver is older than CUDA 11.8");
}

// A suffix is the version of the interface that cuda.h of CUDA 11.8 and later gives the plain name.
DriverTable load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  MOE_P2P_CHECK(library, Code::kUnavailable, "libcuda.so.1 cannot be opened: ", dlerror(),
                "; is the NVIDIA driver installed?");
  DriverTable table{};
  load(library, "cuGetErrorString", table.error_string);
  load(library, "cuInit", table.init);
  load(library, "cuDeviceGet", table.device_get);
  load(library, "cuDeviceGetAttribute", table.device_attribute);
  load(library, "cuDevicePrimaryCtxRetain", table.context_retain);
  load(library, "cuDevicePrimaryCtxRelease_v2", table.context_release);
  load(library, "cuCtxSetCurrent", table.context_set);
  load(library, "cuCtxPushCurrent_v2", table.context_push);
  load(library, "cuCtxPopCurrent_v2", table.context_pop);
  load(library, "cuThreadExchangeStreamCaptureMode", table.capture_mode);
  load(library, "cuCtxGetStreamPriorityRange", table.priority_range);
  load(library, "cuStreamCreateWithPriority", table.stream_create);
  load(library, "cuStreamDestroy_v2", table.stream_destroy);
  load(library, "cuEventCreate", table.event_create);
  load(library, "cuEventRecord", table.event_record);
  load(library, "cuEventQuery", table.event_query);
  load(library, "cuEventDestroy_v2", table.event_destroy);
  load(library, "cuMemcpyDtoDAsync_v2", table.copy_async);
  load(library, "cuLaunchKernelEx", table.launch);
  table.flush_writes =
      reinterpret_cast<decltype(table.flush_writes)>(dlsym(library, "cuFlushGPUDirectRDMAWrites"));
  table.export_dmabuf = reinterpret_cast<decltype(table.export_dmabuf)>(
      dlsym(library, "cuMemGetHandleForAddressRange"));
  return table;
}

}  // namespace

const DriverTable& driver() {
#if defined(MOE_P2P_TESTING)
  if (stand_in) return *stand_in;
#endif
  static const DriverTable loaded = load_driver();
  return loaded;
}

std::string driver_error(int error) {
  const char* text = nullptr;
  driver().error_string(error, &text);
  return base::concat(text ? text : "unknown error", " (", error, ")");
}

#if defined(MOE_P2P_TESTING)
void set_driver_for_tests(const DriverTable* table) noexcept { stand_in = table; }
#endif

}  // namespace moe_p2p::platform
