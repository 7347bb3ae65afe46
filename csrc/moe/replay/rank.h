// One rank of a replay: the exchange and the engine of a recording's rank, fed event by event with
// what its proxy saw (base/recorder.h). Nothing waits and no clock is read, so a recording ends the
// same way each time. Used by ops/replay_ops.cpp, behind `python -m moe_p2p replay`; who chooses
// the events is moe_p2p/tools/replay.py.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/recorder.h"
#include "moe/host/kernels.h"
#include "moe/node/exchange.h"
#include "moe/node/waits.h"
#include "moe/options.h"
#include "moe/replay/nic.h"

namespace moe_p2p::moe::replay {

class Rank {
 public:
  struct Facts {
    AllToAllOptions options;
    std::vector<int64_t> nics;    // [N] of this rank and its partners
    std::vector<int64_t> flags;   // [3, S, W] AllToAll::Snapshot; or empty
    std::vector<int64_t> masked;  // ranks
    uint64_t first_step = 0;      // earlier ones are over
  };
  explicit Rank(const Facts& facts);
  ~Rank();

  NodeMemory::Neighbour neighbour() const { return {memory_.name(), engine_.waker_name()}; }
  // Those of the node, in local order; names are empty of ranks that are not replayed.
  void connect(const std::vector<NodeMemory::Neighbour>& neighbours);
  // Feeds an event and turns the loop. Returns what the exchange did otherwise; empty: nothing.
  std::string feed(const base::Event& event);
  // Who waits for what, in the words of the errors of a call: a line for each step that this rank
  // has sent and that has not arrived.
  std::vector<std::string> waits();
  // Writes that no NIC has taken.
  size_t num_untaken() const noexcept;

 private:
  void check(const base::Event& event) const;  // that it fits
  void ring(const base::Event& event);
  std::string compare(const base::Event& event) const;
  void begin_at(uint64_t step);
  void turn() noexcept;

  const Facts facts_;
  const Plan plan_;
  const Masks masks_;
  NodeMemory memory_;
  std::unique_ptr<Exchange> exchange_;  // outlives the engine, which ends the writes under way
  std::vector<Nic*> nics_;              // of the engine
  engine::TransferEngine engine_;
  Waits waits_;
  HostKernels kernels_;
  std::vector<bool> unknown_;  // [W] sources whose arrivals nothing here shows
  const engine::MemoryHandle* handle_ = nullptr;
  std::vector<engine::RemoteRegion> regions_;
  std::set<std::pair<uint64_t, int>> sent_;  // (step, place of its phase) that have not arrived
};

}  // namespace moe_p2p::moe::replay
