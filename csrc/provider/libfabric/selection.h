// Which of libfabric's domains a NIC uses. Control path only.
#pragma once

#include <string>

#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

struct Selection {
  OwnedInfo info;
  std::string why_no_hmem;  // empty where libfabric takes GPU memory itself (FI_HMEM)
};
// Asks libfabric for what the contract needs and picks the domain of NIC `nic`. Throws
// Error{kUnavailable} that lists the domains there are.
Selection select_info(const Config& config, int nic);

// "eth0 192.0.2.2": domain, and address where it is one of IPv4.
std::string describe(const Info& info);

}  // namespace moe_p2p::provider::libfabric
