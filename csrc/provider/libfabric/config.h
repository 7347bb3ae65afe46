// The settings of the libfabric provider, parsed once when a Domain is opened.
//
//   provider=efa        libfabric's provider: efa, tcp, net, shm, sockets, verbs;ofi_rxm. All but
//                       efa and verbs are software: the CPU copies every byte
//   interfaces=         a:b:...: for NIC 0, 1, ... of a rank, each a domain name (rdmap0s6-rdm), an
//                       interface name (eth0) or an IPv4 address. Not given: all domains in turn,
//                       the loopback interface only where there is no other
//   library=            file of libfabric. Not given: libfabric.so.1 or AWS's installer's, for efa
//                       the latter first
//   max_in_flight=1024  accepted and not yet completed writes
//   max_write_bytes=1073741824
//   timeout_ms=10000    a peer that takes nothing for this long is given up (kPeerDead)
//   hmem=auto           GPU memory: on (libfabric's FI_HMEM), off, or auto: FI_HMEM for efa and
//                       verbs where libfabric has it, else dma-buf for efa
//   tclass=             best_effort, low_latency, bulk_data or scavenger: the traffic class of this
//                       engine's endpoints. Not given: the provider's own
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace moe_p2p::provider::libfabric {

struct Config {
  enum class Hmem { kAuto, kOn, kOff };

  std::string provider;
  std::string library;
  std::vector<std::string> interfaces;
  uint32_t max_in_flight = 0;
  uint32_t max_write_bytes = 0;
  std::chrono::milliseconds timeout{};
  Hmem hmem = Hmem::kAuto;
  uint32_t tclass = 0;

  bool is_efa() const { return provider == "efa"; }
  bool is_verbs() const { return provider.starts_with("verbs"); }
  // The CPU moves the bytes, and only while the owner of the memory polls.
  bool is_software() const { return !is_efa() && !is_verbs(); }
};

// Throws Error{kInvalidArgument} that names the key and its valid values.
Config parse_config(const std::string& settings);

}  // namespace moe_p2p::provider::libfabric
