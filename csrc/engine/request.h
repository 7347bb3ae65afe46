// What can be asked of the engine. A Request belongs to its submitter and must stay alive, with the
// arrays its operation points to, until done(). One Request may be submitted again after that.
//
// Immediates delivered to the peer (R = number of rails = NICs of the sender):
//   Imm         1
//   Write       R: the bytes are cut into R shards, one per NIC, empty shards included; and 0
//               without an immediate
//   WritePages  one per page
//   Scatter     kByPeer: 1 per slice (slice i travels on NIC i mod R); kByBytes: R per slice
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/status.h"
#include "engine/memory_region.h"
#include "platform/wait.h"

namespace moe_p2p::engine {

class Peer;  // transfer_engine.h

// A descriptor resolved for one connected peer: rail i writes through NIC i.
struct RemoteRegion {
  struct Rail {
    provider::PeerId peer;
    uint64_t remote_addr;
    uint64_t remote_key;
  };
  const Peer* owner = nullptr;
  uint64_t bytes = 0;
  std::vector<Rail> rails;  // one per NIC of the sender
};

struct Imm {
  const Peer* peer = nullptr;
  uint32_t imm = 0;
};

struct Write {
  const MemoryHandle* source = nullptr;
  uint64_t source_offset = 0;
  const RemoteRegion* target = nullptr;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
  std::optional<uint32_t> imm;
};

// Page p of a side lies at offset + indices[p] * stride.
struct Pages {
  std::span<const int64_t> indices;
  uint64_t stride = 0;
  uint64_t offset = 0;
};

struct WritePages {
  const MemoryHandle* source = nullptr;
  const RemoteRegion* target = nullptr;
  uint64_t page_bytes = 0;
  Pages source_pages;
  Pages target_pages;
  std::optional<uint32_t> imm;
};

struct Slice {
  uint64_t source_offset = 0;
  const RemoteRegion* target = nullptr;
  uint64_t target_offset = 0;
  uint64_t bytes = 0;
};

struct Scatter {
  enum class Sharding : uint8_t { kByPeer, kByBytes };
  const MemoryHandle* source = nullptr;
  std::span<const Slice> slices;
  Sharding sharding = Sharding::kByPeer;
  std::optional<uint32_t> imm;
};

using Operation = std::variant<Imm, Write, WritePages, Scatter>;

class Request {
 public:
  Request() = default;
  explicit Request(Operation operation) : operation(std::move(operation)) {}
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  Operation operation;

  // acquire: pairs with the release in finish(); status() is valid once this is true.
  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  base::Status status() const noexcept { return status_; }
  // False when the deadline passed first; the Request is then still in use.
  bool wait(platform::Deadline deadline, const platform::WaitPolicy& policy = {});

 private:
  friend class TransferEngine;
  friend class Mailbox;

  void start() noexcept;
  void finish() noexcept;

  // Polling thread only.
  uint64_t cursor_ = 0;     // next piece to post (page, slice or byte piece)
  uint64_t in_flight_ = 0;  // posted, not completed
  bool posted_all_ = false;
  base::Status status_;     // the first failure

  std::atomic<bool> done_{false};
  platform::EventCount event_{};
  Request* next_ = nullptr;  // intrusive: mailbox, then the engine's active list
};

}  // namespace moe_p2p::engine
