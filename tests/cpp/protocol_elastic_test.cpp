// Worlds that change, under an adversary: 1,000 schedules, or 100,000 with MOE_P2P_ALL_SEEDS=1, and
// proof that each broken rule is seen. MOE_P2P_SIMULATE=<seed> replays one seed alone.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "simulation_elastic.h"

using namespace moe_p2p;
using simulation::Broken;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kFewSeeds = 100;
constexpr int kEpochs = 120;
#else
constexpr uint64_t kFewSeeds = 1000;
constexpr int kEpochs = 1'200;
#endif

struct Sums {
  std::mutex mutex;
  simulation::ElasticOutcome all;
  std::map<uint64_t, std::string> faults;

  void add(uint64_t seed, const simulation::ElasticOutcome& one) {
    const std::lock_guard lock(mutex);
    all.tokens += one.tokens;
    all.entered += one.entered;
    all.refused += one.refused;
    all.joined += one.joined;
    all.gone_on += one.gone_on;
    for (size_t i = 0; i < one.lost.size(); ++i) all.lost[i] += one.lost[i];
    if (!one.fault.empty()) faults[seed] = one.fault;
  }
};

uint64_t seeds_until_caught(Broken rule, uint64_t limit, std::string& how) {
  for (uint64_t seed = 1; seed <= limit; ++seed) {
    auto world = simulation::elastic_world_of_seed(seed);
    world.broken = rule;
    if (rule == Broken::kReusesEarly) {  // many epochs
      world.world.num_calls = 14;
      world.world.num_changes = 6;
      world.num_numbers = 2;
      world.renews = true;
    }
    how = simulation::run(world, seed).fault;
    if (!how.empty()) return seed;
  }
  return 0;
}

}  // namespace

TEST_CASE("elastic: no schedule of ranks that come, end, stop and go on corrupts a token") {
  const char* only = std::getenv("MOE_P2P_SIMULATE");
  const uint64_t first = only ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last = only ? first : std::getenv("MOE_P2P_ALL_SEEDS") ? 100'000 : kFewSeeds;
  std::atomic<uint64_t> next{first};
  Sums sums;
  const auto work = [&] {
    for (uint64_t seed = next++; seed <= last; seed = next++) {
      sums.add(seed, simulation::run(simulation::elastic_world_of_seed(seed), seed));
      if (!sums.faults.empty()) next = last + 1;
    }
  };
  {
    std::vector<std::jthread> threads(only ? 0
                                           : std::max(1U, std::thread::hardware_concurrency()) - 1);
    for (auto& thread : threads) thread = std::jthread(work);
    work();
  }
  for (const auto& [seed, fault] : sums.faults)
    FAIL_CHECK("replay with MOE_P2P_SIMULATE=", seed, ": ",
               simulation::describe(simulation::elastic_world_of_seed(seed), seed), "\n", fault);
  std::string lost;
  for (size_t i = 0; i < sums.all.lost.size(); ++i)
    lost += std::string(i ? ", " : "") + simulation::kPlaces[i] + " " +
            std::to_string(sums.all.lost[i]);
  const uint64_t ran = last - first + 1;
  MESSAGE(ran, " seeds, ", sums.all.tokens, " (token, expert) pairs checked, ", sums.all.entered,
          " epochs entered, ", sums.all.refused, " refused, ", sums.all.joined, " newcomers in, ",
          sums.all.gone_on, " went on after their seat was given away; lost at: ", lost);
  CHECK((only || sums.all.joined > 0));
}

// Every number in immediates is used ten times, while ranks come, are lost and go on.
TEST_CASE("elastic: worlds have more epochs than there are numbers") {
  for (const uint64_t seed : {0, 1}) {  // one node, nodes of one rank
    auto elastic = simulation::elastic_world_of_seed(seed);
    elastic.world.num_nics = 2;
    elastic.world.num_calls = kEpochs + 1;
    elastic.world.num_changes = kEpochs;
    elastic.world.num_lost = 3;
    elastic.num_numbers = kEpochs / 10;
    elastic.renews = true;
    const auto outcome = simulation::run(elastic, seed);
    CHECK(outcome.fault == "");
    CHECK(outcome.entered > kEpochs);
    MESSAGE(outcome.entered, " epochs entered, ", outcome.refused, " refused");
  }
}

TEST_CASE("elastic: broken rules are caught") {
  struct Case {
    std::string rule, name;
    Broken broken;
  };
  for (const Case& c :
       {Case{"E1", "memory of the epoch before", Broken::kOldMemory},
        Case{"E1", "one number in the immediates of all epochs", Broken::kOldNumber},
        Case{"N", "a number returns when its epoch is left", Broken::kReusesEarly},
        Case{"E2", "memory is zeroed when its owner enters", Broken::kZeroLate},
        Case{"E3", "an epoch is for seats", Broken::kSeats},
        Case{"E4", "staged before it has connected", Broken::kStagedFirst},
        Case{"E5", "each decides for itself", Broken::kOwnDecision},
        Case{"E5", "yes before all are staged", Broken::kYesAtOnce},
        Case{"E6", "a member enters within a segment", Broken::kEntersEarly},
        Case{"E6", "steps alone count in the next epoch", Broken::kWarmUpInside},
        Case{"E7", "an epoch goes when it is left", Broken::kStopsServing},
        Case{"E8", "a member stays in the old epoch", Broken::kGoesOnInOld},
        Case{"E9", "who is not called goes on", Broken::kUncalledGoesOn}}) {
    CAPTURE(c.name);
    std::string how;
    const uint64_t seed = seeds_until_caught(c.broken, 2000, how);
    CHECK(seed > 0);
    MESSAGE("(", c.rule, ") ", c.name, ": seen by seed ", seed, ": ", how.substr(0, 120));
  }
}
