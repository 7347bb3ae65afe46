// The whole protocol in one thread: every rank's calls, exchange, engine and software NICs, stepped
// in an order drawn from a seed. Nothing reads a clock, so a seed replays exactly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_p2p::simulation {

struct World {
  int num_nodes = 2, ranks_per_node = 2, num_nics = 2;
  int topk = 4, experts_per_rank = 2, chunk_tokens = 4, steps_in_flight = 2, part_bytes = 0;
  int num_calls = 6;
  std::string nic_settings;  // added to the seed of each NIC
  // Ranks have masks: one that has had so many turns without getting anything done masks whom it
  // waits for. 0: no masks. All calls then have one chunk.
  int patience = 0;
  // Ranks close when they have done all of their program, each on its own.
  bool closing = false;
  // NICs store arrival flags, which ranks wait for.
  bool flags = false;
  // Ranks that stop for good, somewhere in their program. Where ranks close: that close there, or
  // die.
  int num_lost = 0;
  // How often members may change (simulation_elastic.h); masks are not cleaned then.
  int num_changes = 0;
};

struct Outcome {
  std::string fault;    // empty: every token came once, whole, in its place, and back
  uint64_t trace = 0;   // hash of every scheduling decision and what it moved
  uint64_t tokens = 0;  // (token, expert) pairs checked
  uint64_t turns = 0;
};

// Runs a program of calls drawn from the seed: paired, solo, chunked, released, two in flight, with
// weights from dispatch or from combine, token counts from zero to the maximum, all tokens to one
// expert, tokens without any. With masks, what comes of a masked rank is there or not, but whole;
// of any other it is there. Where ranks close, all of them end: with the whole program when nobody
// is lost, else as far as they came, and none fails for a rank that did all of its own.
Outcome run(const World& world, uint64_t seed);

// "4x2 ranks, 2 NICs, S 2, seed 17": what to put into MOE_P2P_SIMULATE to run it alone.
std::string describe(const World& world, uint64_t seed);
// The world that a seed stands for where ranks mask each other: nodes of one rank, or one node.
World masking_world_of_seed(uint64_t seed);
// World_of_seed, or one where ranks mask each other or close, with flags.
World flag_world_of_seed(uint64_t seed);
// The world that a seed stands for where ranks close.
World closing_world_of_seed(uint64_t seed);
// The world that a seed stands for, of many shapes up to 64 ranks.
World world_of_seed(uint64_t seed);

}  // namespace moe_p2p::simulation
