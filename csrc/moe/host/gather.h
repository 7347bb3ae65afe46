// gather_counts: some int32 of every rank, on every rank, without a GPU. For numbers that the host
// must know before it can launch or allocate anything.
//
// A rank writes its values into its own *board* and, for other nodes, into the board of the rank
// there with its local index; then every rank reads the boards of its node. A board is part of the
// rank's shared memory (BoardLayout in plan.h), in host memory on GPU ranks too. Word r of a source
// node means that its values of call r have arrived; calls use two rows in turn.
//
// Why two rows are enough: a rank begins call r + 2 once it has every rank's values of r + 1, and a
// rank hands in r + 1 after it has read call r. For the same reason immediates of r and r + 1 may
// mix, but r and r + 2 cannot: they are counted by row.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "engine/transfer_engine.h"
#include "moe/node/memory.h"

namespace moe_p2p::moe {

class HostGather final : public engine::ImmSink {
 public:
  // Phase of the immediates, beside the phases of the steps.
  static constexpr uint32_t kPhase = engine::ImmKey::kMaxPhases - 1;
  static_assert(abi::kNumPhases <= kPhase);
  static constexpr uint32_t kNumRows = 2;
  // No row has these slots. The Exchange uses them for immediates of probes, which carry nothing,
  // and of farewells.
  static constexpr uint32_t kProbeSlot = engine::ImmKey::kMaxSlots - 1;
  static constexpr uint32_t kFarewellSlot = engine::ImmKey::kMaxSlots - 2;

  HostGather(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
             uint32_t communicator);

  // The board for the partners on other nodes; null and empty when there are none.
  const engine::MemoryHandle* board() const noexcept { return board_; }
  base::Bytes descriptor() const;
  // The rank with this local index on another node.
  struct Remote {
    int node;
    const engine::RemoteRegion* board;
    int num_nics;
  };
  void connect(const std::vector<Remote>& remotes);  // [N-1] by node
  // Called once the peers are disconnected: frees writes that a failed call left, and the board.
  void close(platform::Deadline deadline);

  // One call: send(), wait until it is complete(), read().
  // Throws Error{kInvalidArgument} for too many values, before anything is sent.
  void send(std::span<const int32_t> values);
  bool arrived(int source) const noexcept;
  // Calls whose values arrived on that other node; nullopt while a write to it is under way. Called
  // between calls.
  std::optional<uint64_t> num_arrived(int node) const noexcept;
  // The values of all ranks have arrived. Throws Error when a write of this rank failed, except to
  // a rank that has closed its communicator: it had what it needs.
  bool complete(platform::Deadline deadline) const;
  // Returns [W, n]. Also waits for the end of this rank's writes, after which its row may be used
  // again (and the communicator closed). Throws Error{kProtocol} naming a rank that gave another
  // number.
  void read(std::span<int32_t> gathered, platform::Deadline deadline);
  // For error texts: "gather_counts call 3", and what has arrived from a partner.
  std::string call() const;
  std::string progress(int node) const;

  void on_imm(const engine::ImmKey& key) noexcept override;  // polling thread

 private:
  struct Link {
    Remote remote{};
    engine::Request request;
    std::atomic<uint64_t> immediates[2]{};  // by row; other threads read them for error texts only
    uint64_t published = 0;                 // last call whose word is up; polling thread
  };

  int rank_of(const Link& link) const noexcept;
  void check_write(const Link& link, platform::Deadline deadline) const;
  // Uses of its row up to and with this call.
  static uint64_t uses(uint64_t call) noexcept { return (call + 1) / 2; }
  uint64_t row_offset(uint64_t call, int node) const noexcept;
  NodeMemory::Word word(int local, int node) const noexcept;
  void publish(int node, uint64_t call) noexcept;
  [[noreturn]] void fail(base::Code code, const std::string& message) const;

  const Plan& plan_;
  NodeMemory& memory_;
  engine::TransferEngine& engine_;
  const uint32_t communicator_;
  const engine::MemoryHandle* board_ = nullptr;  // null where there are no other nodes
  size_t num_links_ = 0;
  std::unique_ptr<Link[]> links_;  // [N-1]
  uint64_t call_ = 0;              // calls begun
};

}  // namespace moe_p2p::moe
