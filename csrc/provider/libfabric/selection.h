// Selects the libfabric domain of a NIC. Control path only.
#pragma once

#include <string>

#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

struct Selection {
  OwnedInfo info;
  std::string why_no_hmem;  // empty when libfabric takes GPU memory itself (FI_HMEM)
};
// Asks libfabric for what the contract needs and picks the domain of NIC `nic`. Throws
// Error{kUnavailable} that lists the existing domains.
Selection select_info(const Config& config, int nic);

// "eth0 192.0.2.2": the domain, and its address if it has an IPv4 one.
std::string describe(const Info& info);

}  // namespace moe_p2p::provider::libfabric
