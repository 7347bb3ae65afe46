// What the ranks of a simulation do: calls drawn from a seed, the same on all of them.
#pragma once

#include <random>
#include <vector>

#include "simulation.h"

namespace moe_p2p::simulation {

enum class Kind { kPaired, kSolo, kReleased };

// One dispatch (and combine) that all ranks make; the same on all of them.
struct Call {
  Kind kind{};
  bool late_weights = false;  // combine is given them, dispatch is not
  int64_t max_tokens = 0;
  std::vector<int64_t> num_tokens;          // [W]
  std::vector<std::vector<int32_t>> topk;   // [W][T * K]
  std::vector<std::vector<float>> weights;  // [W][T * K]
};

enum class Action {
  kDispatchSend,
  kDispatchRecv,
  kCombineSend,
  kCombineRecv,
  kRelease,
  kClean,
  kChange,  // members enter the next epoch, if there is one
};
struct Item {
  Action action;
  size_t call;  // of kClean any; of kChange how many came before
};

struct Program {
  std::vector<Call> calls;
  std::vector<Item> items;
};

// Paired calls stay open up to S at a time, so that sends of one overlap receives of another.
Program draw_program(const World& world, std::mt19937_64& random);

}  // namespace moe_p2p::simulation
