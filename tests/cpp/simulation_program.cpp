#include "simulation_program.h"

#include <algorithm>

namespace moe_p2p::simulation {
namespace {

Call draw_call(const World& world, std::mt19937_64& random) {
  const int num_ranks = world.num_nodes * world.ranks_per_node;
  const int num_experts = num_ranks * world.experts_per_rank;
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Call call;
  const int64_t style = world.closing ? 3 + below(5) : below(8);
  call.kind = style < 5 ? Kind::kPaired : style < 7 ? Kind::kSolo : Kind::kReleased;
  call.late_weights = below(3) == 0;
  int64_t chunks = call.kind == Kind::kSolo ? 1 + below(3 * world.steps_in_flight) : 1;
  if (world.patience > 0) chunks = 1;
  call.max_tokens = chunks * world.chunk_tokens;
  const int64_t crowd = below(6);  // 0: everybody empty, 1: one expert takes all
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int64_t tokens = crowd == 0 || below(5) == 0 ? 0
                           : below(4) == 0             ? call.max_tokens
                                                       : below(call.max_tokens + 1);
    call.num_tokens.push_back(tokens);
    std::vector<int32_t> topk;
    std::vector<float> weights;
    for (int64_t i = 0; i < tokens; ++i) {
      std::vector<int32_t> chosen;
      for (int k = 0; k < world.topk; ++k) {
        auto expert = static_cast<int32_t>(crowd == 1 ? 0 : below(num_experts));
        const bool again = std::find(chosen.begin(), chosen.end(), expert) != chosen.end();
        if (again || below(6) == 0) expert = -1;
        chosen.push_back(expert);
        weights.push_back(static_cast<float>(1 << below(3)));
      }
      topk.insert(topk.end(), chosen.begin(), chosen.end());
    }
    call.topk.push_back(std::move(topk));
    call.weights.push_back(std::move(weights));
  }
  return call;
}

}  // namespace

Program draw_program(const World& world, std::mt19937_64& random) {
  Program program;
  std::vector<size_t> open;
  const auto close = [&](size_t call) {
    if (program.calls[call].kind == Kind::kReleased) {
      program.items.push_back({Action::kRelease, call});
    } else {
      program.items.push_back({Action::kCombineSend, call});
      program.items.push_back({Action::kCombineRecv, call});
    }
  };
  const auto close_all = [&] {
    for (const size_t call : open) close(call);
    open.clear();
  };
  for (int i = 0; i < world.num_calls; ++i) {
    program.calls.push_back(draw_call(world, random));
    const size_t call = program.calls.size() - 1;
    if (program.calls[call].kind == Kind::kSolo) close_all();
    if (open.size() == static_cast<size_t>(world.steps_in_flight)) {
      close(open.front());
      open.erase(open.begin());
    }
    program.items.push_back({Action::kDispatchSend, call});
    program.items.push_back({Action::kDispatchRecv, call});
    open.push_back(call);
    if (program.calls[call].kind == Kind::kSolo || random() % 2 == 0) close_all();
    if (const int part = world.num_calls / (world.num_changes + 1);
        world.num_changes > 0 && (i + 1) % part == 0 && (i + 1) / part <= world.num_changes) {
      close_all();
      program.items.push_back({Action::kChange, static_cast<size_t>((i + 1) / part - 1)});
    }
    if (world.patience > 0 && world.num_nodes == 1 && world.num_changes == 0 && open.empty() &&
        random() % 3 == 0)
      program.items.push_back({Action::kClean, call});
  }
  close_all();
  return program;
}

}  // namespace moe_p2p::simulation
