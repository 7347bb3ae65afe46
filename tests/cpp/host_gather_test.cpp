// gather_counts with a thread per rank and a proxy thread per engine: what ThreadSanitizer looks
// at.
#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "moe/all_to_all.h"

namespace moe_p2p::moe {
namespace {

constexpr int kNumExperts = 12;

int32_t value_of(int rank, int call, int index) { return 1000 * call + 10 * rank + index; }

struct World {
  int num_ranks;
  int ranks_per_node;
};

class Rank {
 public:
  Rank(const World& world, int rank, uint64_t seed) : rank_(rank) {
    engine::EngineOptions engine;
    engine.settings = base::concat("seed=", seed == 0 ? 0 : seed * 100 + rank);
    engine_ = std::make_unique<engine::TransferEngine>(engine);
    proxy_ = std::make_unique<proxy::ProxyThread>(*engine_, proxy::ProxyOptions{});
    AllToAllOptions options;
    options.plan = {.world_size = world.num_ranks,
                    .ranks_per_node = world.ranks_per_node,
                    .num_experts = kNumExperts,
                    .hidden_dim = 8,
                    .topk = 2,
                    .max_tokens = 4,
                    .chunk_tokens = 4,
                    .expert_rank = {}};
    options.rank = rank;
    options.communicator = 3;
    all_to_all_ = std::make_unique<AllToAll>(*engine_, proxy_.get(), options);
  }

  AllToAll& all_to_all() { return *all_to_all_; }

  // Wrong values, over calls with one value, the most there may be, none, ...
  int run(int num_ranks, int num_calls) {
    int wrong = 0;
    for (int call = 0; call < num_calls; ++call) {
      const size_t lengths[] = {1, static_cast<size_t>(kNumExperts + num_ranks + 16), 0};
      const size_t n = lengths[call % 3];
      std::vector<int32_t> values(n), gathered(n * static_cast<size_t>(num_ranks), -1);
      for (size_t i = 0; i < n; ++i) values[i] = value_of(rank_, call, static_cast<int>(i));
      all_to_all_->gather_counts(values, gathered);
      for (size_t i = 0; i < gathered.size(); ++i)
        wrong += gathered[i] != value_of(static_cast<int>(i / n), call, static_cast<int>(i % n));
    }
    return wrong;
  }

 private:
  const int rank_;
  std::unique_ptr<engine::TransferEngine> engine_;
  std::unique_ptr<proxy::ProxyThread> proxy_;
  std::unique_ptr<AllToAll> all_to_all_;  // closed before its engine ends
};

// Wrong values of all ranks.
int run(const World& world, uint64_t seed, int num_calls) {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<base::Bytes> addresses;
  for (int r = 0; r < world.num_ranks; ++r) {
    ranks.push_back(std::make_unique<Rank>(world, r, seed));
    addresses.push_back(ranks.back()->all_to_all().address());
  }
  for (auto& rank : ranks) rank->all_to_all().connect(addresses);
  std::vector<int> wrong(ranks.size(), -1);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        wrong[r] = ranks[r]->run(world.num_ranks, num_calls);
      } catch (const std::exception& error) {
        MESSAGE(error.what());
      }
    });
  for (auto& thread : threads) thread.join();
  return static_cast<int>(std::count_if(wrong.begin(), wrong.end(), [](int w) { return w != 0; }));
}

}  // namespace

TEST_CASE("gather_counts: every rank has the values of all, call after call") {
  for (const World& world : {World{1, 1}, World{2, 2}, World{2, 1}, World{4, 2}, World{3, 1}}) {
    CAPTURE(world.num_ranks);
    CAPTURE(world.ranks_per_node);
    CHECK(run(world, 0, 60) == 0);
  }
}

TEST_CASE("gather_counts: nothing depends on the order of writes and immediates") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    CAPTURE(seed);
    CHECK(run({4, 1}, seed, 40) == 0);
    CHECK(run({4, 2}, seed, 40) == 0);
  }
}

}  // namespace moe_p2p::moe
