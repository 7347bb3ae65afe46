// Chooses a port's own address (GID). A RoCE port has several: one per IP address and version of
// RoCE. A wrong choice is the usual reason why nothing arrives, so errors list them all. Pure
// functions over a table; nic.cpp reads it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "provider/verbs/api.h"
#include "provider/verbs/config.h"

namespace moe_p2p::provider::verbs {

// Throws Error{kUnavailable} naming `device`, the wish and the table when nothing fits. Without a
// wish: RoCE v2 with an IPv4 address, then one with a routable IPv6 address, then any; on
// InfiniBand one that other subnets reach, then the first.
GidTableEntry choose_gid(std::span<const GidTableEntry> table, const Config& wish, bool ethernet,
                         const std::string& device);

// "10.0.0.1", "fe80::1"
std::string gid_text(const Gid& gid);
bool gid_is_ipv4(const Gid& gid) noexcept;
bool gid_is_link_local(const Gid& gid) noexcept;
// Of an InfiniBand port's GID: its subnet, and the LID by which other subnets reach it ("FLID"), 0:
// none. Bytes 4 and 5 hold the latter, the rest of the first 8 the subnet's prefix.
uint64_t subnet_of(const Gid& gid) noexcept;
uint16_t flid_of(const Gid& gid) noexcept;

}  // namespace moe_p2p::provider::verbs
