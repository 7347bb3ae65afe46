#include "platform/cuda.h"

#include <dlfcn.h>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// The driver's binary interface, as far as it is used (CUDA 11.8 and later).
constexpr int kProgrammaticStreamSerialization = 6;

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char size[64];
    int allowed;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(LaunchConfig) == 56);

struct Driver {
  int (*launch)(const LaunchConfig*, void* kernel, void** params, void** extra) = nullptr;
  int (*error_string)(int error, const char** text) = nullptr;
};

const Driver& driver() {
  static const Driver loaded = [] {
    Driver d;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    MOE_P2P_CHECK(library, Code::kUnavailable, "libcuda.so.1 cannot be opened: ", dlerror(),
                  "; is the NVIDIA driver installed?");
    d.launch = reinterpret_cast<decltype(d.launch)>(dlsym(library, "cuLaunchKernelEx"));
    d.error_string = reinterpret_cast<decltype(d.error_string)>(dlsym(library, "cuGetErrorString"));
    MOE_P2P_CHECK(d.launch && d.error_string, Code::kUnavailable,
                  "libcuda.so.1 has no cuLaunchKernelEx; the driver is older than CUDA 11.8");
    return d;
  }();
  return loaded;
}

}  // namespace

void launch_kernel(const Launch& launch, const void* params) {
  LaunchAttribute attribute{};
  attribute.id = kProgrammaticStreamSerialization;
  attribute.value.allowed = 1;
  const LaunchConfig config{
      {launch.num_blocks, 1, 1},        {launch.num_threads, 1, 1}, 0, launch.stream, &attribute,
      launch.overlap_previous ? 1u : 0u};
  void* arguments[] = {const_cast<void*>(params)};
  const int error =
      driver().launch(&config, reinterpret_cast<void*>(launch.kernel), arguments, nullptr);
  if (error == 0) return;
  const char* text = "unknown error";
  driver().error_string(error, &text);
  throw base::Error(Code::kTransport,
                    base::concat("launching a kernel of ", launch.num_blocks, " blocks of ",
                                 launch.num_threads, " threads: ", text, " (", error, ")"));
}

}  // namespace moe_p2p::platform
