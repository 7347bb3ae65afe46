// One rank of a simulation: what it does next of the program, what it checks, and how it ends.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proxy/proxy_thread.h"
#include "simulation_caller.h"

namespace moe_p2p::simulation {

class Rank {
 public:
  Rank(const World& world, const Program& program, int rank, uint64_t seed)
      : world_(world),
        program_(program),
        rank_(rank),
        end_(program.items.size()),
        masks_(static_cast<size_t>(world.num_nodes * world.ranks_per_node)) {
    engine_ = std::make_unique<engine::TransferEngine>(
        engine_options(world, seed * 1000 + static_cast<uint64_t>(rank) + 1));
    const auto options = call_options(world, rank, kCommunicator, masks_);
    all_to_all_ = std::make_unique<moe::AllToAll>(*engine_, nullptr, options);
    caller_ = std::make_unique<Caller>(world, program, rank, *all_to_all_, masks_);
  }

  enum class Fate { kFinishes, kStops, kCloses, kDies };

  moe::AllToAll& all_to_all() { return *all_to_all_; }
  bool finished() const { return next_ >= end_; }
  // No longer there; in worlds without closing ranks, at the end of what it does.
  bool ended() const { return world_.closing ? !engine_ : finished(); }
  // Did all of its program, and closed in order.
  bool completed() const { return next_ >= program_.items.size() && !gave_up_ && !died(); }
  bool died() const { return fate_ == Fate::kDies && finished(); }
  // From item `item` on this rank does nothing any more, and its NICs do not if `nics`; or it
  // closes, or dies there.
  void end_at(size_t item, Fate fate, bool nics = false) {
    end_ = item;
    fate_ = fate;
    nics_end_ = nics;
  }
  // Ranks that have not arrived where this one waits.
  std::vector<int> missing() { return caller_->missing(); }
  // As when the deadline of a call has passed.
  void give_up() { gave_up_ = true; }
  int idle_turns() const { return idle_; }
  // The rank that the error of this one blames; -1 while there is none.
  int blamed() const { return blamed_; }
  const std::string& error() const { return error_; }
  std::string where() const {
    if (next_ >= program_.items.size()) return base::concat("rank ", rank_, " closing");
    const Item& item = program_.items[next_];
    return base::concat("rank ", rank_, " at item ", next_, " (action ",
                        static_cast<int>(item.action), " of call ", item.call, ")");
  }

  bool turn_proxy() {
    if (!engine_ || (nics_end_ && finished())) return false;
    proxy::ProxyTask* const tasks[] = {all_to_all_->task()};
    return proxy::ProxyThread::turn(*engine_, tasks);
  }

  // Does what the next item allows now. True when it completed.
  bool advance() {
    if (gave_up_ || finished()) return world_.closing && close();
    const Item item = program_.items[next_];
    if (!caller_->perform(item)) {
      ++idle_;
      if (world_.patience > 0 && idle_ % world_.patience == 0) mask_missing();
      if (world_.closing) look_for_failures();
      return false;
    }
    idle_ = 0;
    ++next_;
    return true;
  }

  uint64_t tokens_checked() const { return caller_->tokens_checked(); }

 private:
  void mask_missing() {
    for (const int source : missing()) masks_[static_cast<size_t>(source)] = 1;
  }

  // What a call does while it waits.
  void look_for_failures() {
    try {
      all_to_all_->host().check(caller_->pending());
    } catch (const base::Error& error) {
      gave_up_ = true;
      error_ = error.what();
      const size_t at = error_.find("rank ", error_.find(": ", error_.find("rank ")));
      blamed_ = std::stoi(error_.substr(at + 5));
    }
  }

  // Whoever dies lets go of everything at once.
  bool close() {
    if (!engine_) return false;
    engine_->progress();  // this thread is the one that polls, if none did yet
    if (!died()) {
      all_to_all_->leave();
      if (!all_to_all_->has_left()) return false;
    }
    all_to_all_.reset();
    engine_.reset();
    return true;
  }

  const World& world_;
  const Program& program_;
  const int rank_;
  size_t end_;  // of its items
  Fate fate_ = Fate::kFinishes;
  bool nics_end_ = false;  // with it
  bool gave_up_ = false;
  int blamed_ = -1;
  std::string error_;
  std::vector<int32_t> masks_;
  std::unique_ptr<engine::TransferEngine> engine_;
  std::unique_ptr<moe::AllToAll> all_to_all_;
  std::unique_ptr<Caller> caller_;
  size_t next_ = 0;
  int idle_ = 0;  // turns in vain
};

}  // namespace moe_p2p::simulation
