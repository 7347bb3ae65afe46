#include "platform/cuda_driver.h"

#include "base/log.h"
#include "platform/library.h"

namespace moe_p2p::platform {

namespace {

#if defined(MOE_P2P_TESTING)
const DriverTable* stand_in = nullptr;
#endif

// The suffixes are the versions to which cuda.h of CUDA 11.8 and later maps the plain names.
DriverTable load_driver() {
  const Library library({"libcuda.so.1"}, {.what = "libcuda.so.1",
                                           .install = "is the NVIDIA driver installed?",
                                           .name = "libcuda.so.1",
                                           .needed = "the driver is older than CUDA 11.8"});
  DriverTable table{};
  library.load("cuGetErrorString", table.error_string);
  library.load("cuInit", table.init);
  library.load("cuDeviceGet", table.device_get);
  library.load("cuDeviceGetAttribute", table.device_attribute);
  library.load("cuDevicePrimaryCtxRetain", table.context_retain);
  library.load("cuDevicePrimaryCtxRelease_v2", table.context_release);
  library.load("cuCtxSetCurrent", table.context_set);
  library.load("cuCtxPushCurrent_v2", table.context_push);
  library.load("cuCtxPopCurrent_v2", table.context_pop);
  library.load("cuThreadExchangeStreamCaptureMode", table.capture_mode);
  library.load("cuCtxGetStreamPriorityRange", table.priority_range);
  library.load("cuStreamCreateWithPriority", table.stream_create);
  library.load("cuStreamDestroy_v2", table.stream_destroy);
  library.load("cuStreamWaitEvent", table.stream_wait_event);
  library.load("cuStreamGetCaptureInfo_v2", table.capture_info);
  library.load("cuEventCreate", table.event_create);
  library.load("cuEventRecord", table.event_record);
  library.load("cuEventQuery", table.event_query);
  library.load("cuEventDestroy_v2", table.event_destroy);
  library.load("cuMemcpyDtoDAsync_v2", table.copy_async);
  library.load("cuMemcpyAsync", table.copy_any_async);
  library.load("cuMemHostAlloc", table.host_alloc);
  library.load("cuMemFreeHost", table.host_free);
  library.load("cuLaunchKernelEx", table.launch);
  library.load_if_there("cuFlushGPUDirectRDMAWrites", table.flush_writes);
  library.load_if_there("cuMemGetHandleForAddressRange", table.export_dmabuf);
  library.load_if_there("cuStreamGetGreenCtx", table.stream_green);
  library.load_if_there("cuPointerGetAttribute", table.pointer_attribute);
  library.load_if_there("cuMemGetAddressRange_v2", table.address_range);
  library.load_if_there("cuIpcGetMemHandle", table.ipc_get);
  library.load_if_there("cuIpcOpenMemHandle_v2", table.ipc_open);
  library.load_if_there("cuIpcCloseMemHandle", table.ipc_close);
  library.load_if_there("cuCtxEnablePeerAccess", table.enable_peer);
  library.load_if_there("cuMemHostRegister_v2", table.host_register);
  library.load_if_there("cuMemHostUnregister", table.host_unregister);
  library.load_if_there("cuMemHostGetDevicePointer_v2", table.host_pointer);
  library.load_if_there("cuStreamWriteValue64_v2", table.stream_write);
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
