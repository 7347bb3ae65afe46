#include "provider/libfabric/config.h"

#include <sstream>

#include "provider/libfabric/api.h"
#include "provider/settings.h"

namespace moe_p2p::provider::libfabric {

Config parse_config(const std::string& text) {
  const Settings settings("libfabric", text,
                          {"provider", "interfaces", "library", "max_in_flight", "max_write_bytes",
                           "timeout_ms", "hmem", "tclass"});
  Config config;
  config.provider =
      settings.word("provider", "efa", {"efa", "tcp", "net", "shm", "sockets", "verbs;ofi_rxm"});
  config.library = settings.text("library", "");
  std::istringstream names(settings.text("interfaces", ""));
  for (std::string name; std::getline(names, name, ':');) config.interfaces.push_back(name);
  config.max_in_flight =
      static_cast<uint32_t>(settings.integer("max_in_flight", 1024, 1, 1u << 14));
  config.max_write_bytes =
      static_cast<uint32_t>(settings.integer("max_write_bytes", 1u << 30, 1, 1u << 30));
  config.timeout = std::chrono::milliseconds(settings.integer("timeout_ms", 10'000, 1, 3'600'000));
  const std::string hmem = settings.word("hmem", "auto", {"auto", "on", "off"});
  config.hmem = hmem == "on"    ? Config::Hmem::kOn
                : hmem == "off" ? Config::Hmem::kOff
                                : Config::Hmem::kAuto;
  const std::string tclass =
      settings.word("tclass", "", {"best_effort", "low_latency", "bulk_data", "scavenger"});
  if (tclass == "best_effort") config.tclass = kBestEffort;
  if (tclass == "low_latency") config.tclass = kLowLatency;
  if (tclass == "bulk_data") config.tclass = kBulkData;
  if (tclass == "scavenger") config.tclass = kScavenger;
  return config;
}

}  // namespace moe_p2p::provider::libfabric
