// The memory that the ranks of one node share: every rank's signal words and regions, mapped by all
// of them. Kernels and the exchange reach every word and region through this class, so that no
// offset is computed twice.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "kernels/abi/region.h"
#include "kernels/abi/signal.h"
#include "moe/plan/plan.h"
#include "platform/shm.h"
#include "platform/wait.h"

namespace moe_p2p::moe {

class NodeMemory {
 public:
  // Allocates this rank's part; attach() maps the neighbours'. No regions when a GPU holds them.
  NodeMemory(const Plan& plan, int rank, bool with_regions = true);

  struct Neighbour {
    std::string memory_name;  // of its shared memory
    std::string waker_name;   // of its proxy's event count
  };
  // [L] in local order; this rank's own entry is used for its waker only. Of a rank that is not
  // there both names are empty: its memory is blank, and it counts as closed.
  void attach(const std::vector<Neighbour>& neighbours);
  // Maps a rank of another node on this host, where NICs write in place: this node's outboxes for
  // it then are its landings. Called for all ranks of other nodes, or none.
  void attach_far(int rank, const std::string& memory_name);
  // Regions of the rank with this local index on another node; empty unless attached.
  std::span<std::byte> far_data(int node) const noexcept;

  int rank() const noexcept { return rank_; }
  int node() const noexcept { return rank_ / ranks_per_node_; }
  int local() const noexcept { return rank_ % ranks_per_node_; }
  int num_local() const noexcept { return ranks_per_node_; }
  const std::string& name() const noexcept { return own_.name(); }
  bool inherited() const noexcept { return own_.inherited(); }  // by a forked child
  // False once the process of this local rank has ended. One system call.
  bool alive(int local) const noexcept;

  // --- words, by the local rank that owns them ---
  using Word = std::atomic_ref<uint64_t>;
  abi::SignalHead& head(int local) const noexcept;
  Word flag(int local, abi::Phase phase, int slot, int source) const noexcept;
  // Of the bells of a phase and slot: the step in which some are rung, and the first parts' tags by
  // node.
  Word rung(int local, abi::Phase phase, int slot) const noexcept;
  std::atomic_ref<uint32_t> bell_tag(int local, abi::Phase phase, int slot,
                                     int node) const noexcept;
  std::atomic_ref<uint32_t> slot_bell(int local, abi::Phase phase, int slot, int node,
                                      int index) const noexcept;
  // Rings for one part.
  void ring(int local, abi::Phase phase, int slot, int node, const abi::BellWords& words, int part,
            uint64_t step) const noexcept;
  abi::Doorbell& doorbell(int local, abi::Phase phase, int slot, int node) const noexcept;
  Word gather_count(int local, int slot, int node) const noexcept;
  platform::EventCount& bell(int local) const noexcept;   // waiters of that rank
  platform::EventCount& waker(int local) const noexcept;  // the proxy of that rank

  // --- regions of one step slot ---
  using Region = abi::RegionHeader;
  Region& inbox(int local, int slot, int source_local) const noexcept;
  Region& outbox(int local, int slot, int node) const noexcept;
  Region& landing(int local, int slot, int source_node) const noexcept;
  Region& partial_inbox(int local, int slot, int expert_local) const noexcept;
  Region& gather(int local, int slot, int source_node, int expert_local) const noexcept;
  Region& combine_outbox(int local, int slot, int source_node) const noexcept;
  Region& combine_landing(int local, int slot, int expert_node) const noexcept;
  Region& weights_inbox(int local, int slot, int source_local) const noexcept;
  Region& weights_outbox(int local, int slot, int node) const noexcept;
  Region& weights_landing(int local, int slot, int source_node) const noexcept;

  // One arrival flag of this rank (kernels/abi/region.h), where hosts see arrivals by them.
  Word arrival_flag(abi::Phase phase, int slot, int node, int part, int nic) const noexcept;
  // How many flags a part has; 0: arrivals are seen by the words above.
  int flag_words() const noexcept { return flag_words_; }
  void set_flag_words(int num) noexcept { flag_words_ = num; }

  // This rank's regions, which its NICs may access.
  std::span<std::byte> data() const noexcept;
  // The signal memory of a local rank, for a GPU to map.
  std::byte* signals(int local) const noexcept;
  // A local rank's board: what arrives there beside the steps (BoardLayout).
  std::byte* board(int local) const noexcept { return signals(local) + board_; }
  // Words of this rank's farewells to and from its partner on that node (exchange.h).
  Word farewell_out(int node) const noexcept {
    return board_word(local(), plan_.board.farewell_out, node);
  }
  Word farewell_in(int node) const noexcept {
    return board_word(local(), plan_.board.farewell_in, node);
  }
  // A Left: whether the partner of a local rank on that node has closed its communicator.
  Word left(int local, int node) const noexcept {
    return board_word(local, plan_.board.left, node);
  }

 private:
  Region& region(int local, int slot, uint64_t at) const noexcept;
  Region& region_in(std::byte* memory, int slot, uint64_t at) const noexcept;
  // What local rank `local` sends to `node`: region `outbox` of its own, or `landing` over there.
  Region& sent(int local, int slot, int node, uint64_t outbox, uint64_t landing,
               uint64_t bytes) const noexcept;
  Word board_word(int local, uint64_t at, int node) const noexcept {
    return Word(*reinterpret_cast<uint64_t*>(board(local) + at + 8 * static_cast<uint64_t>(node)));
  }
  int other(int node) const noexcept;  // index of another node among the others, as seen here

  const Plan plan_;
  const int rank_;
  const int ranks_per_node_;
  const uint64_t board_;  // behind signals and regions
  int flag_words_ = 0;
  platform::SharedMemory own_;
  std::vector<platform::SharedMemory> mapped_;  // [L]; empty for this rank
  std::vector<platform::SharedMemory> wakers_;  // [L]
  std::vector<platform::SharedMemory> far_;     // [W], of ranks of other nodes; or empty
};

// How a partner on another node has closed its communicator; 0: not closed, as far as is known.
enum class Left : uint64_t { kNo = 0, kInOrder = 1, kFailed = 2 };

// The slots of a region lie behind its header and, for dispatch, its counts.
inline std::byte* region_bytes(abi::RegionHeader& region, uint64_t at = 0) noexcept {
  return reinterpret_cast<std::byte*>(&region) + at;
}

}  // namespace moe_p2p::moe
