// Registered memory. Host memory by address; GPU memory as a dma-buf where driver, kernel and NIC
// support it, else by address, which needs NVIDIA's peer memory module. Control path.
#pragma once

#include <map>
#include <mutex>

#include "provider/provider.h"
#include "provider/verbs/nic.h"

namespace moe_p2p::provider::verbs {

class Registrations {
 public:
  explicit Registrations(const Nic& nic) : nic_(nic) {}

  // Throws Error{kResourceExhausted} with the driver's text and what it usually means.
  MemoryKey add(const MemorySpan& span);
  // Afterwards the NIC refuses writes to it.
  void remove(const MemoryKey& key);

 private:
  Owned<Mr> register_host(const MemorySpan& span) const;
  Owned<Mr> register_cuda(const MemorySpan& span) const;
  Owned<Mr> register_dmabuf(const MemorySpan& span, std::string& why) const;
  Owned<Mr> register_address(const MemorySpan& span) const;

  const Nic& nic_;
  std::mutex mutex_;
  std::map<uint64_t, Owned<Mr>> regions_;  // by local key
};

}  // namespace moe_p2p::provider::verbs
