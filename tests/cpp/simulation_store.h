// What processes of a simulation of changing worlds agree on: the words of docs/elastic.md,
// section 2, and the mutations of its rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/wire.h"

namespace moe_p2p::simulation {

// Deliberate faults, one for each rule at least.
enum class Broken {
  kNothing,
  kOldMemory,       // (E1): members go on in the memory of the epoch before
  kOldNumber,       // (E1): immediates of all epochs have one number
  kReusesEarly,     // (N): a number returns when its epoch is left
  kZeroLate,        // (E2): memory is zeroed when its owner enters
  kSeats,           // (E3): whoever has the seat acts on the words, called or not
  kStagedFirst,     // (E4): "staged" before it has connected
  kOwnDecision,     // (E5): at its deadline each enters with those that it knows as staged
  kYesAtOnce,       // (E5): "yes" as soon as the giver itself is staged
  kEntersEarly,     // (E6): a member enters as soon as the epoch is decided, within a segment
  kWarmUpInside,    // (E6): a newcomer warms up in the epoch that it will enter
  kStopsServing,    // (E7): the epoch before goes when the next one is entered
  kGoesOnInOld,     // (E8): after a decision one member in two makes its calls in the old epoch
  kUncalledGoesOn,  // (E9): who is not called goes on in its own epoch
};

using Id = uint64_t;  // of a process; 0: none

// One change of members, as the engine wants it: the same for all.
struct Change {
  std::set<int> add, remove;  // seats
  bool renew = false;         // a new epoch though nobody comes: takes masked ranks back

  bool needs_epoch() const { return renew || !add.empty() || !remove.empty(); }
};

// What epoch k calls.
struct Called {
  size_t change = 0;        // it is entered there; of the first epoch any
  bool first = false;       // of a world that begins
  std::map<int, Id> ids{};  // by seat
};

class Store {
 public:
  // --- who is there ---
  void claim(int seat, Id id) { claims_[seat] = id; }
  Id claimed(int seat) const {
    const auto found = claims_.find(seat);
    return found == claims_.end() ? 0 : found->second;
  }
  void renew(Id id, uint64_t now) { renewed_[id] = now; }
  bool leased(Id id, uint64_t now, uint64_t lease) const {
    const auto found = renewed_.find(id);
    return found != renewed_.end() && now - found->second < lease;
  }

  // --- decisions: the first value stays ---
  bool has_change(size_t change) const { return changes_.contains(change); }
  const Change& change(size_t change, const Change& wish) {
    return changes_.try_emplace(change, wish).first->second;
  }
  const Change& change(size_t change) const { return changes_.at(change); }
  void call(int epoch, const Called& called) { called_.try_emplace(epoch, called); }
  const Called* called(int epoch) const {
    const auto found = called_.find(epoch);
    return found == called_.end() ? nullptr : &found->second;
  }
  void decide(int epoch, bool yes) {
    if (decided_.try_emplace(epoch, yes).second && yes) last_yes_ = std::max(last_yes_, epoch);
  }
  bool is_decided(int epoch) const { return decided_.contains(epoch); }
  bool is_yes(int epoch) const { return is_decided(epoch) && decided_.at(epoch); }
  int last_yes() const { return last_yes_; }
  // The epoch that is called and not decided, or the next one to call.
  int next_epoch() const { return static_cast<int>(decided_.size()) + 1; }

  // --- words of one process in one epoch ---
  void put_address(int epoch, int seat, const base::Bytes& address) {
    addresses_[{epoch, seat}] = address;
  }
  const base::Bytes* address(int epoch, int seat) const {
    const auto found = addresses_.find({epoch, seat});
    return found == addresses_.end() ? nullptr : &found->second;
  }
  // Which numbers in immediates are taken on the engine there.
  void put_taken(int epoch, int seat, const std::set<int>& taken) { taken_[{epoch, seat}] = taken; }
  bool has_taken(int epoch, int seat) const { return taken_.contains({epoch, seat}); }
  // From `first` on, of so many; the first that is free for all that are called. -1: none is.
  int free_number(int epoch, int first, int most) const {
    for (int i = 0; i < most; ++i) {
      const int number = (first + i) % most;
      if (std::ranges::none_of(called_.at(epoch).ids, [&](const auto& each) {
            return taken_.at({epoch, each.first}).contains(number);
          }))
        return number;
    }
    return -1;
  }
  void put_staged(int epoch, int seat) { staged_.insert({epoch, seat}); }
  bool is_staged(int epoch, int seat) const { return staged_.contains({epoch, seat}); }
  bool all_staged(int epoch) const {
    for (const auto& [seat, id] : called_.at(epoch).ids)
      if (!is_staged(epoch, seat)) return false;
    return true;
  }
  // Some member has entered: newcomers' engines begin to serve.
  void put_entered(int epoch) { entered_.insert(epoch); }
  bool is_entered(int epoch) const { return entered_.contains(epoch); }

 private:
  std::map<int, Id> claims_;
  std::map<Id, uint64_t> renewed_;
  std::map<size_t, Change> changes_;
  std::map<int, Called> called_;
  std::map<int, bool> decided_;
  int last_yes_ = 0;
  std::map<std::pair<int, int>, base::Bytes> addresses_;
  std::map<std::pair<int, int>, std::set<int>> taken_;
  std::set<std::pair<int, int>> staged_;
  std::set<int> entered_;
};

}  // namespace moe_p2p::simulation
