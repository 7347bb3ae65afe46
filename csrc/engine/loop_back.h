// Reads of own memory through each own NIC, as the last step of a fence by queue pair
// (TransferEngine::sever): PCIe carries them behind all that this NIC has written there before.
// Control path; a thread polls meanwhile.
#pragma once

#include <list>
#include <span>
#include <vector>

#include "engine/peer.h"
#include "engine/request.h"

namespace moe_p2p::engine {

class LoopBack {
 public:
  static constexpr int kPriority = 1;  // KV's

  explicit LoopBack(int num_nics);
  // What the engine registers: reads land there.
  provider::MemorySpan landing() noexcept {
    return {.data = landing_.data(), .bytes = landing_.size()};
  }
  // Before the first read. self: the engine, connected to itself with kPriority.
  void use(const MemoryHandle* landing, const Peer* self) noexcept {
    handle_ = landing;
    self_ = self;
  }

  // Returns Requests to submit: with them each NIC reads from each memory. They stay alive until
  // they are done and this is called again.
  std::vector<Request*> reads(std::span<const MemoryHandle* const> memory);

 private:
  struct Reading {
    RemoteRegion region;
    Request request;
  };
  std::vector<std::byte> landing_;
  std::vector<int64_t> first_, own_;  // pages: every NIC reads the first one, into one of its own
  const MemoryHandle* handle_ = nullptr;
  const Peer* self_ = nullptr;
  std::list<Reading> readings_;  // also those that had not ended at an earlier deadline
};

}  // namespace moe_p2p::engine
