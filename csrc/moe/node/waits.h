// Every wait of a host for other ranks: its deadline, ranks that are gone meanwhile, masks, and the
// error text of what went wrong. What breaks the communicator is latched here. Used by AllToAll and
// its backend, in the thread that makes the calls.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "moe/counters.h"
#include "moe/node/exchange.h"
#include "moe/node/masks.h"
#include "moe/node/memory.h"
#include "moe/node/progress.h"
#include "moe/node/wait_watch.h"
#include "moe/options.h"
#include "moe/plan/step.h"

namespace moe_p2p::moe {

class Waits {
 public:
  using Arrived = std::function<bool(int source)>;
  using Text = std::function<std::string()>;  // describes what is waited for
  using Breaks = bool (*)(base::Code);  // whether an error with this code breaks the communicator

  Waits(const Plan& plan, const AllToAllOptions& options, NodeMemory& memory, const Masks& masks,
        engine::TransferEngine& engine)
      : plan_(plan),
        options_(options),
        policy_(options.device ? without_sleep(options.wait) : options.wait),
        memory_(memory),
        masks_(masks),
        engine_(engine),
        counters_(plan.shape.world_size) {}
  bool orders_writes() const noexcept { return engine_.orders_writes(); }
  void set_exchange(Exchange* exchange) noexcept { exchange_ = exchange; }
  // [W] names of the ranks' hosts.
  void set_hosts(std::vector<std::string> hosts) { hosts_ = std::move(hosts); }
  Counters& counters() const noexcept { return counters_; }

  // Waits until ready(), with a deadline; throws or masks when a rank that has not arrived() is
  // gone.
  void wait(const std::function<bool()>& ready, const Arrived& arrived, const Text& text) const;

  // Waits until ready() for what another thread of the caller does, with the same deadline.
  void wait_for_caller(const std::function<bool()>& ready, const Text& text) const;

  // --- what ends a wait, and calls that do not wait ---
  // Throws when a rank of this node, or this rank's exchange, has failed.
  void check_abort(const Text& text) const;
  // Throws or masks when a rank that has not arrived() is gone.
  void check_neighbours(const Arrived& arrived, const Text& text) const;
  // Why a local rank will send nothing more: "rank 3's process has ended"; empty while it may.
  std::string gone(int local) const;
  // Ranks of this node whose process has ended before they closed: they take their words with them.
  std::vector<int> ended() const;
  bool aborted() const noexcept;  // some rank of this node gave up

  // --- kernels ---
  // Ranks that are behind this one's kernels (node/progress.h), but for `masked`. waited: so long;
  // not 0: names them in a line, and counts them.
  std::vector<int> behind(const Progress& progress, uint64_t step, std::chrono::milliseconds waited,
                          const std::vector<int64_t>& masked) const;

  // --- texts ---
  // "1 of 2 immediates came" for this rank's partner on that node.
  std::string progress(const Pending& pending, int node) const;
  // "dispatch of step 3 waits for rank 2 (node 1, 1 of 2 immediates came)"
  std::string waiting_for(const Pending& pending, const Arrived& arrived) const;
  // " rank 2 (node 1) rank 3 (node 1, ...)": ranks that have not arrived(), with progress(node) for
  // this rank's partners.
  std::string missing(const Arrived& arrived,
                      const std::function<std::string(int node)>& progress) const;
  [[noreturn]] void fail(base::Code code, const std::string& message) const;

  // --- what broke the communicator ---
  static bool unless_input(base::Code code) { return code != base::Code::kInvalidArgument; }
  static bool always(base::Code) { return true; }
  template <typename Call>
  void latching(Call&& call, Breaks breaks = unless_input) {
    try {
      call();
    } catch (const base::Error& error) {
      if (breaks(error.code())) latch(error);
      throw;
    }
  }
  // The first failure.
  const std::optional<base::Error>& broken() const noexcept { return broken_; }

 private:
  // Of a rank whose GPU idles until the wait is over, or stores the word: nobody wakes it then.
  static platform::WaitPolicy without_sleep(platform::WaitPolicy wait) {
    // Too short: a yield to other threads of this core may take longer than what is left to wait.
    constexpr std::chrono::microseconds kSpin{200};
    if (wait.mode == platform::WaitMode::kSleep) wait.mode = platform::WaitMode::kYield;
    wait.spin = std::max(wait.spin, kSpin);
    return wait;
  }
  int rank_of(int node, int local) const { return node * plan_.shape.ranks_per_node + local; }
  // Ends all waits on this node.
  void latch(const base::Error& error);
  // gone() for any rank; its gateway here may be gone too.
  std::string silent(int source) const;
  // Why the exchange failed.
  std::string failure_text(const Exchange::Failure& failure) const;
  // Probes this rank's partners on other nodes that have not arrived(source).
  void probe(const Arrived& arrived) const;
  // How long a wait lasts before it masks.
  std::chrono::milliseconds patience(const Arrived& arrived) const;
  // Masks ranks that have not arrived(source); false when none can be masked.
  bool mask_missing(const Arrived& arrived, const Text& text) const;
  // False when the deadline passed.
  bool wait_until(platform::Deadline deadline, const std::function<bool()>& ready,
                  const Arrived& arrived, const Text& text, WaitWatch& watch) const;

  const Plan& plan_;
  const AllToAllOptions& options_;
  const platform::WaitPolicy policy_;
  NodeMemory& memory_;
  const Masks& masks_;
  engine::TransferEngine& engine_;
  Exchange* exchange_ = nullptr;  // before connect(); nothing waits then
  std::optional<base::Error> broken_;
  std::vector<std::string> hosts_;
  mutable Counters counters_;
};

// Small next to any timeout, large next to its own cost (one flock per neighbour).
inline constexpr std::chrono::milliseconds kLookAtNeighbours{50};

}  // namespace moe_p2p::moe
