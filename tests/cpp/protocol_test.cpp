// The protocol under an adversary: thousands of schedules, and proof that a broken rule is seen.
// MOE_P2P_SIMULATE=<seed> replays one seed alone.
#include <cstdlib>
#include <set>
#include <string>

#include "base/mutation.h"
#include "doctest/doctest.h"
#include "simulation.h"

using namespace moe_p2p;
using base::Mutation;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kNumSeeds = 150;  // instrumented code is about twenty times slower
#else
constexpr uint64_t kNumSeeds = 3000;
#endif

// How many of the seeds from 1 on a mutation needs to show; 0: none of `limit` did.
uint64_t seeds_until_caught(Mutation mutation, const std::string& nic_settings, uint64_t limit) {
  base::active_mutation = mutation;
  uint64_t caught = 0;
  for (uint64_t seed = 1; seed <= limit && !caught; ++seed) {
    auto world = mutation == Mutation::kWriteToMasked ? simulation::masking_world_of_seed(seed)
                                                      : simulation::world_of_seed(seed);
    world.nic_settings = nic_settings;
    if (seed % 100 != 99 && !simulation::run(world, seed).fault.empty()) caught = seed;
  }
  base::active_mutation = Mutation::kNone;
  return caught;
}

void check_seeds(simulation::World (*world_of)(uint64_t seed), uint64_t num_seeds) {
  const char* only = std::getenv("MOE_P2P_SIMULATE");
  const uint64_t first = only ? std::strtoull(only, nullptr, 10) : 1;
  const uint64_t last = only ? first : num_seeds;
  uint64_t tokens = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    const auto world = world_of(seed);
    const auto outcome = simulation::run(world, seed);
    tokens += outcome.tokens;
    INFO("replay with MOE_P2P_SIMULATE=", seed, ": ", simulation::describe(world, seed));
    REQUIRE_MESSAGE(outcome.fault.empty(), outcome.fault);
  }
  const uint64_t ran = last - first + 1;
  MESSAGE(ran, " seeds, ", tokens, " (token, expert) pairs checked");
  CHECK(tokens > 0);
}

}  // namespace

TEST_CASE("protocol: no schedule loses, doubles, delays or misplaces a token") {
  check_seeds(simulation::world_of_seed, kNumSeeds);
}

TEST_CASE("protocol: no schedule of ranks that mask each other corrupts a token") {
  check_seeds(simulation::masking_world_of_seed, kNumSeeds / 3);
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
        Case{"NIC delivers immediates early", Mutation::kNone, "mutate=early_imm"}}) {
    CAPTURE(c.name);
    const uint64_t seed = seeds_until_caught(c.mutation, c.nic_settings, 300);
    CHECK(seed > 0);
    MESSAGE(c.name, ": seen by seed ", seed);
  }
}
