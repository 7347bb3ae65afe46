// What one NIC has open in libfabric, from the choice of the domain to the enabled endpoint.
// Control path only. Opened by LibfabricDomain, closed in the reverse order.
#pragma once

#include <string>

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

  // How GPU memory is registered. kDmabuf: as a dma-buf that libfabric takes for the host's, where
  // it has no CUDA of its own; only a device touches the memory then, so writes must be RDMA.
  enum class GpuMemory { kNone, kDmabuf, kHmem };
  GpuMemory gpu_memory = GpuMemory::kNone;
  std::string why_no_hmem;  // unless kHmem

  bool mr_mode(int bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
  // Registering memory needs no turn with endpoint and completion queue (gate.h).
  bool registers_beside_traffic() const {
    return info->domain_attr->threading == kThreadCompletion;
  }
};

// Throws Error{kUnavailable} with libfabric's text and what to try.
Session open_session(const Config& config, int nic);

}  // namespace moe_p2p::provider::libfabric
