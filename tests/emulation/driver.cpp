// The functions that csrc/platform/cuda_driver.h loads, for a machine of machine.h: built as
// libcuda.so.1. A stream is the calling thread, and every call returns only when its work is done:
// so events are in order by themselves, and threads that wait for each other are streams that wait
// for events.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "tests/emulation/machine.h"
#include "tests/emulation/order.h"

namespace {

using moe_p2p::emulation::Config;
using moe_p2p::emulation::Kernel;
using moe_p2p::emulation::Work;
namespace order = moe_p2p::emulation::order;

// What a capture records, and a replay runs: kernels with their parameters at capture time.
struct Graph {
  struct Launch {
    Config config;
    Kernel kernel;
    std::vector<std::byte> params;
  };
  uint64_t id;
  order::Device* device;  // of the thread that captured it
  std::vector<Launch> launches;
};
thread_local Graph* capturing = nullptr;  // as in torch's mode "thread_local"
std::mutex mutex;
std::map<Kernel, size_t> params_bytes;
Kernel (*compile)(uint64_t) = nullptr;  // of a number below kNumbers
constexpr uint64_t kNumbers = 1 << 16;

}  // namespace

extern "C" {
// For tests/support/emulated_gpu.py.
void moe_p2p_set_params_bytes(Kernel kernel, size_t bytes) {
  const std::lock_guard lock(mutex);
  params_bytes[kernel] = bytes;
}
// A kernel may be launched by its number: it is compiled then.
void moe_p2p_compile_by(Kernel (*function)(uint64_t)) { compile = function; }
void* moe_p2p_begin_capture() {
  static std::atomic<uint64_t> last{0};
  return capturing = new Graph{++last, order::own_device(), {}};
}
size_t moe_p2p_num_captured() { return capturing->launches.size(); }
void moe_p2p_end_capture() { capturing = nullptr; }
void moe_p2p_replay(const Graph* graph, size_t first, size_t last) {
  order::own_device() = graph->device;
  std::vector<Work> stream;
  for (size_t i = first; i < last; ++i) {
    const auto& [config, kernel, params] = graph->launches[i];
    stream.push_back({config, kernel, params.data()});
  }
  moe_p2p::emulation::run(stream);
}
void moe_p2p_drop_graph(Graph* graph) { delete graph; }

// NOLINTBEGIN(readability-identifier-naming): the driver's names
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const void* attributes;
  unsigned num_attributes;  // the only one used marks the launch as early
};

int cuLaunchKernelEx(const LaunchConfig* config, void* kernel, void** params, void**) {
  const Config shape{config->grid[0], config->block[0], config->shared_bytes,
                     config->num_attributes > 0};
  const auto number = reinterpret_cast<uint64_t>(kernel);
  const auto function = number < kNumbers ? compile(number) : reinterpret_cast<Kernel>(kernel);
  if (!function) return 1;  // the compiler's error is on stderr
  if (!capturing) return moe_p2p::emulation::run({{shape, function, params[0]}}), 0;
  const std::lock_guard lock(mutex);
  const auto* const first = static_cast<const std::byte*>(params[0]);
  capturing->launches.push_back({shape, function, {first, first + params_bytes.at(function)}});
  return 0;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void*) {
  order::copy_for_host(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
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
// 117, 118: flushes, and orders what NICs write for its own kernels, as an H200 does.
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 117 ? 1 : attribute == 118 ? 100 : 0;
  return 0;
}
int cuFlushGPUDirectRDMAWrites(int, int) { return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { return *context = nullptr, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = nullptr, 0; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0; }
int cuStreamCreateWithPriority(void** stream, unsigned, int) { return *stream = nullptr, 0; }
int cuStreamWaitEvent(void*, void*, unsigned) { return 0; }
int cuStreamGetCaptureInfo_v2(void*, int* status, uint64_t* id, void**, void**, size_t*) {
  *status = capturing != nullptr;
  *id = capturing ? capturing->id : 0;
  return 0;
}
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
