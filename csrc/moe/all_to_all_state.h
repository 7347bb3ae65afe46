// What an AllToAll holds, for the two files that implement it: all_to_all.cpp makes and ends it,
// all_to_all_calls.cpp has the calls and the stories of their failures.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moe/calls.h"
#include "moe/device/calls.h"
#include "moe/host/gather.h"
#include "moe/host/kernels.h"
#include "moe/node/exchange.h"
#include "moe/node/memory.h"

namespace moe_p2p::moe {

struct AllToAll::State final : engine::ImmSink {
  State(engine::TransferEngine& engine, proxy::ProxyThread* proxy, const AllToAllOptions& options);

  int checked_rank() const;
  int32_t* checked_masks() const;
  int rank_of(int node, int local) const { return node * plan.shape.ranks_per_node + local; }
  void require_usable() const;

  // --- failures ---
  [[noreturn]] void fail(base::Code code, const std::string& message) const;
  // The first failure stays, and stops everybody on this node who waits.
  void latch(const base::Error& error);
  template <typename Story>
  void check_abort(Story&& waiting_for) const;
  // Why a local rank will send nothing more: "rank 3's process has ended"; empty while it may.
  std::string gone(int local) const;
  // The same of any rank, whose gateway here may be gone too.
  std::string silent(int source) const;
  // Why the exchange failed.
  std::string failure_text(const Exchange::Failure& failure) const;
  bool failed() const;
  // Begins to close; until all that this rank has sent arrived, or its partners are gone.
  void leave();
  void wait_to_leave();
  // Of the combines that this rank has handed in, those whose doorbell has been or will be rung.
  std::vector<Step> combines_to_send() const;
  // Ranks of this node whose signal memory or process a wait depends on.
  template <typename Arrived, typename Story>
  void check_neighbours(Arrived&& arrived, Story&& waiting_for) const;
  // This rank's partners on other nodes that have not arrived(source).
  template <typename Arrived>
  void probe(Arrived&& arrived) const;
  // How long a wait lasts before it masks.
  template <typename Arrived>
  std::chrono::milliseconds patience(Arrived&& arrived) const;
  // Masks who has not arrived(source); false when nobody can be masked.
  template <typename Arrived, typename Story>
  bool mask_missing(Arrived&& arrived, Story&& waiting_for) const;
  // " rank 2 (node 1) rank 3 (node 1, ...)": who has not arrived(source), with progress(node) of this
  // rank's partners.
  template <typename Arrived, typename Progress>
  std::string missing(Arrived&& arrived, Progress&& progress) const;
  std::string waiting_for(const Pending& pending) const;
  // Throws what kernels of this rank's GPU, or others of the node, have failed with.
  void check_device() const;
  void check_device_once();  // the same, and latches it

  void on_imm(const engine::ImmKey& key) noexcept override {
    if (key.phase == HostGather::kPhase) gather.on_imm(key);
    exchange->on_imm(key);
  }

  // What breaks the communicator is latched.
  template <typename Call>
  void latching(Call&& call);
  // Until ready(), with a deadline; gives up when whoever has not arrived() is gone, or masks it.
  template <typename Ready, typename Arrived, typename Story>
  void wait(Ready&& ready, Arrived&& arrived, Story&& waiting_for);
  // False when the deadline passed.
  template <typename Ready, typename Arrived, typename Story>
  bool wait_until(platform::Deadline deadline, Ready&& ready, Arrived&& arrived,
                  Story&& waiting_for);
  // Advances until done; every time something moved the deadline starts anew.
  template <typename Advance, typename GetPending>
  void run(Advance&& advance, GetPending&& get_pending);
  // A call that launches kernels.
  template <typename Call>
  void launch(Call&& call);

  // Of a communicator that has failed, at close: data under way to partners that live takes less.
  static constexpr std::chrono::seconds kFailedPatience{5};
  // Small next to any timeout, large next to its own cost (one flock per neighbour).
  static constexpr std::chrono::milliseconds kLookAtNeighbours{50};

  engine::TransferEngine& engine;
  proxy::ProxyThread* proxy;
  const AllToAllOptions options;
  const Plan plan;
  const Masks masks;
  NodeMemory memory;
  HostKernels kernels;
  StepRing ring;
  HostGather gather;
  const engine::MemoryHandle* data;  // null where a GPU has no other nodes to talk to
  std::vector<const engine::Peer*> peers;
  std::unique_ptr<Exchange> exchange;
  DeviceMemory device_memory;
  std::unique_ptr<DeviceKernels> device;
  bool has_signals = false;            // the device's addresses of them are known
  std::list<DispatchCall> dispatches;  // sent, not yet received
  std::list<CombineCall> combines;
  std::optional<base::Error> story;
  bool closed = false;
};

}  // namespace moe_p2p::moe
