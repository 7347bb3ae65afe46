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

// Where one NIC of a peer finds registered memory.
struct RemoteKey {
  uint64_t remote_addr;
  uint64_t remote_key;
  friend bool operator==(const RemoteKey&, const RemoteKey&) = default;
};

// Where senders find an inbox (message_ring.h), and how large it is.
struct InboxPlace {
  static constexpr uint32_t kMaxRings = 1u << 8;
  static constexpr uint32_t kMaxSlots = 1u << 7;
  static constexpr uint32_t kMaxBytes = 1u << 16;

  uint32_t num_rings = 0;             // 0: there is none
  uint32_t num_slots = 0;             // of each ring
  uint32_t max_bytes = 0;             // of a message
  std::vector<RemoteKey> rails = {};  // of its directory, one per NIC of the owner

  // Throws Error{kInvalidArgument} where one of its numbers cannot be. what: begins the text.
  void check(const char* what) const;
};

// Address of an engine: one provider address per NIC, in rail order, and its inbox.
struct EngineAddress {
  std::vector<base::Bytes> nics;
  InboxPlace inbox = {};

  base::Bytes serialize() const;
  static EngineAddress parse(std::span<const std::byte> bytes);
  // Whether both are of one engine, which may have opened its inbox in between.
  friend bool operator==(const EngineAddress& a, const EngineAddress& b) {
    return a.nics == b.nics;
  }
};

// All that a peer needs to write: the owner to connect to, and one (address, key) per NIC.
struct MemoryDescriptor {
  EngineAddress owner;
  uint64_t bytes = 0;
  provider::MemoryKind kind = provider::MemoryKind::kHost;
  std::vector<RemoteKey> rails;  // one per NIC of the owner
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
