#include "simulation.h"

#include <algorithm>
#include <memory>
#include <random>

#include "simulation_rank.h"

namespace moe_p2p::simulation {
namespace {

// Enough for the slowest schedule seen (about 3,000 a rank) several times over; a protocol that is
// stuck never ends.
constexpr uint64_t kMaxTurnsPerRank = 60'000;
// Turns in vain after which a rank that waits for a dead one gives up, if nothing else told it.
constexpr int kDeadline = 300;

// Turns of all ranks in which a NIC finds out that its peer has gone, several times over.
constexpr uint64_t kStandstill = 4'000;

using Ranks = std::vector<std::unique_ptr<Rank>>;

// Only ranks that are dead keep others waiting that long.
void look_at_deadline(const Ranks& ranks, Rank& rank) {
  if (rank.ended() || rank.idle_turns() < kDeadline) return;
  const auto missing = rank.missing();
  if (std::ranges::any_of(missing, [&](int r) { return ranks[static_cast<size_t>(r)]->died(); }))
    rank.give_up();
}

// Who fails has to blame a rank that did not finish, or whose node did not.
std::string wrongly_blamed(const Ranks& ranks, int ranks_per_node) {
  for (const auto& rank : ranks) {
    if (rank->blamed() < 0) continue;
    const auto first = static_cast<size_t>(rank->blamed() / ranks_per_node * ranks_per_node);
    bool all = true;
    for (size_t i = first; i < first + static_cast<size_t>(ranks_per_node); ++i)
      all = all && ranks[i]->completed();
    if (all) return "wrongly blamed: " + rank->error();
  }
  return "";
}

}  // namespace

Outcome run(const World& world, uint64_t seed) {
  std::mt19937_64 random(seed);
  const Program program = draw_program(world, random);
  Outcome outcome;
  Ranks ranks;
  std::vector<base::Bytes> addresses;
  const int num_ranks = world.num_nodes * world.ranks_per_node;
  for (int r = 0; r < num_ranks; ++r) {
    ranks.push_back(std::make_unique<Rank>(world, program, r, seed));
    addresses.push_back(ranks.back()->all_to_all().address());
  }
  for (auto& rank : ranks) rank->all_to_all().connect(addresses);
  for (int i = 0; i < world.num_lost; ++i) {
    Rank& rank = *ranks[random() % ranks.size()];
    const size_t item = 1 + random() % program.items.size();
    const bool nics = random() % 2 == 0;
    rank.end_at(item,
                !world.closing ? Rank::Fate::kStops
                : nics         ? Rank::Fate::kDies
                               : Rank::Fate::kCloses,
                nics && !world.closing);
  }
  // Where ranks close, one is slower than the others, and all but stands still once the first has
  // gone: there is time for all that can go wrong between these two and the rest.
  const size_t slow = world.closing ? random() % ranks.size() : ranks.size();
  uint64_t first_end = 0;
  try {
    size_t unfinished = ranks.size();
    while (unfinished > 0) {
      if (++outcome.turns > kMaxTurnsPerRank * ranks.size() *
                                (world.closing        ? 10
                                 : world.patience > 0 ? 4
                                                      : 1)) {
        for (const auto& rank : ranks)
          if (!rank->ended()) outcome.fault += "stuck: " + rank->where() + "; ";
        return outcome;
      }
      // Some ranks run far ahead or fall far behind: the draw is squared half of the time.
      const uint64_t draw = random();
      auto index = static_cast<size_t>(draw % ranks.size());
      if (draw >> 60 & 1) index = index * index / ranks.size();
      const bool stands_still = first_end != 0 && outcome.turns < first_end + kStandstill;
      if (index == slow && (draw >> 40 & (stands_still ? 255 : 7)) != 0)
        index = (index + 1) % ranks.size();
      Rank& rank = *ranks[index];
      const bool had_ended = rank.ended();
      const bool moved = draw >> 61 & 1 ? rank.turn_proxy() : rank.advance();
      if (world.closing) look_at_deadline(ranks, rank);
      if (!had_ended && rank.ended()) --unfinished;
      if (first_end == 0 && unfinished < ranks.size()) first_end = outcome.turns;
      outcome.trace =
          (outcome.trace ^ (index * 4 + (draw >> 61 & 1) * 2 + moved)) * 0x100000001b3ull;
    }
  } catch (const base::Error& error) {
    outcome.fault = error.what();
  }
  for (const auto& rank : ranks) outcome.tokens += rank->tokens_checked();
  if (outcome.fault.empty()) outcome.fault = wrongly_blamed(ranks, world.ranks_per_node);
  return outcome;
}

World world_of_seed(uint64_t seed) {
  constexpr int kShapes[][2] = {{2, 2}, {1, 4}, {4, 1}, {2, 1}, {3, 2}, {2, 3}, {1, 1}, {4, 2}};
  constexpr int kLarge[][2] = {{8, 8}, {4, 8}, {16, 2}, {64, 1}, {2, 16}};
  const bool large = seed % 100 == 99;
  const auto& shape = large ? kLarge[seed / 100 % 5] : kShapes[seed % 8];
  World world;
  world.num_nodes = shape[0];
  world.ranks_per_node = shape[1];
  world.steps_in_flight = 2 + static_cast<int>(seed / 8 % 3);
  world.num_nics = seed / 24 % 4 == 3 ? 1 : 2;
  world.part_bytes = seed / 5 % 2 == 0 ? 0 : seed / 10 % 2 == 0 ? 1 : 300;
  world.topk = 1 + static_cast<int>(seed / 3 % 6);
  world.num_calls = large ? 4 : 8;
  return world;
}

World masking_world_of_seed(uint64_t seed) {
  constexpr int kShapes[][2] = {{1, 4}, {3, 1}, {1, 3}, {5, 1}, {1, 2}, {4, 1}, {1, 6}, {2, 1}};
  World world = world_of_seed(seed);
  world.num_nodes = kShapes[seed % 8][0], world.ranks_per_node = kShapes[seed % 8][1];
  world.num_calls = 10;
  // More than any wait in a world without losses, or so few that ranks mask each other at random.
  world.patience = seed % 3 == 0 ? 40 + static_cast<int>(seed % 200) : 2000;
  world.num_lost = static_cast<int>(seed / 8 % 3);
  return world;
}

World flag_world_of_seed(uint64_t seed) {
  World world = seed % 5 == 4   ? closing_world_of_seed(seed)
                : seed % 5 == 3 ? masking_world_of_seed(seed)
                                : world_of_seed(seed);
  world.flags = true;
  return world;
}

World closing_world_of_seed(uint64_t seed) {
  constexpr int kShapes[][2] = {{3, 1}, {4, 1}, {3, 2}, {2, 2}, {3, 1}, {2, 1}, {5, 1}, {2, 3}};
  World world = world_of_seed(seed);
  world.num_nodes = kShapes[seed % 8][0], world.ranks_per_node = kShapes[seed % 8][1];
  world.num_calls = 1 + static_cast<int>(seed / 7 % 3);
  world.closing = true;
  world.num_lost = std::max(0, static_cast<int>(seed / 16 % 4) - 1);  // in half of them all finish
  return world;
}

std::string describe(const World& world, uint64_t seed) {
  return base::concat(world.num_nodes, "x", world.ranks_per_node, " ranks, ", world.num_nics,
                      " NICs, S ", world.steps_in_flight, ", parts of ", world.part_bytes, " bytes",
                      world.flags ? ", flags" : "", ", K ", world.topk, ", patience ",
                      world.patience, ", seed ", seed);
}

}  // namespace moe_p2p::simulation
