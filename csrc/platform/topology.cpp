#include "platform/topology.h"

#include <sys/stat.h>

#include <fstream>

#include "base/log.h"

namespace moe_p2p::platform {

std::string host_identity() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  MOE_P2P_CHECK(!boot_id.empty(), base::Code::kUnavailable,
                "/proc/sys/kernel/random/boot_id cannot be read; pass ranks_per_node=");
  struct stat info{};
  MOE_P2P_CHECK(stat("/dev/shm", &info) == 0, base::Code::kUnavailable,
                "/dev/shm is not there; pass ranks_per_node=1");
  return base::concat(boot_id, ".", info.st_dev, ".", info.st_ino);
}

}  // namespace moe_p2p::platform
