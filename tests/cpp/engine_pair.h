// Engines on one FakeNetwork, polled by the test's own thread: pump() turns all of them until a
// condition holds, and gives up after a fixed number of turns instead of a time.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "doctest/doctest.h"
#include "engine/transfer_engine.h"
#include "fake_domain.h"

namespace moe_p2p::test {

using engine::TransferEngine;

inline std::vector<std::byte> pattern(size_t bytes, unsigned seed = 1) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>((i * 31 + seed * 7 + 1) % 251);
  return data;
}

// 90 indices from `first` on, in an order drawn from the seed; 0: ascending.
inline std::vector<int64_t> indices(int64_t first, unsigned seed) {
  std::vector<int64_t> made(90);
  std::iota(made.begin(), made.end(), first);
  if (seed != 0) std::shuffle(made.begin(), made.end(), std::mt19937(seed));
  return made;
}

// A buffer registered at its engine.
struct Buffer {
  Buffer(TransferEngine& engine, std::vector<std::byte> content)
      : data(std::move(content)), handle(engine.register_memory({data.data(), data.size()})) {}
  std::vector<std::byte> data;
  const engine::MemoryHandle* handle;
};

class Engines {
 public:
  Engines(FakeNetwork& network, std::vector<int> num_nics) {
    for (size_t i = 0; i < num_nics.size(); ++i) {
      engine::EngineOptions options;
      options.num_nics = num_nics[i];
      options.label = base::concat("rank ", i);
      engines_.push_back(std::make_unique<TransferEngine>(options, network.factory()));
    }
  }

  TransferEngine& operator[](size_t i) { return *engines_.at(i); }
  void destroy(size_t i) { engines_.at(i).reset(); }

  void turn() {
    for (auto& engine : engines_)
      if (engine) engine->progress();
  }
  bool pump(const std::function<bool()>& ready, int max_turns = 20'000) {
    for (int i = 0; i < max_turns; ++i) {
      if (ready()) return true;
      turn();
    }
    return ready();
  }
  bool pump(const engine::Request& request) {
    return pump([&] { return request.done(); });
  }
  // Submits, pumps until done and until nothing is on its way any more.
  base::Status run(size_t engine, engine::Request& request) {
    engines_.at(engine)->submit(request);
    REQUIRE(pump(request));
    for (int i = 0; i < 20; ++i) turn();
    return request.status();
  }
  uint64_t count(size_t engine, uint32_t imm) {
    return engines_.at(engine)->imm_table().value(imm);
  }
  const engine::RemoteRegion* region(size_t from, size_t to, const Buffer& target) {
    return engines_.at(from)->resolve(engines_.at(to)->descriptor(target.handle));
  }

 private:
  std::vector<std::unique_ptr<TransferEngine>> engines_;
};

}  // namespace moe_p2p::test
