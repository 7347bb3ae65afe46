// Requests that wait for a word: nothing of them moves before, and whatever ends them ends them.
#include "engine/gate.h"

#include <thread>

#include "engine_pair.h"
#include "patience.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using base::Code;
using platform::Clock;

struct Gated {
  explicit Gated(FakeOptions options = {}, bool notified = false)
      : network(options), engines(network, {2, 2}), gate(&word, notified) {}

  // A write of 100 bytes that is counted at the peer.
  Request& write(uint64_t value, uint32_t imm, int priority = 1) {
    requests.push_back(std::make_unique<Request>(Write{source.handle, 0, region, 0, 100, imm}));
    requests.back()->gate = &gate;
    requests.back()->gate_value = value;
    requests.back()->priority = static_cast<uint8_t>(priority);
    engines[0].submit(*requests.back());
    turns();
    return *requests.back();
  }
  void store(uint64_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
    turns();
  }
  void turns() {
    for (int i = 0; i < 20; ++i) engines.turn();
  }
  size_t num_posted() { return network.nic(0).posted().size() + network.nic(1).posted().size(); }

  uint64_t word = 0;
  std::vector<std::unique_ptr<Request>> requests;
  FakeNetwork network;
  Engines engines;
  Gate gate;
  Buffer source{engines[0], pattern(4096)}, target{engines[1], pattern(4096, 9)};
  const RemoteRegion* region = engines.region(0, 1, target);
};

TEST_CASE("engine: a gated request waits for its value, and those of later values go on waiting") {
  Gated world;
  const Request &third = world.write(3, 3), &first = world.write(1, 1), &second = world.write(2, 2),
                &also = world.write(1, 11);
  CHECK(world.num_posted() == 0);
  CHECK(world.engines[0].idle());
  CHECK(world.engines[0].must_poll());
  world.store(1);
  CHECK(first.done());
  CHECK(also.done());
  CHECK(!second.done());
  CHECK(world.num_posted() == 4);
  world.store(3);  // steps whose words nobody saw are over too
  CHECK(second.done());
  CHECK(third.done());
  CHECK(!world.engines[0].must_poll());
  CHECK(world.write(2, 22).done());  // the gate is open
  for (const uint32_t imm : {1, 11, 2, 3, 22}) CHECK(world.engines.count(1, imm) == 2);
}

TEST_CASE("engine: gates of many layers open each by itself") {
  Gated world;
  uint64_t words[5] = {};
  std::vector<Gate> gates;
  gates.reserve(std::size(words));
  for (const uint64_t& word : words) gates.emplace_back(&word, false);
  std::vector<Request*> layers;
  for (Gate& gate : gates) {
    world.requests.push_back(
        std::make_unique<Request>(Write{world.source.handle, 0, world.region, 0, 8, 1}));
    layers.push_back(world.requests.back().get());
    layers.back()->gate = &gate;
    layers.back()->gate_value = 1;
    world.engines[0].submit(*layers.back());
  }
  world.turns();
  for (const size_t layer : {2, 0, 4, 3, 1}) {
    CHECK(!layers[layer]->done());
    std::atomic_ref(words[layer]).store(1, std::memory_order_release);
    world.turns();
    CHECK(layers[layer]->done());
  }
}

TEST_CASE("engine: a gated request is taken back as a whole, also out of the middle") {
  Gated world;
  Request &first = world.write(1, 1), &middle = world.write(1, 2), &last = world.write(1, 3);
  const auto cancelled = world.engines[0].cancel(middle);
  REQUIRE(cancelled.has_value());
  CHECK(cancelled->posted.bytes == 0);
  CHECK(cancelled->taken_back.bytes == 100);
  CHECK(cancelled->taken_back.imms == 2);
  CHECK(middle.done());
  CHECK(middle.status().code == Code::kCancelled);
  world.store(1);
  CHECK(first.done());
  CHECK(last.done());
  CHECK(world.engines.count(1, 2) == 0);
  CHECK(world.engines[0].idle());
  world.engines[0].submit(middle);  // may be used again
  CHECK(world.engines.pump(middle));
  CHECK(middle.status().ok());
}

TEST_CASE("engine: a lost peer, withdrawn memory and a closed engine end gated requests") {
  for (const int how : {0, 1, 2}) {
    CAPTURE(how);
    Gated world;
    Request& request = world.write(1, 1);
    if (how == 0) world.engines[0].disconnect(world.region->owner);
    if (how == 1) world.engines[0].unregister_memory(world.source.handle);
    if (how == 2) world.engines.destroy(0);
    CHECK(request.done());
    CHECK(request.status().code == Code::kClosed);
    world.store(1);
    if (how != 2) CHECK(world.num_posted() == 0);  // its NICs are gone
  }
}

TEST_CASE("engine: what waits at a gate holds up no lower class") {
  Gated world({.limits = {.max_write_bytes = 1 << 20, .max_in_flight = 1000}});
  world.write(1, 1, 0);
  Buffer source(world.engines[0], pattern(1 << 20)), target(world.engines[1], pattern(1 << 20));
  const auto* region = world.engines.region(0, 1, target);
  // Twice, as classes count from their first request on.
  Request first(Write{source.handle, 0, region, 0, 1 << 20, {}}),
      second(Write{source.handle, 0, region, 0, 1 << 20, {}});
  first.priority = second.priority = 2;
  CHECK(world.engines.run(0, first).ok());
  world.network.nic(0).hold(true);
  const size_t before = world.num_posted();
  world.engines[0].submit(second);
  world.turns();
  CHECK(world.num_posted() == before + 2);  // whole, and not 16 KiB at a time
}

TEST_CASE("proxy: a sleeping thread sees a word, with a notification where one is promised") {
  for (const bool notified : {false, true}) {
    Gated world({}, notified);
    proxy::ProxyThread thread(world.engines[0], {.wait = {.mode = platform::WaitMode::kSleep}});
    for (uint64_t step = 1; step <= 20; ++step) {
      Request request(Write{world.source.handle, 0, world.region, 0, 100, {}});
      request.gate = &world.gate;
      request.gate_value = step;
      world.engines[0].submit(request);
      CHECK(!request.wait(Clock::now() + std::chrono::milliseconds(step == 1 ? 20 : 0)));
      std::atomic_ref(world.word).store(step, std::memory_order_release);
      if (notified) platform::notify_all(world.engines[0].waker());
      REQUIRE(request.wait(soon()));
      CHECK(request.status().ok());
    }
  }
}

}  // namespace
}  // namespace moe_p2p::test
