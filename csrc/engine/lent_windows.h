// GPU memory of peers on this host that is mapped here, by handles in their descriptors, so that
// the software NIC writes over NVLink and not through host memory. Of one TransferEngine; control
// path, any thread. The device of the memory that is registered first maps; regions that were
// resolved earlier are mapped then. Memory that cannot be mapped is written through the host, and
// logged once.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/domain_group.h"
#include "engine/memory_region.h"
#include "engine/request.h"
#include "platform/peer_memory.h"

namespace moe_p2p::engine {

class LentWindows {
 public:
  LentWindows(DomainGroup& group, std::string label);

  // What a descriptor says of this memory; empty where NICs have no use for it, or the driver
  // cannot share it, which is logged once.
  base::Bytes describe(const provider::MemorySpan& span);
  void open(int device);  // memory of it is registered
  void add(const RemoteRegion& region, const base::Bytes& shared);
  // The region is mapped in another way, or goes away: returns once nothing is written through its
  // window. False where another region keeps that window.
  bool remove(const RemoteRegion& region);

 private:
  struct Window {
    const RemoteRegion* region = nullptr;
    base::Bytes shared;
    std::shared_ptr<platform::PeerMemory> memory = nullptr;  // of all regions with these keys
  };
  // Windows whose owner lends the memory no more go: while one is mapped here the driver keeps that
  // memory, and refuses to map what its owner has at the same address by then.
  void drop_ended();
  void map(Window& window) noexcept;
  // Takes away what NICs know of its keys, unless another region has the same.
  void unmap(const Window& window);

  DomainGroup& group_;
  const std::string label_;
  const bool used_;
  std::mutex mutex_;
  int device_ = -1;                // not known yet
  bool refused_ = false;           // logged
  std::atomic<bool> kept_{false};  // likewise: own memory that is not lent
  std::vector<Window> windows_;
};

}  // namespace moe_p2p::engine
