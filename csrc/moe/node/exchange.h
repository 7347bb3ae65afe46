// The network half of the protocol: doorbells in, writes out; immediates in, arrivals out. Runs on
// the proxy thread, once per turn, and never waits. One Exchange per communicator and rank.
//
// Sending. A doorbell word of step e means: a part of the outbox of a phase for a node is complete.
// One Write takes the bytes described beside the word to the landing of the rank with the same
// local index there, cut over all NICs, with an immediate on each piece. A turn reads one word of
// each phase and step slot, however many nodes there are. When that word names a new step:
//   1. it scans the tags of the nodes until every doorbell is taken;
//   2. it posts the other parts and the write of each lane until none is left.
// Receiving. When a (phase, step slot, source, part) has as many immediates as the source has NICs,
// all pieces of the part are visible. The flag counts the parts from the first on; with the last,
// which its immediates mark as such, it goes up to the step's value.
// Probes. If a rank waits for a partner to which no write is under way, no write can fail when the
// partner dies. So now and then the rank sends it immediates that the partner ignores.
// Farewells. A rank that closes waits, partner by partner, until all its writes have arrived there,
// and then sends one word: how many writes it made, and whether it closes in order. From then on a
// failed write to this rank is no failure, and a wait for anything beyond its writes fails once
// all of them have arrived.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/transfer_engine.h"
#include "moe/node/arrival_flags.h"
#include "moe/node/masks.h"
#include "moe/node/memory.h"
#include "moe/plan/step.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe {

class Exchange final : public proxy::ProxyTask, public engine::ImmSink {
 public:
  // The rank with this local index on another node. Null regions: it is absent, and masked.
  struct Remote {
    int node;
    const engine::RemoteRegion* region;  // its data memory
    const engine::RemoteRegion* board;   // and its board
    int num_nics;                        // it sends one immediate per NIC at a time
  };
  // device: a GPU rings the doorbells, and its memory holds the regions; `data` and `board` are
  // null where there are no remotes.
  Exchange(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
           const engine::MemoryHandle* data, const engine::MemoryHandle* board,
           uint32_t communicator, std::vector<Remote> remotes, const Masks& masks,
           bool device = false);

  // Before the first turn. write: a flag follows what is sent (docs/protocol.md, section 7).
  // mapped: the flags of this rank, which this object stores; or null.
  void use_flags(bool write, MappedFlags* mapped) noexcept {
    writes_flags_ = write;
    mapped_ = mapped;
  }

  bool take_doorbells() noexcept override;
  bool publish_arrivals() noexcept override;
  // A GPU cannot wake the thread that runs this.
  bool must_poll() const noexcept override { return device_ && !remotes_.empty(); }
  void on_imm(const engine::ImmKey& key) noexcept override;

  // Begins to close, on the polling thread: nothing more will be rung here but the combines of
  // these steps, which neighbours may hand in last. Called again with fewer steps when these
  // neighbours are gone.
  struct Closing {
    bool failed = false;
    // gather_counts' writes that arrived at that node; nullopt while one is under way. Null: 0.
    std::function<std::optional<uint64_t>(int node)> gathers;
    std::span<const Step> combines;  // the last combine that this rank has handed in of each slot
  };
  void leave(const Closing& closing) noexcept;

  // Called once no thread runs this task any more and the peers are disconnected: waits until the
  // engine holds no Request, turning the engine itself when `turn`. False: it still holds one, and
  // this object must not be destroyed.
  bool settle(bool turn, platform::Deadline deadline) noexcept;

  // --- any thread ---
  // After leave(): every partner has its farewell, or has left or is lost or masked.
  bool has_left() const noexcept;
  // The first failure between this rank and a partner; node -1 while there is none. With masks
  // there is none but kFlush: the rank is masked.
  struct Failure {
    // kFlush: this rank's own GPU; `node` is its own.
    enum class Kind : uint8_t { kWrite, kProbe, kLeft, kFlush };
    int node = -1;
    Kind kind{};
    abi::Phase phase{};  // of a write, or of what a closed rank has not sent
    uint64_t step = 0;
    base::Status status;  // kLeft: kPeerDead; kFlush: kTransport
  };
  Failure failure() const noexcept;
  // Immediates that arrived of a step whose flag is not up, for the text of a timeout: "1 of 2".
  std::string immediates(abi::Phase phase, int slot, int node) const;
  // For a host that waits for the partner on that node, every kProbeInterval. A failed probe counts
  // as a failed write only if the host is still waiting later: the peer may have finished and
  // closed while the probe was in flight. For a GPU this object probes by itself.
  void probe(int node) noexcept;
  // When the last doorbell of a phase was taken, and its last arrival published, in nanoseconds of
  // the host's clock; noted from the first call on. For `bench`.
  struct Times {
    int64_t taken, published;
  };
  Times times(abi::Phase phase) noexcept;
  // Small next to any timeout, large next to some writes. A NIC may take longer to report that a
  // peer is gone.
  static constexpr std::chrono::milliseconds kProbeInterval{1000};

 private:
  // One part of a lane.
  struct Part {
    engine::Request request;
    bool busy = false;          // request is with the engine
    uint64_t word = 0;          // last doorbell taken
    uint64_t num_parts = 0;     // of its region
    uint64_t acknowledged = 0;  // last doorbell whose write completed
    uint64_t immediates = 0;    // received, of the unpublished use
  };
  // One (phase, step slot, other node). Belongs to the proxy thread; others read the atomics, for
  // error texts only.
  struct Lane {
    int node = 0;
    int slot = 0;
    abi::Phase phase{};
    Part parts[abi::kMaxParts];
    uint64_t acknowledged = 0;  // last doorbell for which the writes of all parts completed
    uint64_t wanted = 0;        // when this rank closes: the last doorbell that will be rung
    // Of the use of the slot whose flag is not up:
    std::atomic<uint64_t> immediates{0};  // received, of all parts
    std::atomic<uint64_t> num_named{1};   // parts named by immediates, up to the highest
    bool last_named = false;              // the highest is the last
    bool touched = false;                 // an immediate arrived since the last look
    bool open = false;                    // among open_
    int counted = 0;                      // parts that the flag counts
    uint64_t published = 0;               // uses whose flag is up
  };
  // The rank with this local index on another node.
  struct Partner {
    std::atomic<bool> probe_wanted{false};
    engine::Request probe;
    bool probing = false;
    base::Status probe_status;  // of the last probe
    platform::Clock::time_point probed;

    uint64_t written = 0;    // writes of lanes that arrived there
    uint64_t received = 0;   // its immediates, of lanes and of gather_counts
    uint64_t farewells = 0;  // immediates of its farewell
    bool left = false;       // its farewell arrived: it needs nothing more
    bool complete = false;   // all that it sent arrived too, and ranks of this node can see it
    bool lost = false;       // a write to it has failed
    engine::Request farewell;
    enum class Parting : uint8_t { kNo, kSent, kDone } parting{};
  };
  // One (phase, step slot), of all nodes.
  struct Row {
    uint64_t rung = 0;     // the last step seen there, plus 1
    bool awaited = false;  // bells of that step are still to come
  };
  Lane& lane(abi::Phase phase, int slot, int index) const noexcept;
  Partner& partner_of(int node) const noexcept;
  const Remote& remote_of(int node) const noexcept;
  int rank_of(int node) const noexcept;
  struct TimeOf {
    std::atomic<int64_t> taken{0}, published{0};
  };
  void note(std::atomic<int64_t>& time) noexcept;
  void record(base::Event::Kind kind, const Lane& lane, int part, uint64_t step, uint64_t b,
              uint64_t c) const noexcept;
  static int most_parts(const Lane& lane) noexcept;
  uint64_t next_step(const Lane& lane) const noexcept;
  abi::BellWords bell(const Lane& lane, int index) const noexcept;
  bool slots_written(const Lane& lane, const abi::BellWords& sent, int part) const noexcept;
  bool take(Lane& lane, int index) noexcept;
  bool advance(Lane& lane) noexcept;
  static bool may_ring(const Lane& lane, int index) noexcept;
  static bool is_quiet(const Lane& lane) noexcept;
  bool look_at(size_t row) noexcept;
  void finish(Lane& lane, Part& part) noexcept;
  void fail(const Failure& failure) noexcept;
  void stop(const Failure& failure) noexcept;
  void check_flushes() noexcept;
  bool publish(Lane& lane) noexcept;
  bool may_answer(const Lane& lane, uint64_t step) const noexcept;
  void store_flags(const Lane& lane, uint64_t step, int first, int end, bool whole) noexcept;
  const Lane* owed_by(int node) const noexcept;
  void take_probes() noexcept;
  bool partner_left(int node) noexcept;
  bool all_arrived(int node) const noexcept;
  bool part_from(const Remote& remote) noexcept;
  bool publish_left() noexcept;
  void check_left(int node) noexcept;

  const Plan& plan_;
  NodeMemory& memory_;
  engine::TransferEngine& engine_;
  const engine::MemoryHandle* data_;
  const engine::MemoryHandle* board_;
  const uint32_t communicator_;
  const std::vector<Remote> remotes_;  // [N-1] by node
  const Masks masks_;
  const bool device_;
  bool writes_flags_ = false;
  MappedFlags* mapped_ = nullptr;
  const size_t num_lanes_;
  std::unique_ptr<Lane[]> lanes_;        // [phase][slot][N-1]
  std::unique_ptr<Partner[]> partners_;  // [N-1]
  std::atomic<bool> probing_{false};     // some probe is wanted or under way
  uint32_t turns_ = 0;
  platform::Clock::time_point next_probe_;
  std::vector<Row> rows_;       // [phase][slot]
  std::vector<Lane*> open_;     // [..] lanes with a write under way, or with parts to be rung
  std::vector<Lane*> touched_;  // [..] lanes since the last publish_arrivals()
  bool dirty_ = false;          // an immediate arrived since then
  bool leaving_ = false;
  Closing closing_;                    // its steps are in Lane::wanted
  std::atomic<size_t> num_parted_{0};  // partners that this rank is done with
  std::atomic<bool> notes_times_{false};
  TimeOf times_[abi::kNumPhases];
  Failure failure_;
  std::atomic<bool> failed_{false};
};

}  // namespace moe_p2p::moe
