// A connected engine: one provider peer per local NIC; NIC i talks to the peer's NIC i mod its
// count. Made by TransferEngine::connect(), destroyed by TransferEngine::disconnect().
#pragma once

#include <utility>
#include <vector>

#include "engine/memory_region.h"

namespace moe_p2p::engine {

class Peer {
 public:
  Peer(EngineAddress address, std::vector<provider::PeerId> rails)
      : address_(std::move(address)), rails_(std::move(rails)) {}
  const EngineAddress& address() const noexcept { return address_; }
  const std::vector<provider::PeerId>& rails() const noexcept { return rails_; }

 private:
  EngineAddress address_;
  std::vector<provider::PeerId> rails_;
};

}  // namespace moe_p2p::engine
