// What a turn of the proxy costs an Exchange when nothing happens. Skipped unless asked for:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: exchange*"
// Target: at most 1 us at 128 nodes.
#include <algorithm>
#include <chrono>
#include <vector>

#include "doctest/doctest.h"
#include "moe/node/exchange.h"

namespace moe_p2p::moe {
namespace {

using abi::Phase;

constexpr int kLocal = 0;

engine::EngineOptions null_options() {
  engine::EngineOptions options;
  options.provider = "null";
  options.num_nics = 1;
  return options;
}

// Rank 0 of nodes of one rank. The null provider takes whatever is written.
struct Node {
  explicit Node(int num_nodes)
      : plan(make_plan({.world_size = num_nodes,
                        .ranks_per_node = 1,
                        .num_experts = num_nodes,
                        .hidden_dim = 8,
                        .topk = 1,
                        .max_tokens = 1,
                        .chunk_tokens = 1,
                        .expert_rank = {}})),
        engine(null_options()),
        memory(plan, 0),
        data(engine.register_memory({memory.data().data(), memory.data().size()})) {
    memory.attach({{memory.name(), engine.waker_name()}});
    const auto* region = engine.resolve(engine.descriptor(data));
    std::vector<Exchange::Remote> remotes;
    for (int node = 1; node < num_nodes; ++node) remotes.push_back({node, region, region, 1});
    exchange = std::make_unique<Exchange>(plan, memory, engine, data, data, 5, remotes,
                                          Masks(nullptr), true);
  }

  void turn() {
    exchange->take_doorbells();
    exchange->publish_arrivals();
  }
  void ring(Phase phase, uint64_t step) {
    for (int node = 1; node < plan.shape.num_nodes(); ++node)
      memory.ring(kLocal, phase, static_cast<int>(step % 2), node,
                  abi::BellWords::make(
                      step, {.index = 0, .num_parts = 1, .num_slots = 0, .begin = 0, .bytes = 128}),
                  0, step);
    for (int i = 0; i < 1000; ++i) {
      turn();
      engine.progress();
    }
  }
  // At the median of a hundred stretches, in ns.
  double cost() {
    constexpr int kTurns = 1000;
    std::vector<double> ns;
    for (int i = 0; i < 100; ++i) {
      const auto begin = platform::Clock::now();
      for (int j = 0; j < kTurns; ++j) turn();
      ns.push_back(
          std::chrono::duration<double, std::nano>(platform::Clock::now() - begin).count() /
          kTurns);
    }
    std::ranges::sort(ns);
    return ns[ns.size() / 2];
  }

  const Plan plan;
  engine::TransferEngine engine;
  NodeMemory memory;
  const engine::MemoryHandle* data;
  std::unique_ptr<Exchange> exchange;
};

TEST_CASE("benchmark: exchange, a turn without doorbells and arrivals" * doctest::skip()) {
  for (const int num_nodes : {8, 32, 128}) {
    Node node(num_nodes);
    for (uint64_t step = 0; step < 4; ++step) {
      node.ring(Phase::kDispatch, step);
      node.ring(Phase::kCombine, step);
    }
    const double idle = node.cost();
    node.ring(Phase::kDispatch, 4);
    MESSAGE(num_nodes, " nodes: ", idle, " ns between steps, ", node.cost(),
            " ns between a dispatch and its combine");
    CHECK(idle > 0);
  }
}

}  // namespace
}  // namespace moe_p2p::moe
