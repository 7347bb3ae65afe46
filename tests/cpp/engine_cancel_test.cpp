// Requests that are cancelled: what was posted and what was not, in exact numbers, from any thread.
#include <atomic>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include "engine_pair.h"
#include "patience.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using base::Code;

// What the NICs of engine 0 were given.
Cancellation posted_on(FakeNetwork& network, size_t num_nics) {
  Cancellation sum;
  for (size_t nic = 0; nic < num_nics; ++nic) {
    for (const auto& [work, to] : network.nic(nic).posted()) {
      sum.posted += {work.bytes, work.has_imm ? 1u : 0u};
      ++sum.posted_writes;
    }
  }
  return sum;
}

// One of each kind, drawn; `all` is what it sends in total.
struct Drawn {
  Drawn(std::mt19937_64& random, const Buffer& local, const RemoteRegion* region, size_t num_nics)
      : pages(1 + random() % 40) {
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    const uint64_t n = pages.size(), nics = num_nics;
    const std::optional<uint32_t> imm = random() % 2 ? std::optional<uint32_t>(5) : std::nullopt;
    const uint64_t one = imm ? 1 : 0;
    for (uint64_t i = 0; i < n; ++i) slices.push_back({i * 90, region, i * 90, random() % 90});
    uint64_t sliced = 0;
    for (const Slice& slice : slices) sliced += slice.bytes;
    const Pages rows{pages, 100, 0, 25}, whole{pages, 100, 0, 0};
    switch (random() % 7) {
      case 0:
        operation = Write{local.handle, 3, region, 5, n * 77, imm};
        all = {n * 77, one * nics};
        break;
      case 1:
        operation = WritePages{local.handle, region, 90, whole, whole, imm};
        all = {n * 90, one * n};
        break;
      case 2:
        operation =
            WritePages{local.handle, region, 40, rows, whole, imm, 10, WritePages::Imms::kPerNic};
        all = {n * 40, one * nics};
        break;
      case 3:
        operation = Scatter{local.handle, slices, Scatter::Sharding::kByPeer, imm};
        all = {sliced, one * n};
        break;
      case 4:
        operation = Scatter{local.handle, slices, Scatter::Sharding::kByBytes, imm};
        all = {sliced, one * n * nics};
        break;
      case 5:
        operation = Read{local.handle, 5, region, 3, n * 77};
        all = {n * 77, 0};
        break;
      default: operation = ReadPages{local.handle, region, 40, rows, whole, 10}; all = {n * 40, 0};
    }
  }
  std::vector<int64_t> pages;
  std::vector<Slice> slices;
  Operation operation;
  Amount all;
};

TEST_CASE("engine: cancelling says exactly what was posted, wherever it comes") {
  uint64_t num_partial = 0;
  for (uint64_t seed = 1; seed <= 400; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const int num_nics = 1 + static_cast<int>(random() % 3);
    const auto nics = static_cast<size_t>(num_nics);
    FakeNetwork network({.seed = seed,
                         .limits = {.max_write_bytes = 30,
                                    .max_in_flight = 1 + static_cast<uint32_t>(random() % 20)},
                         .short_posts = seed % 2 == 0});
    Engines engines(network, {num_nics, num_nics});
    Buffer local(engines[0], pattern(4200)), remote(engines[1], pattern(4200, 9));
    const Drawn drawn(random, local, engines.region(0, 1, remote), nics);
    Request request(drawn.operation);
    engines[0].submit(request);
    for (uint64_t turns = random() % 8; turns > 0; --turns) engines.turn();
    const bool over = request.done();
    const auto at = engines[0].progress_of(request, platform::Clock::now());
    const auto cancelled = engines[0].cancel(request);
    REQUIRE(cancelled.has_value() == !over);
    REQUIRE(at.has_value() == !over);
    const Cancellation posted = posted_on(network, nics);
    if (over) {
      CHECK(posted.posted.bytes == drawn.all.bytes);
      CHECK(request.status().ok());
      continue;
    }
    CHECK(cancelled->posted.bytes == posted.posted.bytes);
    CHECK(cancelled->posted.imms == posted.posted.imms);
    CHECK(cancelled->posted_writes == posted.posted_writes);
    CHECK(at->posted_writes >= posted.posted_writes);
    CHECK(at->posted_writes >= at->in_flight);
    CHECK((at->more || at->posted_writes > posted.posted_writes) ==
          (cancelled->taken_back.bytes + cancelled->taken_back.imms != 0));
    CHECK(cancelled->taken_back.bytes == drawn.all.bytes - posted.posted.bytes);
    CHECK(cancelled->taken_back.imms == drawn.all.imms - posted.posted.imms);
    num_partial += posted.posted_writes != 0 && cancelled->taken_back.bytes != 0 ? 1 : 0;
    REQUIRE(engines.pump(request));
    CHECK(request.status().code == Code::kCancelled);
    const auto again = engines[0].cancel(request);
    REQUIRE(again.has_value());
    CHECK(again->posted.bytes == cancelled->posted.bytes);
    for (int i = 0; i < 20; ++i) engines.turn();
    CHECK(posted_on(network, nics).posted_writes == posted.posted_writes);  // nothing later
    CHECK(engines.count(1, 5) == posted.posted.imms);
    CHECK(engines[0].idle());
  }
  CHECK(num_partial > 50);
}

TEST_CASE("engine: a cancelled request is done when its posted writes have completed, not before") {
  FakeNetwork network({.limits = {.max_write_bytes = 100, .max_in_flight = 4}});
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(5000)), target(engines[1], pattern(5000, 9));
  const auto* region = engines.region(0, 1, target);
  Request request(Write{source.handle, 0, region, 0, 5000, 1});
  Request other(Write{source.handle, 0, region, 0, 3000, 2});
  network.nic(0).hold(true);
  engines[0].submit(request);
  for (int i = 0; i < 5; ++i) engines.turn();
  engines[0].submit(other);
  const auto cancelled = engines[0].cancel(request);
  REQUIRE(cancelled.has_value());
  CHECK(cancelled->posted.bytes == 400);
  CHECK(cancelled->posted_writes == 4);
  CHECK(cancelled->taken_back.bytes == 4600);
  CHECK(cancelled->taken_back.imms == 1);
  for (int i = 0; i < 50; ++i) engines.turn();
  CHECK_FALSE(request.done());
  network.nic(0).hold(false);
  REQUIRE(engines.pump(request));
  CHECK(request.status().code == Code::kCancelled);
  REQUIRE(engines.pump(other));
  CHECK(other.status().ok());
  CHECK_FALSE(engines[0].cancel(other).has_value());
  Request again(request.operation);
  CHECK(engines.run(0, again).ok());  // nothing of the first one is left in the way
  CHECK(target.data == source.data);
}

TEST_CASE("engine: a request that still waits in the mailbox is taken back whole") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(500)), target(engines[1], pattern(500, 9));
  Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 500, 1});
  engines[0].submit(request);  // no thread polls yet: cancel() does its work
  const auto cancelled = engines[0].cancel(request);
  REQUIRE(cancelled.has_value());
  CHECK(cancelled->taken_back.bytes == 500);
  CHECK(cancelled->taken_back.imms == 2);
  CHECK(cancelled->posted_writes == 0);
  CHECK(request.done());
  CHECK(network.nic(0).posted().empty());
}

TEST_CASE("engine: a request that failed says how far it was") {
  FakeNetwork network({.limits = {.max_write_bytes = 16, .max_in_flight = 4}});
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(4000)), target(engines[1], pattern(4000, 9));
  network.nic(0).fail_next(1, {Code::kTransport, 12});
  Request broken(Write{source.handle, 0, engines.region(0, 1, target), 0, 4000, 1});
  CHECK(engines.run(0, broken).code == Code::kTransport);
  const auto how_far = engines[0].cancel(broken);
  REQUIRE(how_far.has_value());
  CHECK(how_far->posted.bytes == network.nic(0).posted().size() * 16);
  CHECK(how_far->posted.bytes + how_far->taken_back.bytes == 4000);
  CHECK(broken.status().code == Code::kTransport);
}

TEST_CASE("engine: a cancelled request whose posted part fails reports that failure") {
  FakeNetwork network({.limits = {.max_write_bytes = 16, .max_in_flight = 4}});
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(4000)), target(engines[1], pattern(4000, 9));
  network.nic(0).hold(true);
  Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 4000, 1});
  engines[0].submit(request);
  for (int i = 0; i < 5; ++i) engines.turn();
  REQUIRE(engines[0].cancel(request).has_value());
  network.nic(0).fail_next(1, {Code::kPeerDead, 4});
  network.nic(0).hold(false);
  REQUIRE(engines.pump(request));
  CHECK(request.status() == base::Status{Code::kPeerDead, 4});
  CHECK(engines[0].cancel(request)->posted_writes == 4);
}

TEST_CASE("engine: many threads cancel what a polling thread sends") {
  FakeNetwork network({.limits = {.max_write_bytes = 50, .max_in_flight = 5}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(4000)), target(engines[1], pattern(4000));
  const auto* region = engines.region(0, 1, target);
  std::atomic<bool> stop{false}, running{false};
  std::thread poller([&] {
    for (; !stop.load(); running = true) engines.turn();
  });
  while (!running.load()) std::this_thread::yield();  // or cancel() would do the poller's work
  std::atomic<uint64_t> num_imms{0}, num_bytes{0};
  const auto user = [&] {
    for (int i = 0; i < 40; ++i) {
      Request request(Write{source.handle, 0, region, 0, 4000, 3});
      engines[0].submit(request);
      std::optional<Cancellation> second;
      std::thread rival([&] { second = engines[0].cancel(request); });
      const auto first = engines[0].cancel(request);
      rival.join();
      REQUIRE(request.wait(soon()));
      REQUIRE(first.has_value() == second.has_value());
      if (first) CHECK(first->posted.bytes == second->posted.bytes);
      num_imms += first ? first->posted.imms : 2;
      num_bytes += first ? first->posted.bytes : 4000;
    }
  };
  std::thread users[] = {std::thread(user), std::thread(user), std::thread(user)};
  for (std::thread& thread : users) thread.join();
  CHECK(engines[1].imm_table().wait(3, num_imms, soon()));
  stop = true;
  poller.join();
  CHECK(engines.count(1, 3) == num_imms);
  uint64_t bytes = 0;
  for (const auto& nic : engines[0].counters()) bytes += nic.bytes_written;
  CHECK(bytes == num_bytes);
}

}  // namespace
}  // namespace moe_p2p::test
