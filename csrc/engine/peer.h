// A connected engine: one provider peer per local NIC; NIC i talks to the peer's NIC i mod its
// count. Made by TransferEngine::connect(), destroyed by TransferEngine::disconnect().
#pragma once

#include <utility>
#include <vector>

#include "engine/memory_region.h"

namespace moe_p2p::engine {

class Peer {
 public:
  Peer(EngineAddress address, int priority, std::vector<provider::PeerId> rails)
      : address_(std::move(address)), priority_(priority), rails_(std::move(rails)) {}
  const EngineAddress& address() const noexcept { return address_; }
  // The class of traffic that it was connected for.
  int priority() const noexcept { return priority_; }
  const std::vector<provider::PeerId>& rails() const noexcept { return rails_; }

 private:
  EngineAddress address_;
  int priority_;
  std::vector<provider::PeerId> rails_;
};

}  // namespace moe_p2p::engine
