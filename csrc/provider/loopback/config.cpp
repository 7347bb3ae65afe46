#include "provider/loopback/config.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/log.h"
#include "provider/settings.h"

namespace moe_p2p::provider::loopback {

Config parse_config(const std::string& text) {
  const Settings settings(
      "loopback", text,
      {"seed", "ring_kib", "channels", "max_in_flight", "max_write_bytes", "gbps", "latency_us",
       "fail_nth", "mutate", "copy_kernel", "row_kernel", "addressing", "trace", "ordered"});
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  Config config;
  config.seed = settings.integer("seed", 0, 0, kAny);
  config.ring_bytes = settings.integer("ring_kib", 1024, 4, 1u << 28) * 1024;
  config.num_channels = static_cast<uint32_t>(settings.integer("channels", 256, 1, 1u << 14));
  config.max_in_flight =
      static_cast<uint32_t>(settings.integer("max_in_flight", 1024, 1, 1u << 14));
  config.window = static_cast<uint32_t>(
      std::min<uint64_t>(std::bit_ceil(config.max_in_flight), config.ring_bytes / 128));
  config.max_write_bytes =
      static_cast<uint32_t>(settings.integer("max_write_bytes", 1u << 30, 1, 1u << 30));
  config.gbps = settings.real("gbps", 0, 0, 1e6);
  config.latency_us = settings.real("latency_us", 0, 0, 1e6);
  config.fail_nth = settings.integer("fail_nth", 0, 0, kAny);
  config.copy_kernel = settings.integer("copy_kernel", 0, 0, kAny);
  config.row_kernel = settings.integer("row_kernel", 0, 0, kAny);
  const std::string mutate = settings.word("mutate", "none", {"none", "early_imm", "early_flag"});
  config.early_imm = mutate == "early_imm";
  config.early_flag = mutate == "early_flag";
  config.ordered = settings.integer("ordered", 0, 0, 1) != 0;
  config.offset_addressing =
      settings.word("addressing", "virtual", {"virtual", "offset"}) == "offset";
  config.trace = settings.text("trace", "");
  MOE_P2P_CHECK(std::has_single_bit(config.ring_bytes), base::Code::kInvalidArgument,
                "loopback settings: ring_kib=", config.ring_bytes / 1024,
                " is refused; it must be a power of two");
  MOE_P2P_CHECK(config.seed == 0 || (config.gbps == 0 && config.latency_us == 0),
                base::Code::kInvalidArgument, "loopback settings: seed=", config.seed,
                " does not go with gbps or latency_us: a replay may not depend on the clock");
  return config;
}

}  // namespace moe_p2p::provider::loopback
