// The protocol under an adversary: 1,900 schedules, or 7,600 (seeds.h), and proof that a broken
// rule is seen. The faults are logical, so most schedules are left to the plain program, which is
// optimized (build.py); ASan's runs 97. MOE_P2P_SIMULATE=<seed> replays one seed alone.
#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/mutation.h"
#include "doctest/doctest.h"
#include "seeds.h"
#include "simulation.h"

using namespace moe_p2p;
using base::Mutation;

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kNumSeeds = 150;
#else
constexpr uint32_t kNumSeeds = 3000;
#endif

simulation::World world_of(Mutation mutation, uint64_t seed) {
  switch (mutation) {
    case Mutation::kCleanWithoutJump:
    case Mutation::kCleanWithoutWait:
    case Mutation::kWriteToMasked: return simulation::masking_world_of_seed(seed);
    case Mutation::kFlagOfOneNic:
    case Mutation::kFlagOfEarlierStep: return simulation::flag_world_of_seed(seed);
    case Mutation::kFailByLeft:
    case Mutation::kFarewellEarly:
    case Mutation::kFarewellOvertakes: return simulation::closing_world_of_seed(seed);
    default: return simulation::world_of_seed(seed);
  }
}

// How many of the seeds from 1 on a mutation needs to show; 0: none of `limit` did.
uint64_t seeds_until_caught(Mutation mutation, const std::string& nic_settings, uint64_t limit) {
  base::active_mutation = mutation;
  uint64_t caught = 0;
  for (uint64_t seed = 1; seed <= limit && !caught; ++seed) {
    auto world = nic_settings == "mutate=early_flag" ? simulation::flag_world_of_seed(seed)
                                                     : world_of(mutation, seed);
    world.nic_settings = nic_settings;
    if (seed % 100 != 99 && !simulation::run(world, seed).fault.empty()) caught = seed;
  }
  base::active_mutation = Mutation::kNone;
  return caught;
}

// A whole number and nothing else, or the run would replay a seed that nobody asked for.
uint64_t seed_from(const std::string& text) {
  uint64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, seed);
  if (error != std::errc() || stopped != end)
    throw std::invalid_argument("MOE_P2P_SIMULATE is '" + text + "', must be a seed from 0 to " +
                                std::to_string(std::numeric_limits<uint64_t>::max()));
  return seed;
}

// Seeds on all cores (seeds.h), worlds side by side: each of them is one thread's.
void check_seeds(simulation::World (*world_of)(uint64_t seed), uint32_t all) {
  const char* only = std::getenv("MOE_P2P_SIMULATE");
  const uint64_t first = only ? seed_from(only) : 1;
  const uint64_t last = only ? first : provider_test::num_seeds(all);
  std::atomic<uint64_t> next{first}, tokens{0};
  std::mutex mutex;
  std::map<uint64_t, std::string> faults;
  const auto work = [&] {
    for (uint64_t seed = next++; seed <= last; seed = next++) {
      const auto outcome = simulation::run(world_of(seed), seed);
      tokens += outcome.tokens;
      if (outcome.fault.empty()) continue;
      const std::lock_guard lock(mutex);
      faults[seed] = outcome.fault;
      next = last + 1;
    }
  };
  {
    std::vector<std::jthread> threads(only ? 0
                                           : std::max(1U, std::thread::hardware_concurrency()) - 1);
    for (auto& thread : threads) thread = std::jthread(work);
    work();
  }
  for (const auto& [seed, fault] : faults)
    FAIL_CHECK("replay with MOE_P2P_SIMULATE=", seed, ": ",
               simulation::describe(world_of(seed), seed), "\n", fault);
  const uint64_t ran = last - first + 1;
  MESSAGE(ran, " seeds, ", tokens.load(), " (token, expert) pairs checked");
  CHECK(tokens > 0);
}

}  // namespace

TEST_CASE("protocol: no schedule loses, doubles, delays or misplaces a token") {
  check_seeds(simulation::world_of_seed, kNumSeeds);
}

TEST_CASE("protocol: no schedule of ranks that mask each other corrupts a token") {
  check_seeds(simulation::masking_world_of_seed, kNumSeeds / 3);
}

TEST_CASE("protocol: no schedule of NICs that store flags corrupts a token") {
  check_seeds(simulation::flag_world_of_seed, kNumSeeds / 5);
}

TEST_CASE("protocol: what is no seed is refused by name") {
  CHECK(seed_from("0") == 0);
  CHECK(seed_from("18446744073709551615") == std::numeric_limits<uint64_t>::max());
  for (const char* text : {"", "abc", "12x", "-1", " 7", "1.5", "18446744073709551616"})
    CHECK_THROWS_WITH_AS(seed_from(text),
                         (std::string("MOE_P2P_SIMULATE is '") + text +
                          "', must be a seed from 0 to 18446744073709551615")
                             .c_str(),
                         std::invalid_argument);
}

TEST_CASE("protocol: whoever closes first, what was sent arrives and nobody waits for ever") {
  check_seeds(simulation::closing_world_of_seed, kNumSeeds);
}

TEST_CASE("protocol: a seed replays exactly and another one does not") {
  std::set<uint64_t> traces;
  for (uint64_t seed : {3, 8, 17, 22}) {
    const auto world = simulation::world_of_seed(seed);
    const auto trace = simulation::run(world, seed).trace;
    CHECK(trace == simulation::run(world, seed).trace);
    traces.insert(trace);
  }
  CHECK(traces.size() == 4);
}

TEST_CASE("protocol: broken rules are caught") {
  struct Case {
    std::string name;
    Mutation mutation;
    std::string nic_settings;
  };
  for (const Case& c :
       {Case{"slot reused one step early", Mutation::kReuseSlotEarly, ""},
        Case{"no wait for an empty peer", Mutation::kSkipEmptyPeer, ""},
        Case{"immediates counted without source", Mutation::kCountWithoutSource, ""},
        Case{"arrival published before its payload", Mutation::kPublishBeforePayload, ""},
        Case{"arrival published with the last part", Mutation::kLastPartIsAll, ""},
        Case{"sums before the weights are here", Mutation::kSumBeforeWeights, ""},
        Case{"weights taken for an earlier step's", Mutation::kWeightsInEveryStep, ""},
        Case{"writes to ranks that are masked", Mutation::kWriteToMasked, ""},
        Case{"steps count on after a clean of masks", Mutation::kCleanWithoutJump, ""},
        Case{"slots used before others have cleaned", Mutation::kCleanWithoutWait, ""},
        Case{"writes to a rank that left fail", Mutation::kFailByLeft, ""},
        Case{"a rank leaves before all has arrived", Mutation::kFarewellEarly, ""},
        Case{"a rank that left has sent what is here", Mutation::kFarewellOvertakes, ""},
        Case{"a flag taken for all NICs'", Mutation::kFlagOfOneNic, ""},
        Case{"a flag taken for the next step's", Mutation::kFlagOfEarlierStep, ""},
        Case{"NIC stores flags early", Mutation::kNone, "mutate=early_flag"},
        Case{"NIC delivers immediates early", Mutation::kNone, "mutate=early_imm"}}) {
    CAPTURE(c.name);
    const uint64_t seed = seeds_until_caught(c.mutation, c.nic_settings, 1000);
    CHECK(seed > 0);
    MESSAGE(c.name, ": seen by seed ", seed);
  }
}
