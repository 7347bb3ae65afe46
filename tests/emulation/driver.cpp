// The functions that csrc/platform/cuda_driver.h loads, for a machine of machine.h: built as
// libcuda.so.1. Streams and events are in order by themselves, because nothing returns before it is done.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/emulation/machine.h"

extern "C" {
// NOLINTBEGIN(readability-identifier-naming): the driver's names
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const void* attributes;
  unsigned num_attributes;  // the only one there is says that the launch is early
};

int cuLaunchKernelEx(const LaunchConfig* config, void* kernel, void** params, void**) {
  moe_p2p::emulation::run(
      {config->grid[0], config->block[0], config->shared_bytes, config->num_attributes > 0},
      reinterpret_cast<moe_p2p::emulation::Kernel>(kernel), params[0]);
  return 0;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void*) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return cuMemcpyAsync(to, from, bytes, stream);
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), 0;
}
int cuMemFreeHost(void* memory) { return std::free(memory), 0; }
int cuGetErrorString(int, const char** text) { return *text = "of an emulated GPU", 0; }
int cuDeviceGet(int* device, int) { return *device = 0; }
int cuDeviceGetAttribute(int* value, int, int) { return *value = 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = nullptr, 0; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) { return *stream = nullptr, 0; }
int cuEventCreate(void** event, unsigned) { return *event = nullptr, 0; }
int cuInit(unsigned) { return 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuStreamDestroy_v2(void*) { return 0; }
int cuEventRecord(void*, void*) { return 0; }
int cuEventQuery(void*) { return 0; }
int cuEventDestroy_v2(void*) { return 0; }
// NOLINTEND(readability-identifier-naming)
}
