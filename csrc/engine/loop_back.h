// Reads of own memory through each own NIC, as the last step of a fence by queue pair
// (TransferEngine::sever): PCIe carries them behind all that this NIC has written there before.
// Control path; a thread polls meanwhile.
#pragma once

#include <list>
#include <span>
#include <vector>

#include "engine/transfer_engine.h"

namespace moe_p2p::engine {

class LoopBack {
 public:
  // Connects the engine to itself.
  explicit LoopBack(TransferEngine& engine);

  // Returns once each NIC has read from each memory. Throws Error{kTimeout} at the deadline,
  // Error{kTransport} for a read that failed.
  void read(std::span<const MemoryHandle* const> memory, platform::Deadline deadline);

 private:
  struct Reading {
    RemoteRegion region;
    Request request;
  };
  TransferEngine& engine_;
  std::vector<std::byte> landing_;
  std::vector<int64_t> first_, own_;  // pages: every NIC reads the first one, into one of its own
  const MemoryHandle* handle_;
  const Peer* self_;
  std::list<Reading> readings_;  // also reads that had not ended at an earlier deadline
};

}  // namespace moe_p2p::engine
