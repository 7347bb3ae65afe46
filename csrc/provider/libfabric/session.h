// What one NIC has open in libfabric, from the choice of the domain to the enabled endpoint.
// Control path only. Opened by LibfabricDomain, closed in the reverse order.
#pragma once

#include "provider/libfabric/api.h"
#include "provider/libfabric/config.h"

namespace moe_p2p::provider::libfabric {

struct Session {
  OwnedInfo info;
  Owned<Fabric> fabric;
  Owned<AccessDomain> domain;
  Owned<AddressVector> av;
  Owned<CompletionQueue> cq;
  Owned<Endpoint> endpoint;

  bool mr_mode(int bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
  bool has_hmem() const { return (info->caps & kHmem) != 0; }
};

// Throws Error{kUnavailable} with libfabric's text and what to try.
Session open_session(const Config& config, int nic);

}  // namespace moe_p2p::provider::libfabric
