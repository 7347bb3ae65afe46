// The libfabric objects of one NIC, from the chosen domain to the enabled endpoint. Control path
// only. Opened by LibfabricDomain, closed in the reverse order.
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

  // How GPU memory is registered. kDmabuf: as a dma-buf declared as host memory, for a libfabric
  // without CUDA; only a device may touch the memory then, so writes must be RDMA.
  enum class GpuMemory { kNone, kDmabuf, kHmem };
  GpuMemory gpu_memory = GpuMemory::kNone;
  std::string why_no_hmem;  // unless kHmem
  // Of efa: all that decides whether a write with an immediate between two hosts is one of the
  // device, as text for errors. Peers must have equal ones (Peers::check_software). "": not efa.
  std::string software;

  bool mr_mode(int bit) const { return (info->domain_attr->mr_mode & bit) != 0; }
  // True when memory is registered without the gate (gate.h).
  bool registers_beside_traffic() const {
    return info->domain_attr->threading == kThreadCompletion;
  }
};

// Throws Error{kUnavailable} with libfabric's text and what to try.
Session open_session(const Config& config, int nic);

}  // namespace moe_p2p::provider::libfabric
