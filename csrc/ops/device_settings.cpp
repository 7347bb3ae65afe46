#include "ops/device_settings.h"

#include <limits>
#include <string_view>

#include "base/log.h"
#include "provider/settings.h"

namespace moe_p2p::ops {

using base::Code;
using provider::Settings;

namespace {

// Returns the value of `key`, which has to be given and at least 1: an address or a number.
template <typename Number>
Number required(const Settings& settings, std::string_view key) {
  const uint64_t value =
      settings.integer(key, 0, 1, static_cast<uint64_t>(std::numeric_limits<Number>::max()));
  MOE_P2P_CHECK(value > 0, Code::kInvalidArgument, "device settings: ", key, " is missing");
  return static_cast<Number>(value);
}

std::vector<uint64_t> addresses(const Settings& settings, std::string_view key) {
  const std::vector<int64_t> values = settings.integers(key);
  return {values.begin(), values.end()};
}

}  // namespace

moe::DeviceMemory device_memory_from(const std::string& text) {
  const Settings settings("device memory", text,
                          {"ordinal", "data", "peer_data", "state", "expert_rank", "expert_local",
                           "fault", "fault_device", "num_sms", "world", "in_place", "table"});
  const auto ordinal = settings.integers("ordinal");  // -1: an emulated device
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  MOE_P2P_CHECK(ordinal.size() == 1 && ordinal[0] >= -1 && ordinal[0] <= kMost,
                Code::kInvalidArgument, "device memory settings: ordinal is missing or no device");
  return {
      .ordinal = static_cast<int>(ordinal[0]),
      .data = addresses(settings, "data"),
      .peer_data = addresses(settings, "peer_data"),
      .in_place = settings.integer("in_place", 0, 0, 1) != 0,
      .state = required<uint64_t>(settings, "state"),
      .expert_rank = required<uint64_t>(settings, "expert_rank"),
      .expert_local = required<uint64_t>(settings, "expert_local"),
      .fault = reinterpret_cast<abi::Fault*>(required<uint64_t>(settings, "fault")),
      .fault_device = required<uint64_t>(settings, "fault_device"),
      .num_sms = static_cast<int>(settings.integer("num_sms", 0, 0, static_cast<uint64_t>(kMost))),
      .world = required<uint64_t>(settings, "world"),
      .table = settings.integer("table", 0, 0, std::numeric_limits<int64_t>::max())};
}

moe::DeviceKernel device_kernel_from(const std::string& text) {
  const Settings settings(
      "kernel", text,
      {"handle", "num_threads", "shared_bytes", "num_send_workers", "num_recv_workers",
       "max_send_blocks", "max_recv_blocks", "max_copy_blocks", "max_away_blocks",
       "max_resident_blocks", "max_slot_bytes", "max_tokens"});
  return {.handle = required<uint64_t>(settings, "handle"),
          .num_threads = required<unsigned>(settings, "num_threads"),
          .shared_bytes = required<unsigned>(settings, "shared_bytes"),
          .num_send_workers = required<int>(settings, "num_send_workers"),
          .num_recv_workers = required<int>(settings, "num_recv_workers"),
          .max_send_blocks = required<int>(settings, "max_send_blocks"),
          .max_recv_blocks = required<int>(settings, "max_recv_blocks"),
          .max_copy_blocks = required<int>(settings, "max_copy_blocks"),
          .max_away_blocks = required<int>(settings, "max_away_blocks"),
          .max_resident_blocks = required<int>(settings, "max_resident_blocks"),
          .max_slot_bytes = required<uint64_t>(settings, "max_slot_bytes"),
          .max_tokens = static_cast<int>(
              settings.integer("max_tokens", 0, 0, std::numeric_limits<int>::max()))};
}

}  // namespace moe_p2p::ops
