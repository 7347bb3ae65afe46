// Requests in a queue of finished ones: each comes out once, whenever it ended, and the descriptor
// wakes who sleeps on it.
#include <poll.h>

#include <atomic>
#include <thread>

#include "engine/finished_queue.h"
#include "engine_pair.h"

namespace moe_p2p::test {
namespace {

using namespace engine;

bool readable(const FinishedQueue& queue, int timeout_ms) {
  pollfd entry{.fd = queue.fd(), .events = POLLIN, .revents = 0};
  return poll(&entry, 1, timeout_ms) == 1;
}

TEST_CASE("engine: a watched request comes out of its queue once, whenever it ended") {
  FakeNetwork network;
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100, 9));
  const auto* region = engines.region(0, 1, target);
  FinishedQueue queue, other;
  std::vector<Request*> taken;
  const auto take = [&](Request& request) { taken.push_back(&request); };
  Request request(Write{source.handle, 0, region, 0, 100, 1});
  for (const bool early : {true, false}) {
    engines[0].submit(request);
    if (!early) REQUIRE(engines.pump(request));
    CHECK(request.watch(queue));
    CHECK(request.watch(queue));
    CHECK_FALSE(request.watch(other));
    CHECK(readable(queue, 0) == !early);
    REQUIRE(engines.pump(request));
    CHECK(readable(queue, 0));
    queue.take(take);
    CHECK(taken == std::vector<Request*>{&request});
    CHECK_FALSE(readable(queue, 0));
    queue.take(take);
    CHECK(taken.size() == 1);
    CHECK(request.watch(other));  // free again, and done
    other.take(take);
    CHECK(taken.size() == 2);
    taken.clear();
  }
}

TEST_CASE("engine: thousands of requests wake one sleeper, none twice and none never") {
  FakeNetwork network({.limits = {.max_in_flight = 64}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100, 9));
  const auto* region = engines.region(0, 1, target);
  FinishedQueue queue;
  std::atomic<bool> stop{false};
  std::thread poller([&] {
    while (!stop.load()) engines.turn();
  });
  constexpr size_t kNum = 3000;
  std::vector<std::unique_ptr<Request>> requests(kNum);
  std::thread submitter([&] {
    for (auto& request : requests) {
      request = std::make_unique<Request>(Write{source.handle, 0, region, 0, 100, {}});
      engines[0].submit(*request);
      CHECK(request->watch(queue));  // while the polling thread may finish it
    }
  });
  size_t num_taken = 0;
  while (num_taken < kNum && readable(queue, 20'000)) {
    queue.take([&](Request& request) {
      ++num_taken;
      CHECK(request.done());
      CHECK(request.status().ok());
    });
  }
  submitter.join();
  CHECK(num_taken == kNum);
  stop = true;
  poller.join();
  CHECK_FALSE(readable(queue, 0));
}

}  // namespace
}  // namespace moe_p2p::test
