// Worlds that change (docs/elastic.md), in one thread: processes claim seats, are called to epochs,
// stage, enter and leave them, and end, stop and go on at any step of that. What they call in an
// epoch is the real AllToAll over the real engine and the software NIC, one of each epoch; who is
// in it is decided by the rules of that page, over a store that is a map.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "simulation.h"
#include "simulation_store.h"

namespace moe_p2p::simulation {

struct ElasticWorld {
  World world;
  int num_seats_first = 0;  // seats taken when the world begins
  // Ranks mask each other at random, living ones too; else only ranks that are lost are masked.
  bool impatient = false;
  int num_numbers = 3;  // in immediates, of an engine: few, so that they return
  bool renews = false;  // each change is an epoch
  Broken broken = Broken::kNothing;
};

// Where a process was lost.
enum class Place : uint8_t {
  kClaimed,
  kAlone,
  kMade,
  kConnected,
  kStaged,
  kDecided,
  kEntered,
  kDispatchSent,
  kDispatched,
  kCombineSent,
  kCombined,
  kReleased,
  kChanged,
};
inline constexpr std::array kPlaces{
    "claimed",  "alone",    "address given",          "connected",  "staged",
    "decided",  "entered",  "dispatch sent",          "dispatched", "combine sent",
    "combined", "released", "change without an epoch"};

struct ElasticOutcome {
  std::string fault;  // empty: as the page promises
  uint64_t trace = 0, tokens = 0, turns = 0;
  uint64_t entered = 0, refused = 0;  // epochs that were decided "yes" and "no"
  uint64_t joined = 0;                // newcomers that entered a world that ran
  uint64_t gone_on = 0;               // stopped processes that went on with their seat given away
  std::array<uint64_t, kPlaces.size()> lost{};  // processes that ended or stopped there
};

ElasticOutcome run(const ElasticWorld& world, uint64_t seed);

// One node, nodes of one rank, or, without masks, nodes of several ranks.
ElasticWorld elastic_world_of_seed(uint64_t seed);
std::string describe(const ElasticWorld& world, uint64_t seed);

}  // namespace moe_p2p::simulation
