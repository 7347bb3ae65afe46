// One process of a world that changes: its seat, its epochs, and where it is in the program.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proxy/proxy_thread.h"
#include "simulation_caller.h"
#include "simulation_elastic.h"

namespace moe_p2p::simulation {

class Member;

// What the processes of a run share.
struct Around {
  const ElasticWorld& elastic;
  const World& world;
  const Program& program;
  const Program& warm_up;
  Store store{};
  uint64_t now = 0;                                                   // turns so far
  std::function<const base::Bytes&(int epoch, int seat)> stand_in{};  // address of an absent seat
  std::function<bool(Id)> lost{};                                     // it will not stage
  std::function<bool(Id, const Member&)> silent{};  // this member waits for it in vain
  std::function<uint64_t()> random{};

  // Turns without one of a process, after which it has no lease: far more than a living one lacks.
  uint64_t lease() const {
    return 400 * static_cast<uint64_t>(world.num_nodes * world.ranks_per_node);
  }
  int num_seats() const { return world.num_nodes * world.ranks_per_node; }
  bool masks() const { return world.patience > 0; }
  bool broken(Broken rule) const { return elastic.broken == rule; }
};

class Member {
 public:
  Member(Around& around, int seat, Id id, uint64_t seed)
      : around_(around), store_(around.store), seat_(seat), id_(id) {
    engine_ = std::make_unique<engine::TransferEngine>(engine_options(around.world, seed));
    store_.claim(seat, id);
    store_.renew(id, around.now);
  }

  enum class Fate { kNone, kEnds, kStops };
  // After so many things done it is lost.
  void lose_at(uint64_t event, Fate fate) {
    fate_at_ = event;
    fate_ = fate;
  }

  int seat() const { return seat_; }
  Id id() const { return id_; }
  int epoch() const { return current_; }
  bool ended() const { return !engine_; }
  bool stopped() const { return stopped_; }
  bool was_lost() const { return was_lost_; }
  bool is_out() const { return out_; }
  bool left() const { return left_; }
  bool gave_up() const { return gave_up_; }
  bool finished() const { return next_ >= around_.program.items.size(); }
  bool is_member() const { return current_ > 0; }
  // It still has something to do that others may wait for.
  bool active() const { return engine_ && !stopped_ && !out_ && is_member() && !finished(); }
  Place place() const { return place_; }
  bool masked(int seat) const { return epochs_.at(current_).masks[static_cast<size_t>(seat)] != 0; }
  bool joined() const { return joined_late_; }  // a world that ran
  uint64_t tokens_checked() const { return tokens_; }
  std::string where() const {
    return base::concat("seat ", seat_, " (process ", id_, ") in epoch ", current_, " at item ",
                        next_, ", ", kPlaces[static_cast<size_t>(place_)]);
  }
  void go_on() { stopped_ = false; }

  // This rank's memory in an epoch; empty where it has none.
  std::span<std::byte> memory(int epoch) {
    const auto found = epochs_.find(epoch);
    if (found == epochs_.end() || found->second.state < State::kConnected) return {};
    moe::AllToAll& calls = *found->second.all_to_all;
    const auto own = calls.signals()[static_cast<size_t>(seat_ % around_.world.ranks_per_node)];
    return {own.data(), own.size() + calls.plan().regions.total_bytes};
  }

  // Does one thing, drawn by the caller. True when something moved.
  bool turn(uint64_t draw) {
    if (out_) return turn_proxy();
    store_.renew(id_, around_.now);
    if (draw % 16 == 0) look();
    bool moved = false;
    switch (draw / 16 % 8) {
      case 0:
      case 1:
      case 2: return turn_proxy();
      case 3: moved = stages_beside() && stage(); break;
      default: moved = advance(); break;
    }
    events_ += moved;
    if (fate_ != Fate::kNone && !was_lost_ && events_ >= fate_at_ && active_yet()) lose();
    return moved;
  }

 private:
  enum class State : uint8_t { kMade, kConnected, kStaged, kCurrent, kLeaving };
  struct Epoch {
    std::vector<int32_t> masks;
    std::unique_ptr<moe::AllToAll> all_to_all;
    std::unique_ptr<Caller> caller;
    State state = State::kMade;
    int number = 0;
    bool leaves = false;
    int turns_left = 3000;  // to serve the epoch after it was left
  };

  // --- who is there ---
  void look() {
    if (around_.broken(Broken::kUncalledGoesOn) || around_.broken(Broken::kSeats)) return;
    if (store_.claimed(seat_) != id_) out_ = true;
  }
  bool names_me(const Called& called) const {
    const auto found = called.ids.find(seat_);
    return found != called.ids.end() && (found->second == id_ || around_.broken(Broken::kSeats));
  }
  bool active_yet() const { return !is_member() || !finished(); }
  void lose() {
    was_lost_ = true;
    if (fate_ == Fate::kStops) {
      stopped_ = true;
      return;
    }
    epochs_.clear();
    engine_.reset();
  }
  void done(Place place) { place_ = place; }

  // --- the proxy ---
  bool turn_proxy() {
    std::vector<proxy::ProxyTask*> tasks;
    for (auto& [epoch, each] : epochs_)
      if (each.state >= State::kConnected) tasks.push_back(each.all_to_all->task());
    const bool moved = proxy::ProxyThread::turn(*engine_, tasks);
    for (auto it = epochs_.begin(); it != epochs_.end();) {
      Epoch& each = it->second;
      const bool gone = each.state == State::kLeaving && serve(each);
      it = gone ? close(it) : std::next(it);
    }
    return moved;
  }

  // --- numbers (moe_p2p/engine/communicators.py) ---
  std::map<int, Epoch>::iterator close(std::map<int, Epoch>::iterator epoch) {
    closed_.emplace_back(epoch->second.number, epoch->first);
    return epochs_.erase(epoch);
  }
  // Gives back what can be; what is not severed yet another time.
  void reclaim() {
    while ((around_.num_seats() + 1) * static_cast<int>(taken_.size()) >
               around_.elastic.num_numbers &&
           !closed_.empty()) {
      const auto [number, epoch] = closed_.front();
      if (!sever(epoch)) return;
      closed_.erase(closed_.begin());
      taken_.erase(number);
    }
  }
  bool sever(int epoch) {
    try {
      engine_->sever(tag(epoch), {}, platform::Clock::now());
    } catch (const base::Error& error) {
      if (error.code() != base::Code::kTimeout) throw;
      return false;  // its polling thread is this one: in a later turn
    }
    return true;
  }
  static uint64_t tag(int epoch) { return static_cast<uint64_t>(epoch); }
  // Of epoch k. -1: not all have put down theirs, or none is free, and k will be refused.
  int agree_on_number(int k) {
    if (!store_.has_taken(k, seat_)) {
      reclaim();
      store_.put_taken(k, seat_, taken_);
    }
    for (const auto& [seat, id] : store_.called(k)->ids)
      if (!store_.has_taken(k, seat)) return refuse_late(k), -1;
    if (around_.broken(Broken::kOldNumber)) return 0;
    const int number = store_.free_number(k, k, around_.elastic.num_numbers);
    if (number < 0 && ++staging_idle_ % 500 == 0) store_.decide(k, false);
    return number;
  }
  // True when an epoch that was left needs this rank no more.
  bool serve(Epoch& each) {
    if (around_.broken(Broken::kOldMemory)) return false;
    if (around_.broken(Broken::kStopsServing)) return true;
    if (!std::exchange(each.leaves, true)) each.all_to_all->leave();
    return each.all_to_all->has_left() || --each.turns_left == 0;
  }

  // --- staging ---
  // The place of the next change in the program, or its end.
  size_t next_change() const {
    const auto& items = around_.program.items;
    return static_cast<size_t>(
        std::find_if(items.begin() + static_cast<std::ptrdiff_t>(std::min(next_, items.size())),
                     items.end(), [](const Item& i) { return i.action == Action::kChange; }) -
        items.begin());
  }
  // Whether it stages at any time, and not only at the change.
  bool stages_beside() {
    if (!is_member() || begun_for_ == next_change()) return true;
    if (around_.random() % 40 != 0) return false;
    begun_for_ = next_change();
    return true;
  }
  // The epoch above this one's that calls this process and is not refused; 0: none.
  int attempt() const {
    for (int k = std::max(current_, left_epoch_) + 1; store_.called(k) != nullptr; ++k)
      if (names_me(*store_.called(k)) && (!store_.is_decided(k) || store_.is_yes(k))) return k;
    return 0;
  }
  bool stage() {
    for (auto it = epochs_.begin(); it != epochs_.end();) {
      const int k = it->first;
      const bool refused = k > current_ && store_.is_decided(k) && !store_.is_yes(k);
      it = refused ? close(it) : std::next(it);
    }
    const int k = attempt();
    if (k == 0) return is_member() && call();
    const auto found = epochs_.find(k);
    if (found == epochs_.end()) return make(k);
    Epoch& epoch = found->second;
    if (epoch.state == State::kMade) return connect(k, epoch);
    if (epoch.state == State::kConnected) {
      store_.put_staged(k, seat_);
      epoch.state = State::kStaged;
      done(Place::kStaged);
      return true;
    }
    if (store_.is_decided(k)) return false;
    if (!store_.all_staged(k) && !around_.broken(Broken::kYesAtOnce)) return refuse_late(k);
    store_.decide(k, true);
    done(Place::kDecided);
    return true;
  }
  // "No", at once where somebody is seen to have ended, else at a deadline.
  bool refuse_late(int k) {
    bool hopeless = ++staging_idle_ % 20'000 == 0;
    for (const auto& [seat, id] : store_.called(k)->ids)
      hopeless |= staging_idle_ % 100 == 0 && !store_.is_staged(k, seat) && around_.lost(id);
    if (hopeless) store_.decide(k, false);
    return hopeless;
  }
  bool call() {
    const size_t at = next_change();
    if (at >= around_.program.items.size() || current_ != store_.last_yes() || out_) return false;
    const int k = store_.next_epoch();
    if (store_.called(k) != nullptr) return refuse_late(k);  // without this process
    const size_t number = around_.program.items[at].call;
    const Change& change = store_.change(number, wish());
    if (!change.needs_epoch()) return false;
    std::set<int> seats = change.add;
    for (const auto& [seat, id] : store_.called(current_)->ids) seats.insert(seat);
    Called called{.change = number};
    for (const int seat : seats) {
      const Id id = store_.claimed(seat);
      if (!change.remove.contains(seat) && store_.leased(id, around_.now, around_.lease()))
        called.ids[seat] = id;
    }
    // Whole nodes; in these worlds there must be all.
    if (!around_.masks() && static_cast<int>(called.ids.size()) < around_.num_seats()) return false;
    if (called.ids.empty()) return false;
    store_.call(k, called);
    return true;
  }
  // What the engine wants of the next change, as it is asked first.
  Change wish() const {
    Change change;
    const auto& here = store_.called(current_)->ids;
    for (int seat = 0; seat < around_.num_seats(); ++seat) {
      const Id id = store_.claimed(seat);
      const auto found = here.find(seat);
      if (id != 0 && (found == here.end() || found->second != id) &&
          store_.leased(id, around_.now, around_.lease()))
        change.add.insert(seat);
    }
    change.renew = around_.elastic.renews || gave_up_here_ || around_.random() % 8 == 0;
    const int removed = static_cast<int>(around_.random() % static_cast<uint64_t>(8 + here.size()));
    if (around_.masks() && here.size() > 2 && here.contains(removed) &&
        !change.add.contains(removed))
      change.remove.insert(removed);
    return change;
  }
  std::unique_ptr<moe::AllToAll> make_calls(std::vector<int32_t>& masks, uint32_t number,
                                            uint64_t tag) {
    auto options = call_options(around_.world, seat_, number, masks);
    options.tag = tag;
    return std::make_unique<moe::AllToAll>(*engine_, nullptr, options);
  }
  bool make(int k) {
    const int number = agree_on_number(k);
    if (number < 0) return false;
    taken_.insert(number);
    Epoch& epoch = epochs_[k];
    epoch.number = number;
    epoch.masks.assign(static_cast<size_t>(around_.num_seats()), 0);
    for (int seat = 0; seat < around_.num_seats(); ++seat)
      epoch.masks[static_cast<size_t>(seat)] = !store_.called(k)->ids.contains(seat);
    epoch.all_to_all =
        make_calls(epoch.masks, kCommunicator + static_cast<uint32_t>(number), tag(k));
    store_.put_address(k, seat_, epoch.all_to_all->address());
    if (around_.broken(Broken::kStagedFirst)) store_.put_staged(k, seat_);
    done(Place::kMade);
    return true;
  }
  bool connect(int k, Epoch& epoch) {
    std::vector<base::Bytes> addresses;
    for (int seat = 0; seat < around_.num_seats(); ++seat) {
      const bool absent = !store_.called(k)->ids.contains(seat);
      const base::Bytes* address = absent ? &around_.stand_in(k, seat) : store_.address(k, seat);
      if (address == nullptr) return refuse_late(k);
      addresses.push_back(*address);
    }
    addresses[static_cast<size_t>(seat_)] = epoch.all_to_all->address();
    try {
      epoch.all_to_all->connect(addresses);
    } catch (const base::Error& error) {
      if (error.code() != base::Code::kPeerDead) throw;
      store_.decide(k, false);  // its process has ended
      return true;
    }
    epoch.state = State::kConnected;
    epoch.caller = std::make_unique<Caller>(around_.world, around_.program, seat_,
                                            *epoch.all_to_all, epoch.masks);
    done(Place::kConnected);
    return true;
  }

  // --- steps ---
  bool enter(int k) {
    const bool first = store_.called(k)->first;
    if (is_member() || first) store_.put_entered(k);
    if (is_member()) {
      tokens_ += epochs_.at(current_).caller->tokens_checked();
      epochs_.at(current_).state = State::kLeaving;
      if (around_.broken(Broken::kReusesEarly)) taken_.erase(epochs_.at(current_).number);
    } else if (!first) {
      joined_late_ = true;
    }
    current_ = k;
    if (!first) entered_for_ = store_.called(k)->change;
    epochs_.at(k).state = State::kCurrent;
    if (around_.broken(Broken::kZeroLate)) std::ranges::fill(memory(k), std::byte{0});
    idle_ = 0;
    gave_up_here_ = false;
    done(Place::kEntered);
    return true;
  }
  bool staged(int k) const { return epochs_.contains(k) && epochs_.at(k).state == State::kStaged; }
  bool advance() {
    if (out_) return false;
    if (!is_member()) return advance_newcomer();
    if (finished()) return false;
    const Item& item = around_.program.items[next_];
    if (item.action == Action::kChange) return change(item.call);
    if (gave_up_here_) {  // every call of this epoch fails
      next_ = next_change();
      return false;
    }
    if (around_.broken(Broken::kEntersEarly) && item.action == Action::kDispatchSend)
      if (const int k = attempt(); k > 0 && store_.is_yes(k) && staged(k)) return enter(k);
    // Its engine waits until others serve, or a while: all others may be lost.
    if (joined_late_ && !store_.is_entered(current_)) {
      if (++idle_ < 2000) return false;
      store_.put_entered(current_);
    }
    Epoch& epoch = epochs_.at(current_);
    if (!epoch.caller->perform(item)) {
      wait(epoch);
      return false;
    }
    idle_ = 0;
    step_on();
    done(item.action == Action::kDispatchSend   ? Place::kDispatchSent
         : item.action == Action::kDispatchRecv ? Place::kDispatched
         : item.action == Action::kCombineSend  ? Place::kCombineSent
         : item.action == Action::kCombineRecv  ? Place::kCombined
                                                : Place::kReleased);
    return true;
  }
  void step_on() {
    ++next_;
    if (next_ == around_.program.items.size()) {
      look();
      tokens_ += epochs_.at(current_).caller->tokens_checked();
    }
  }
  // What a call does while it waits.
  void wait(Epoch& epoch) {
    const int patience = around_.elastic.impatient ? around_.world.patience : 60;
    if (++idle_ % patience != 0) return;
    const std::vector<int> missing = epoch.caller->missing();
    const auto is_lost = [&](int seat) {
      const auto& ids = store_.called(current_)->ids;
      return ids.contains(seat) && around_.silent(ids.at(seat), *this);
    };
    // A deadline that is long enough finds the silent ones only; others where all is stuck.
    const bool all = around_.elastic.impatient || idle_ > 150 * patience;
    if (around_.masks()) {
      for (const int seat : missing)
        if (all || is_lost(seat)) epoch.masks[static_cast<size_t>(seat)] = 1;
    } else if (all || idle_ > 10 * patience) {
      if (!all && std::ranges::none_of(store_.called(current_)->ids,
                                       [&](const auto& each) { return is_lost(each.first); }))
        return;
      gave_up_ = gave_up_here_ = true;
      idle_ = 0;
      next_ = next_change();
    }
  }
  // At a change: the next epoch, or nothing. A rank that leaves is not masked in the old one: that
  // would keep from it what its partners' proxies have not sent yet.
  bool change(size_t number) {
    look();
    if (out_) return false;
    if (entered_for_ == number) return skip();  // only kEntersEarly
    const int last = store_.last_yes();
    for (int k = current_ + 1; k <= last; ++k) {
      if (!store_.is_yes(k) || store_.called(k)->change != number) continue;
      if (store_.change(number).remove.contains(seat_)) return leave();
      if (!names_me(*store_.called(k))) return stop_here();
      if (around_.broken(Broken::kGoesOnInOld) && seat_ % 2 == 1) return skip();
      if (!staged(k)) return stage();
      ++next_;
      return enter(k);
    }
    if (!store_.has_change(number) && around_.random() % 40 != 0) return false;  // its engine waits
    const Change& change = store_.change(number, wish());
    if (change.remove.contains(seat_)) return leave();
    if (!change.needs_epoch()) {
      done(Place::kChanged);
      return skip();
    }
    if (around_.broken(Broken::kOwnDecision)) return decide_alone();
    begun_for_ = next_change();
    return stage();
  }
  bool leave() {
    left_ = out_ = true;
    tokens_ += epochs_.at(current_).caller->tokens_checked();
    epochs_.at(current_).state = State::kLeaving;
    return true;
  }
  bool skip() {
    step_on();
    return true;
  }
  // Not called: no call more in its epoch. With its seat it waits for a later epoch.
  bool stop_here() {
    if (around_.broken(Broken::kUncalledGoesOn)) return skip();
    tokens_ += epochs_.at(current_).caller->tokens_checked();
    epochs_.at(current_).state = State::kLeaving;
    left_epoch_ = current_;
    current_ = 0;
    next_ = 0;
    return true;
  }
  bool decide_alone() {
    const int k = attempt();
    if (k == 0 || !staged(k) || ++idle_ % 20 != 0) return stage();
    for (const auto& [seat, id] : store_.called(k)->ids)
      if (!store_.is_staged(k, seat)) epochs_.at(k).masks[static_cast<size_t>(seat)] = 1;
    store_.decide(k, true);
    ++next_;
    return enter(k);
  }
  bool advance_newcomer() {
    const int k = attempt();
    if (k > 0 && store_.is_yes(k) && staged(k)) {
      if (around_.broken(Broken::kWarmUpInside) && !store_.called(k)->first && !warm_) {
        Epoch& epoch = epochs_.at(k);
        return warm_up(*epoch.all_to_all, epoch.masks);
      }
      const auto& items = around_.program.items;
      const auto at = std::ranges::find_if(items, [&](const Item& item) {
        return item.action == Action::kChange && item.call == store_.called(k)->change;
      });
      next_ = store_.called(k)->first ? 0 : static_cast<size_t>(at - items.begin()) + 1;
      return enter(k);
    }
    if (!warm_ && around_.masks() && !around_.broken(Broken::kWarmUpInside) &&
        (store_.called(1) == nullptr || !names_me(*store_.called(1))))
      return warm_up_alone();
    return stage();
  }
  // Steps in an epoch of its own, whose other seats are all absent.
  bool warm_up_alone() {
    std::vector<int32_t> masks(static_cast<size_t>(around_.num_seats()), 1);
    const auto calls = make_calls(masks, 400, 0);
    std::vector<base::Bytes> addresses;
    for (int seat = 0; seat < around_.num_seats(); ++seat)
      addresses.push_back(seat == seat_ ? calls->address() : around_.stand_in(0, seat));
    calls->connect(addresses);
    done(Place::kAlone);
    return warm_up(*calls, masks);
  }
  bool warm_up(moe::AllToAll& calls, std::vector<int32_t>& masks) {
    const std::vector<int32_t> before = masks;
    std::ranges::fill(masks, 1);
    masks[static_cast<size_t>(seat_)] = 0;
    {
      Caller caller(around_.world, around_.warm_up, seat_, calls, masks);
      for (const Item& item : around_.warm_up.items)
        MOE_P2P_CHECK(caller.perform(item), base::Code::kProtocol, "a step alone has to wait");
    }
    std::ranges::copy(before, masks.begin());
    warm_ = true;
    return true;
  }

  Around& around_;
  Store& store_;
  const int seat_;
  const Id id_;
  std::unique_ptr<engine::TransferEngine> engine_;
  std::map<int, Epoch> epochs_;
  std::set<int> taken_;  // numbers
  std::vector<std::pair<int, int>>
      closed_{};     // number and epoch, not severed yet, the oldest first
  int current_ = 0;  // epoch; 0: a newcomer
  int left_epoch_ = 0;
  size_t next_ = 0;
  size_t entered_for_ = static_cast<size_t>(-1);  // the change of its epoch
  size_t begun_for_ = static_cast<size_t>(-1);    // the change for which it stages beside steps
  int idle_ = 0, staging_idle_ = 0;
  bool out_ = false, left_ = false, stopped_ = false, was_lost_ = false, warm_ = false;
  bool gave_up_ = false, gave_up_here_ = false, joined_late_ = false;
  uint64_t events_ = 0, fate_at_ = 0, tokens_ = 0;
  Fate fate_ = Fate::kNone;
  Place place_ = Place::kClaimed;
};

}  // namespace moe_p2p::simulation
