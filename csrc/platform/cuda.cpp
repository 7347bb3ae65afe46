#include "platform/cuda.h"

#include "base/log.h"
#include "platform/cuda_driver.h"

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

}  // namespace

void launch_kernel(const Launch& launch, const void* params) {
  LaunchAttribute attribute{};
  attribute.id = kProgrammaticStreamSerialization;
  attribute.value.allowed = 1;
  const LaunchConfig config{{launch.num_blocks, 1, 1},
                            {launch.num_threads, 1, 1},
                            launch.shared_bytes,
                            launch.stream,
                            &attribute,
                            launch.overlap_previous ? 1u : 0u};
  void* arguments[] = {const_cast<void*>(params)};
  const int error =
      driver().launch(&config, reinterpret_cast<void*>(launch.kernel), arguments, nullptr);
  MOE_P2P_CHECK(error == 0, Code::kTransport, "launching a kernel of ", launch.num_blocks,
                " blocks of ", launch.num_threads, " threads: ", driver_error(error));
}

bool is_managed(const void* address) {
  const DriverTable& table = driver();
  unsigned managed = 0;
  return table.pointer_attribute != nullptr &&
         table.pointer_attribute(&managed, kIsManaged, reinterpret_cast<uint64_t>(address)) == 0 &&
         managed != 0;
}

}  // namespace moe_p2p::platform
