#include "provider/loopback/timed.h"

#include "base/log.h"
#include "provider/loopback/domain.h"
#include "provider/settings.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_timed_domain(const DomainOptions& options) {
  return std::make_unique<loopback::LoopbackDomain>(
      options, loopback::parse_timed_config(options.settings), "timed");
}

namespace loopback {

namespace {

struct Preset {
  double gbps, latency_us, post_us, mwrites;
};
constexpr Preset kCx7{400, 2.7, 0.13, 11.1};
constexpr Preset kEfa{200, 13.1, 0.43, 1.05};

}  // namespace

Config parse_timed_config(const std::string& text) {
  const Settings settings("timed", text,
                          {"preset", "gbps", "latency_us", "post_us", "mwrites", "flush", "hollow",
                           "max_in_flight", "channels", "ring_kib", "row_kernel", "ordered"});
  const bool efa = settings.word("preset", "cx7", {"cx7", "efa"}) == "efa";
  const Preset& preset = efa ? kEfa : kCx7;
  std::string shared;  // checked as the software NIC's settings are
  for (const char* key : {"max_in_flight", "channels", "ring_kib", "row_kernel", "ordered"})
    if (const std::string value = settings.text(key, ""); !value.empty())
      shared += base::concat(shared.empty() ? "" : ",", key, "=", value);
  Config config = parse_config(shared);
  config.gbps = settings.real("gbps", preset.gbps, 1e-3, 1e6);
  config.latency_us = settings.real("latency_us", preset.latency_us, 0, 1e6);
  config.post_us = settings.real("post_us", preset.post_us, 0, 1e6);
  config.message_us = 1 / settings.real("mwrites", preset.mwrites, 1e-6, 1e6);
  config.flush = settings.integer("flush", 1, 0, 1) != 0;
  config.hollow = settings.integer("hollow", 0, 0, 1) != 0;
  config.in_place = true;
  return config;
}

}  // namespace loopback
}  // namespace moe_p2p::provider
