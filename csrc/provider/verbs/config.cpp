#include "provider/verbs/config.h"

#include <sstream>

#include "base/log.h"
#include "provider/settings.h"

namespace moe_p2p::provider::verbs {
namespace {

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ':');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

// One number for all classes of traffic, or one for each.
std::array<uint8_t, 3> by_priority(const Settings& settings, std::string_view key, int64_t high) {
  std::vector<int64_t> given = settings.integers(key);
  if (given.empty()) given.push_back(0);
  if (given.size() == 1) given.resize(3, given[0]);
  MOE_P2P_CHECK(given.size() == 3, base::Code::kInvalidArgument, "verbs settings: ", key, " has ",
                given.size(),
                " values; it must be one, or one for each of the 3 priorities, 0:8:16");
  std::array<uint8_t, 3> values{};
  for (size_t i = 0; i < values.size(); ++i) {
    MOE_P2P_CHECK(given[i] >= 0 && given[i] <= high, base::Code::kInvalidArgument,
                  "verbs settings: ", key, "=", given[i], " is refused; it must be 0 to ", high);
    values[i] = static_cast<uint8_t>(given[i]);
  }
  return values;
}

}  // namespace

Config parse_config(const std::string& text) {
  const Settings settings(
      "verbs", text,
      {"devices",       "port",          "gid_index",        "gid_type",      "gid_address",
       "traffic_class", "service_level", "pkey_index",       "mtu",           "timeout",
       "retries",       "rnr_timer",     "qps_per_peer",     "max_in_flight", "max_write_bytes",
       "receives",      "inline_bytes",  "relaxed_ordering", "dmabuf",        "host",
       "bind",          "handshake_ms",  "library",          "ordered_writes"});
  const auto number = [&]<typename T>(std::string_view key, T& value, uint64_t fallback,
                                      uint64_t low, uint64_t high) {
    value = static_cast<T>(settings.integer(key, fallback, low, high));
  };
  Config config;
  config.library = settings.text("library", "libibverbs.so.1");
  config.devices = split(settings.text("devices", ""));
  config.roce_v1 = settings.word("gid_type", "v2", {"v1", "v2"}) == "v1";
  config.gid_address = settings.text("gid_address", "");
  config.bind = settings.text("bind", "");
  const bool one = config.bind != "0.0.0.0" && config.bind != "::";
  config.host = settings.text("host", one ? config.bind : "");
  if (!settings.text("gid_index", "").empty()) number("gid_index", config.gid_index, 0, 0, 255);
  number("port", config.port, 1, 1, 255);
  config.traffic_class = by_priority(settings, "traffic_class", 255);
  config.service_level = by_priority(settings, "service_level", 15);
  number("pkey_index", config.pkey_index, 0, 0, 65535);
  number("mtu", config.mtu_bytes, 0, 0, 4096);
  number("timeout", config.timeout, 18, 1, 31);
  number("retries", config.retries, 6, 0, 7);
  number("rnr_timer", config.rnr_timer, 12, 1, 31);
  number("qps_per_peer", config.qps_per_peer, 1, 1, 16);
  number("max_in_flight", config.max_in_flight, 1024, 1, 1u << 14);
  number("max_write_bytes", config.max_write_bytes, 1u << 30, 1, 1u << 30);
  number("receives", config.num_receives, 8192, 1, 1u << 15);
  number("inline_bytes", config.inline_bytes, 64, 0, 1024);
  number("relaxed_ordering", config.relaxed_ordering, 1, 0, 1);
  number("ordered_writes", config.ordered_writes, 0, 0, 1);
  number("dmabuf", config.dmabuf, 1, 0, 1);
  config.handshake_timeout =
      std::chrono::milliseconds(settings.integer("handshake_ms", 10'000, 1, 3'600'000));
  MOE_P2P_CHECK(
      !config.ordered_writes || (config.inline_bytes >= 8 && config.max_in_flight >= 2),
      base::Code::kInvalidArgument,
      "verbs settings: ordered_writes=1 takes inline_bytes of at least 8 and max_in_flight of at "
      "least 2: a flag is a write of its own; they are ",
      config.inline_bytes, " and ", config.max_in_flight);
  const uint32_t mtu = config.mtu_bytes;
  MOE_P2P_CHECK(mtu == 0 || (mtu >= 256 && (mtu & (mtu - 1)) == 0), base::Code::kInvalidArgument,
                "verbs settings: mtu=", mtu,
                " is refused; it must be 256, 512, 1024, 2048 or 4096");
  return config;
}

}  // namespace moe_p2p::provider::verbs
