// The network half of the protocol: doorbells in, writes out; immediates in, arrivals out. Runs on
// the proxy thread, once per turn, and never waits. One Exchange per communicator and rank.
//
// Sending: a doorbell word of step e says that a part of the outbox of a phase for a node is complete;
// one Write takes what stands beside the word to the landing of the rank with the same local index
// there, cut over all NICs, an immediate on each piece.
// Receiving: when as many immediates of a (phase, step slot, source, part) came as the source has NICs,
// all pieces of the part are visible. The flag counts the parts from the first on; with the last, which
// its immediates say that it is, it goes up to that of the step.
// Knocking: a partner that is waited for, and to which nothing is under way, may be gone without any
// write failing. So now and then it is sent immediates that it ignores.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "engine/transfer_engine.h"
#include "moe/masks.h"
#include "moe/node_memory.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe {

class Exchange final : public proxy::ProxyTask, public engine::ImmSink {
 public:
  // The rank with this local index on another node.
  struct Remote {
    int node;
    const engine::RemoteRegion* region;  // its data memory
    int num_nics;                        // it sends that many immediates at a time
  };
  // device: a GPU rings the doorbells, and its memory holds the regions; `data` is null where there
  // are no remotes.
  Exchange(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
           const engine::MemoryHandle* data, uint32_t communicator, std::vector<Remote> remotes,
           const Masks& masks, bool device = false);

  bool take_doorbells() noexcept override;
  bool publish_arrivals() noexcept override;
  // A GPU cannot wake the thread that runs this.
  bool must_poll() const noexcept override { return device_ && !remotes_.empty(); }
  void on_imm(const engine::ImmKey& key) noexcept override;

  // Once no thread runs this task any more and the peers are disconnected: waits until the engine
  // has let go of the last Request, turning the engine itself when `turn`. False: it did not, and
  // this object must not be destroyed.
  bool settle(bool turn, platform::Deadline deadline) noexcept;

  // --- any thread ---
  // The first failed write: its status and the node it was for; -1 while there is none. With masks
  // there never is: the rank is masked.
  struct Failure {
    int node = -1;
    std::optional<abi::Phase> phase;  // none: it was a knock
    base::Status status;
  };
  Failure failure() const noexcept;
  // Immediates that came of a step whose flag is not up, for the story of a timeout: "1 of 2".
  std::string immediates(abi::Phase phase, int slot, int node) const;
  // Doorbells of `word` and older for this slot are on the wire and acknowledged, or for a rank that
  // is masked.
  bool sent(abi::Phase phase, int slot, uint64_t word) const noexcept;
  // The same for the last weights that were rung; not every step has some.
  bool sent_weights(int slot) const noexcept;
  // For a host that waits for the partner on that node, every kKnock. If it is in vain and the host
  // still asks a while later, that is a failed write: the partner may have said its last word, and
  // left, while the knock was under way. For a GPU this object asks by itself.
  void knock(int node) noexcept;
  // Small next to any timeout, large next to some writes. A NIC may take longer to say that nobody is
  // there.
  static constexpr std::chrono::milliseconds kKnock{1000};

 private:
  // One part of a lane.
  struct Part {
    engine::Request request;
    bool busy = false;          // request is with the engine
    uint64_t word = 0;          // last doorbell taken
    uint64_t num_parts = 0;     // of its region
    uint64_t acknowledged = 0;  // last doorbell whose write completed
    uint64_t immediates = 0;    // received, of the use that is not published
  };
  // One (phase, step slot, other node). Belongs to the proxy thread; others read the atomics, all but
  // the first for stories only.
  struct Lane {
    int node = 0;
    int slot = 0;
    abi::Phase phase{};
    Part parts[abi::kMaxParts];
    std::atomic<uint64_t> acknowledged{
        0};  // last doorbell of which the writes of all parts completed
    // Of the use of the slot whose flag is not up:
    std::atomic<uint64_t> immediates{0};  // received, of all parts
    std::atomic<uint64_t> num_heard{1};   // parts that immediates named, up to the highest
    bool heard_last = false;              // the highest is the last
    int told = 0;                         // parts that the flag counts
    uint64_t published = 0;               // uses whose flag is up
  };
  struct Knock {  // at one node
    std::atomic<bool> wanted{false};
    engine::Request request;
    bool busy = false;
    base::Status failed;  // of the last one
    platform::Clock::time_point ended;
  };
  Lane& lane(abi::Phase phase, int slot, int index) const noexcept;
  Knock& knock_of(int node) const noexcept;
  const Remote& remote_of(int node) const noexcept;
  int rank_of(int node) const noexcept;
  static int most_parts(const Lane& lane) noexcept;
  uint64_t next_step(const Lane& lane) const noexcept;
  abi::BellWords bell(const Lane& lane, int index) const noexcept;
  bool take(Lane& lane, int index) noexcept;
  void finish(Lane& lane, Part& part) noexcept;
  void fail(const Failure& failure) noexcept;
  bool publish(Lane& lane) noexcept;
  bool owes(int node) const noexcept;
  void take_knocks() noexcept;

  const Plan& plan_;
  NodeMemory& memory_;
  engine::TransferEngine& engine_;
  const engine::MemoryHandle* data_;
  const uint32_t communicator_;
  const std::vector<Remote> remotes_;  // [N-1] by node
  const Masks masks_;
  const bool device_;
  const size_t num_lanes_;
  std::unique_ptr<Lane[]> lanes_;      // [phase][slot][N-1]
  std::unique_ptr<Knock[]> knocks_;    // [N-1]
  std::atomic<bool> knocking_{false};  // some knock is wanted or under way
  uint32_t turns_ = 0;
  platform::Clock::time_point next_knock_;
  bool dirty_ = false;  // an immediate came since the last publish_arrivals()
  Failure failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace moe_p2p::moe
