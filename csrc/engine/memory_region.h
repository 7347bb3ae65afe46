// Registered memory: MemoryHandle names it at its owner, MemoryDescriptor lets a peer write to it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/wire.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

// Most NICs of one engine. Fixes the size of a Request; eight is one GPU's share on the largest
// hosts.
inline constexpr int kMaxNics = 8;

// Address of an engine: one provider address per NIC, in rail order.
struct EngineAddress {
  std::vector<base::Bytes> nics;

  base::Bytes serialize() const;
  static EngineAddress parse(std::span<const std::byte> bytes);
  friend bool operator==(const EngineAddress&, const EngineAddress&) = default;
};

// All that a peer needs to write: the owner to connect to, and one (address, key) per NIC.
struct MemoryDescriptor {
  struct Rail {
    uint64_t remote_addr;
    uint64_t remote_key;
    friend bool operator==(const Rail&, const Rail&) = default;
  };
  EngineAddress owner;
  uint64_t bytes = 0;
  provider::MemoryKind kind = provider::MemoryKind::kHost;
  std::vector<Rail> rails;  // one per NIC of the owner
  base::Bytes shared = {};  // of GPU memory that peers on this host can map: platform/peer_memory.h

  base::Bytes serialize() const;
  static MemoryDescriptor parse(std::span<const std::byte> bytes);
};

// A span registered at every NIC of this engine. Made by TransferEngine::register_memory.
struct MemoryHandle {
  provider::MemorySpan span;
  std::vector<provider::MemoryKey> keys;  // one per NIC
};

}  // namespace moe_p2p::engine
