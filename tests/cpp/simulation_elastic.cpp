#include "simulation_elastic.h"

#include <algorithm>
#include <memory>
#include <random>

#include "simulation_member.h"

namespace moe_p2p::simulation {
namespace {

constexpr uint64_t kMaxTurnsPerSeat = 150'000;  // and as many again for each six changes
constexpr size_t kMaxProcesses = 40;

class Run {
 public:
  Run(const ElasticWorld& elastic, uint64_t seed)
      : elastic_(elastic),
        random_(seed),
        seed_(seed),
        program_(draw_program(elastic.world, random_)),
        warm_up_(draw_warm_up()),
        around_{
            .elastic = elastic, .world = elastic.world, .program = program_, .warm_up = warm_up_} {
    around_.stand_in = [this](int epoch, int seat) -> const base::Bytes& {
      return stand_in(epoch, seat);
    };
    around_.lost = [this](Id id) { return of(id).ended() || of(id).stopped() || of(id).is_out(); };
    around_.silent = [this](Id id, const Member& waits) { return is_silent(of(id), waits); };
    around_.random = [this] { return random_(); };
  }

  ElasticOutcome go() {
    begin();
    const auto most =
        kMaxTurnsPerSeat * static_cast<uint64_t>(around_.num_seats() * (1 + num_changes() / 6));
    try {
      while (goes_on()) {
        if (++around_.now > most) {
          outcome_.fault = "stuck:";
          for (const auto& each : processes_)
            if (each->active()) outcome_.fault += " " + each->where() + ";";
          break;
        }
        turn();
      }
    } catch (const base::Error& error) {
      outcome_.fault = error.what();
    }
    finish();
    return outcome_;
  }

 private:
  struct StandIn {
    std::unique_ptr<engine::TransferEngine> engine;
    std::vector<int32_t> masks;
    std::unique_ptr<moe::AllToAll> calls;
    base::Bytes address;
  };

  uint64_t below(uint64_t n) { return random_() % n; }
  Program draw_warm_up() {
    World world = elastic_.world;
    world.num_calls = 2;
    world.num_changes = 0;
    Program program = draw_program(world, random_);
    std::erase_if(program.items, [](const Item& item) { return item.action == Action::kClean; });
    return program;
  }
  Member& of(Id id) { return *processes_[id - 1]; }
  // It is lost, or has masked the one that waits, or has gone on while that was stopped.
  static bool is_silent(const Member& member, const Member& waits) {
    if (member.ended() || member.stopped() || member.is_out()) return true;
    if (member.epoch() != waits.epoch()) return waits.was_lost() && member.epoch() > waits.epoch();
    return member.masked(waits.seat());
  }
  // Memory of a rank that is gone; nothing is stored there.
  const base::Bytes& stand_in(int epoch, int seat) {
    StandIn& made = stand_ins_[{epoch, seat}];
    if (!made.calls) {
      made.masks.assign(static_cast<size_t>(around_.num_seats()), 0);
      made.engine = std::make_unique<engine::TransferEngine>(engine_options(around_.world, 1));
      made.calls = std::make_unique<moe::AllToAll>(
          *made.engine, nullptr, call_options(around_.world, seat, 401, made.masks));
      made.address = made.calls->address();
    }
    return made.address;
  }
  Member& start(int seat) {
    const Id id = processes_.size() + 1;
    processes_.push_back(std::make_unique<Member>(around_, seat, id, seed_ * 1000 + id));
    return *processes_.back();
  }
  // The first epoch calls the first seats; nobody is lost before it has entered.
  void begin() {
    Called called{.first = true};
    for (int i = 0; i < elastic_.num_seats_first; ++i) {
      const int seat = around_.masks() ? (i * 2 + 1) % around_.num_seats() / 1 : i;
      int free = seat;
      while (called.ids.contains(free)) free = (free + 1) % around_.num_seats();
      called.ids[free] = start(free).id();
    }
    around_.store.call(1, called);
    for (int i = 0; i < elastic_.world.num_lost; ++i)
      lose_later(*processes_[below(processes_.size())],
                 6 + below(program_.items.size() + 6 * static_cast<uint64_t>(num_changes())));
  }
  int num_changes() const { return elastic_.world.num_changes; }
  void lose_later(Member& member, uint64_t event) {
    member.lose_at(event, below(2) == 0 ? Member::Fate::kEnds : Member::Fate::kStops);
  }
  // From the first member on, until none has anything to do.
  bool goes_on() {
    const bool active =
        std::ranges::any_of(processes_, [](const auto& each) { return each->active(); });
    began_ = began_ || active;
    return active || !began_;
  }

  void turn() {
    if (below(32) == 0) others_come_and_wake();
    const uint64_t draw = random_();
    auto index = static_cast<size_t>(draw % processes_.size());
    if (draw >> 60 & 1) index = index * index / processes_.size();
    Member& member = *processes_[index];
    if (member.ended() || member.stopped()) return;
    const bool was_lost = member.was_lost();
    const auto before = snapshots(member);
    const bool moved = member.turn(draw >> 16 & 0xffff);
    write_where_it_was(before);
    if (!was_lost && member.was_lost()) ++outcome_.lost[static_cast<size_t>(member.place())];
    outcome_.trace = (outcome_.trace ^ (index * 2 + moved)) * 0x100000001b3ull;
  }
  // Successors of lost processes, processes for free seats, stopped ones that go on.
  void others_come_and_wake() {
    const auto seat = static_cast<int>(below(static_cast<uint64_t>(around_.num_seats())));
    const Id holder = around_.store.claimed(seat);
    const bool is_free =
        holder == 0 || of(holder).ended() || of(holder).stopped() || of(holder).left();
    if (is_free && processes_.size() < kMaxProcesses && below(2) == 0) {
      Member& member = start(seat);
      if (below(3) == 0) lose_later(member, below(15));
    }
    for (auto& each : processes_)
      if (!each->ended() && each->stopped() && below(40) == 0) {
        each->go_on();
        outcome_.gone_on += around_.store.claimed(each->seat()) != each->id();
      }
  }

  // --- (E1) broken: what a process stores in an epoch that others have left lands in theirs ---
  struct Snapshot {
    Member* owner;
    int epoch;
    std::vector<std::byte> bytes;
  };
  std::vector<Snapshot> snapshots(Member& member) {
    std::vector<Snapshot> found;
    if (!around_.broken(Broken::kOldMemory) || !member.is_member()) return found;
    for (auto& each : processes_) {
      if (each.get() == &member || each->ended() || each->epoch() <= member.epoch()) continue;
      const auto bytes = each->memory(member.epoch());
      if (!bytes.empty())
        found.push_back({each.get(), member.epoch(), {bytes.begin(), bytes.end()}});
    }
    return found;
  }
  static void write_where_it_was(const std::vector<Snapshot>& before) {
    for (const Snapshot& each : before) {
      const auto old = each.owner->memory(each.epoch);
      const auto here = each.owner->memory(each.owner->epoch());
      for (size_t i = 0; i < each.bytes.size() && i < here.size(); ++i)
        if (old[i] != each.bytes[i]) here[i] = old[i];
    }
  }

  // --- what is promised ---
  void finish() {
    outcome_.turns = around_.now;
    for (int k = 1; around_.store.is_decided(k); ++k)
      ++(around_.store.is_yes(k) ? outcome_.entered : outcome_.refused);
    for (const auto& each : processes_) {
      outcome_.tokens += each->tokens_checked();
      outcome_.joined += each->joined();
    }
    for (const auto& each : processes_)
      if (outcome_.fault.empty()) outcome_.fault = broken_promise(*each);
  }
  std::string broken_promise(const Member& member) {
    if (member.ended() || member.stopped() || !member.is_member() || member.is_out()) return "";
    if (!member.finished()) return "not finished: " + member.where();
    const auto& ids = around_.store.called(member.epoch())->ids;
    if (around_.store.claimed(member.seat()) != member.id() && !member.gave_up())
      return "a world of its own: " + member.where();
    for (const auto& [seat, id] : ids) {
      Member& other = of(id);
      if (elastic_.impatient || member.was_lost() || other.was_lost() || other.left()) continue;
      if (around_.masks() && member.masked(seat))
        return base::concat(member.where(), " has masked ", other.where(), ", which is there");
    }
    const bool someone_lost =
        std::ranges::any_of(processes_, [](const auto& each) { return each->was_lost(); });
    if (member.gave_up() && !someone_lost) return "gave up: " + member.where();
    return "";
  }

  const ElasticWorld& elastic_;
  std::mt19937_64 random_;
  const uint64_t seed_;
  const Program program_, warm_up_;
  Around around_;
  std::map<std::pair<int, int>, StandIn> stand_ins_;
  std::vector<std::unique_ptr<Member>> processes_;  // by id - 1
  bool began_ = false;
  ElasticOutcome outcome_;
};

}  // namespace

ElasticOutcome run(const ElasticWorld& world, uint64_t seed) { return Run(world, seed).go(); }

ElasticWorld elastic_world_of_seed(uint64_t seed) {
  constexpr int kShapes[][2] = {{1, 3}, {3, 1}, {2, 2}, {1, 4}, {4, 1}, {1, 2}, {2, 1}, {3, 2}};
  ElasticWorld elastic;
  World& world = elastic.world;
  world.num_nodes = kShapes[seed % 8][0], world.ranks_per_node = kShapes[seed % 8][1];
  world.steps_in_flight = 2 + static_cast<int>(seed / 8 % 2);
  world.num_nics = seed / 16 % 4 == 3 ? 2 : 1;
  world.topk = 1 + static_cast<int>(seed / 3 % 4);
  world.experts_per_rank = 1;
  world.chunk_tokens = 2;
  world.num_calls = 8;
  world.num_changes = 3;
  if (seed % 7 < 2) {  // numbers return more than once
    world.num_calls = 14;
    world.num_changes = 6;
    elastic.renews = seed % 7 == 0;
  }
  elastic.num_numbers = 3 + static_cast<int>(seed / 32 % 2);
  world.num_lost = static_cast<int>(seed / 8 % 4);
  const bool masks = world.num_nodes == 1 || world.ranks_per_node == 1;
  elastic.impatient = masks && seed % 5 == 4;
  world.patience = !masks ? 0 : elastic.impatient ? 20 + static_cast<int>(seed % 100) : 60;
  const int seats = world.num_nodes * world.ranks_per_node;
  elastic.num_seats_first = masks ? std::max(1, seats - static_cast<int>(seed / 7 % 3)) : seats;
  return elastic;
}

std::string describe(const ElasticWorld& elastic, uint64_t seed) {
  return base::concat(elastic.num_seats_first, " of ", describe(elastic.world, seed),
                      elastic.impatient ? ", impatient" : "");
}

}  // namespace moe_p2p::simulation
