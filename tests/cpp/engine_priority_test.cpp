// Three classes of requests on one engine: the exact order in which they are posted, what lower
// ones may have in flight while a higher one has work, and that none waits for ever.
#include <numeric>

#include "engine/poller.h"
#include "engine_pair.h"
#include "patience.h"

namespace moe_p2p::test {
namespace {

using namespace engine;

// One engine with `num_nics` NICs that sends to another; a request's number is its immediate.
struct Shared {
  explicit Shared(FakeOptions options = {}, int num_nics = 1)
      : network(options), engines(network, {num_nics, num_nics}) {
    for (int64_t i = 0; i < 4000; ++i) every_second.push_back(i % 2000 * 2 + i / 2000);
  }
  // Pages of 1 KiB, none of which can be merged. The request outlives the engines.
  Request* pages(int priority, size_t count, uint32_t imm) {
    const std::span<const int64_t> some(every_second.data(), count);
    requests.push_back(std::make_unique<Request>(
        WritePages{source.handle, region, 1024, {some, 1024, 0}, {some, 1024, 0}, imm}));
    requests.back()->priority = static_cast<uint8_t>(priority);
    return requests.back().get();
  }
  std::vector<uint32_t> order(size_t nic = 0) {
    std::vector<uint32_t> imms;
    for (const auto& [work, to] : network.nic(nic).posted()) imms.push_back(work.imm);
    return imms;
  }
  uint64_t posted_bytes(uint32_t imm, size_t nic = 0) {
    uint64_t bytes = 0;
    for (const auto& [work, to] : network.nic(nic).posted())
      bytes += work.imm == imm ? work.bytes : 0;
    return bytes;
  }

  std::vector<int64_t> every_second;
  std::vector<std::unique_ptr<Request>> requests;
  FakeNetwork network;
  Engines engines;
  Buffer source{engines[0], pattern(4 << 20)}, target{engines[1], pattern(4 << 20, 9)};
  const RemoteRegion* region = engines.region(0, 1, target);
};

// What a proxy's doorbells are: urgent work that is found by looking.
struct Bell final : Lookout {
  explicit Bell(std::function<void()> called) : found(std::move(called)) {}
  void look() noexcept override { found(); }
  const std::function<void()> found;
};

TEST_CASE("engine: urgent requests go first, each class in turns, and the order is exact") {
  Shared world;
  world.network.nic(0).hold(true);
  Request *weights = world.pages(2, 20, 2), *kv = world.pages(1, 20, 1),
          *moe = world.pages(0, 40, 0), *second_kv = world.pages(1, 20, 11);
  for (Request* request : {weights, kv, moe, second_kv}) world.engines[0].submit(*request);
  world.engines[0].progress();
  // All of MoE's. Then lower ones, 16 at a time: KV in turns, of 16 writes or what is left of the
  // 256 KiB in units of 16; weights last.
  std::vector<uint32_t> expected(40, 0);
  const std::pair<size_t, uint32_t> turns[] = {{16, 1}, {15, 11}, {1, 1}, {5, 11}, {3, 1}, {20, 2}};
  for (const auto& [count, imm] : turns) expected.insert(expected.end(), count, imm);
  CHECK(world.order() == expected);
}

TEST_CASE(
    "engine: between two looks at urgent work at most 16 writes of lower classes are posted") {
  for (const int num_nics : {1, 3}) {
    CAPTURE(num_nics);
    Shared world({}, num_nics);
    const auto nics = static_cast<size_t>(num_nics);
    const auto num_posted = [&] {
      size_t sum = 0;
      for (size_t nic = 0; nic < nics; ++nic) sum += world.network.nic(nic).posted().size();
      return sum;
    };
    Request* first = world.pages(0, 1, 9);  // the class is used from here on
    REQUIRE(world.engines.run(0, *first).ok());
    Request *weights = world.pages(2, 1500, 2), *kv = world.pages(1, 1500, 1);
    world.engines[0].submit(*weights);
    world.engines[0].submit(*kv);
    size_t seen = num_posted(), num_looks = 0;
    Bell bell([&] {
      ++num_looks;
      CHECK(num_posted() - seen <= 16);
      seen = num_posted();
    });
    while (!weights->done() || !kv->done()) {
      bell.look();  // as before each turn of a proxy
      world.engines[0].progress(&bell);
      world.engines[1].progress();
    }
    CHECK(num_looks >= 3000 / 16);
  }
}

TEST_CASE("engine: a doorbell between two posts of a lower class comes before the next of these") {
  const auto until = soon();
  for (const size_t rings_at : {1, 2, 5}) {
    for (bool in_time = false; !in_time;) {
      REQUIRE(platform::Clock::now() < until);
      Shared world;
      Request* first = world.pages(0, 1, 9);
      REQUIRE(world.engines.run(0, *first).ok());
      Request *kv = world.pages(1, 200, 1), *moe = world.pages(0, 3, 0);
      world.engines[0].submit(*kv);
      std::vector<platform::Deadline> looks{platform::Clock::now()};
      Bell bell([&] {
        if (looks.size() == rings_at) world.engines[0].submit_from_poller(*moe);
        looks.push_back(platform::Clock::now());
      });
      for (int turns = 0; turns < 1000 && !moe->done(); ++turns) world.engines[0].progress(&bell);
      REQUIRE(moe->done());
      // Else this thread stood still, and the lower class may have had the turn that it waited for.
      in_time = looks.at(rings_at + 1) - looks.at(rings_at - 1) < NicQueue::kPatience;
      std::vector<uint32_t> expected{9};
      expected.insert(expected.end(), 16 * rings_at, 1);
      expected.insert(expected.end(), 3, 0);
      auto order = world.order();
      order.resize(expected.size());
      if (in_time) CHECK(order == expected);
      REQUIRE(world.engines.pump(*kv));
    }
  }
}

TEST_CASE("engine: the mailbox is looked at between posts of lower classes, too") {
  Shared world;
  Request* first = world.pages(0, 1, 9);
  REQUIRE(world.engines.run(0, *first).ok());
  Request *kv = world.pages(1, 64, 1), *moe = world.pages(0, 2, 0);
  world.engines[0].submit(*kv);
  bool submitted = false;
  Bell bell([&] {
    if (!std::exchange(submitted, true)) world.engines[0].submit(*moe);
  });
  world.engines[0].progress(&bell);
  const auto order = world.order();
  const auto urgent = std::ranges::find(order, 0u);
  CHECK(urgent - order.begin() == 1 + 16 + 16);  // found by the look after the next 16
}

TEST_CASE("engine: lower classes keep 256 KiB in flight while a higher one has work, not before") {
  for (const uint32_t max_write_bytes : {1u << 30, 1024u, 100'000u}) {
    CAPTURE(max_write_bytes);
    Shared world({.limits = {.max_write_bytes = max_write_bytes, .max_in_flight = 8192}});
    world.network.nic(0).hold(true);
    Request moe(Imm{world.region->owner, 0});
    Request large(Write{world.source.handle, 0, world.region, 0, 2 << 20, {}});
    large.priority = 1;
    Request* weights = world.pages(2, 1000, 2);
    world.engines[0].submit(moe);
    world.engines[0].progress();
    world.engines[0].submit(large);
    world.engines[0].submit(*weights);
    for (int i = 0; i < 100; ++i) world.engines[0].progress();
    uint64_t lower = 0;
    for (const auto& [work, to] : world.network.nic(0).posted()) lower += work.bytes;
    CHECK(lower <= 256 << 10);
    CHECK(lower > 128 << 10);  // and uses it
    world.network.nic(0).hold(false);
    REQUIRE(world.engines.pump(moe));
    REQUIRE(world.engines.pump(large));
    REQUIRE(world.engines.pump(*weights));
    CHECK(std::equal(world.source.data.begin(), world.source.data.begin() + (2 << 20),
                     world.target.data.begin()));
    world.network.nic(0).hold(true);
    Request alone(Write{world.source.handle, 0, world.region, 0, 2 << 20, {}});
    alone.priority = 1;
    world.engines[0].submit(alone);
    const uint64_t before = world.posted_bytes(0);
    for (int i = 0; i < 100; ++i) world.engines[0].progress();
    CHECK(world.posted_bytes(0) - before == 2 << 20);  // nobody else has work
    world.network.nic(0).hold(false);
    REQUIRE(world.engines.pump(alone));
  }
}

TEST_CASE("engine: what completes, is cancelled or fails gives its part of the 256 KiB back") {
  Shared world({.seed = 4, .limits = {.max_in_flight = 4096}, .short_posts = true});
  Request moe(Imm{world.region->owner, 0});
  for (int round = 0; round < 30; ++round) {
    CAPTURE(round);
    Request *kv = world.pages(1, 700, 1), *weights = world.pages(2, 300, 2);
    Request large(Write{world.source.handle, 0, world.region, 0, 1 << 20, {}});
    large.priority = 2;
    for (Request* request : {kv, weights, &large}) world.engines[0].submit(*request);
    if (round % 3 == 0) world.engines[0].submit(moe);
    for (int i = 0; i < round % 5; ++i) world.engines.turn();
    if (round % 2) (void)world.engines[0].cancel(*kv);
    if (round % 4 == 1) world.network.nic(0).fail_next(1, {base::Code::kTransport, 1});
    for (Request* request : {kv, weights, &large}) REQUIRE(world.engines.pump(*request));
    if (round % 3 == 0) REQUIRE(world.engines.pump(moe));
    world.network.nic(0).fail_next(0, {});
  }
  CHECK(world.engines[0].idle());
  // With all of it given back the budget is whole again.
  world.network.nic(0).hold(true);
  world.engines[0].submit(moe);
  world.engines[0].progress();
  const size_t before = world.network.nic(0).posted().size();
  Request* kv = world.pages(1, 1000, 1);
  world.engines[0].submit(*kv);
  for (int i = 0; i < 100; ++i) world.engines[0].progress();
  CHECK(world.network.nic(0).posted().size() - before > 128);
  world.network.nic(0).hold(false);
  REQUIRE(world.engines.pump(*kv));
  REQUIRE(world.engines.pump(moe));
}

TEST_CASE("engine: urgent work without end does not starve lower classes") {
  Shared world({.limits = {.max_in_flight = 4}});
  std::vector<Request*> moe;  // of several lengths: some of them always wait
  for (const size_t count : {500, 470, 430, 390, 350}) moe.push_back(world.pages(0, count, 0));
  Request *kv = world.pages(1, 20, 1), *weights = world.pages(2, 20, 2);
  for (Request* request : moe) world.engines[0].submit(*request);
  world.engines[0].submit(*kv);
  world.engines[0].submit(*weights);
  const auto deadline = soon();  // they get their turns in time
  while (!(kv->done() && weights->done()) && platform::Clock::now() < deadline) {
    world.engines.turn();
    for (Request* request : moe)
      if (request->done()) world.engines[0].submit(*request);
  }
  CHECK(kv->done());
  CHECK(weights->done());
  for (Request* request : moe) REQUIRE(world.engines.pump(*request));
}

TEST_CASE("engine: a full NIC has room for urgent writes before lower ones let go") {
  Shared world({.limits = {.max_in_flight = 40}});
  world.network.nic(0).hold(true);
  Request *first = world.pages(0, 1, 9), *kv = world.pages(1, 1000, 1), *moe = world.pages(0, 5, 0);
  world.engines[0].submit(*first);
  world.engines[0].progress();
  world.network.nic(0).hold(false);
  REQUIRE(world.engines.pump(*first));
  world.network.nic(0).hold(true);
  world.engines[0].submit(*kv);
  for (int i = 0; i < 10; ++i) world.engines[0].progress();
  CHECK(world.network.nic(0).num_in_flight() == 30);
  world.engines[0].submit(*moe);
  for (int i = 0; i < 10; ++i) world.engines[0].progress();
  CHECK(world.posted_bytes(0) == 5 * 1024);
  world.network.nic(0).hold(false);
  REQUIRE(world.engines.pump(*kv));
  REQUIRE(world.engines.pump(*moe));
}

TEST_CASE("engine: each priority has connections of its own, and values beyond them are refused") {
  FakeNetwork network;
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100, 9));
  const auto descriptor = engines[1].descriptor(target.handle);
  const Peer* moe = engines[0].connect(engines[1].address());
  const auto* kv = engines[0].resolve(descriptor, nullptr, 1);
  CHECK(kv->owner != moe);
  CHECK(engines[0].resolve(descriptor, nullptr, 1) == kv);
  CHECK(engines[0].resolve(descriptor, nullptr, 0)->owner == moe);
  CHECK(network.nic(0).num_peers() == 2);
  engines[0].disconnect(kv->owner);
  Request request(Write{source.handle, 0, engines[0].resolve(descriptor, moe), 0, 100, {}});
  CHECK(engines.run(0, request).ok());
  CHECK(target.data == source.data);
  request.priority = 3;
  CHECK_THROWS_WITH_AS(engines[0].submit(request),
                       doctest::Contains("priority is 3, must be 0 to 2"), base::Error);
  CHECK_THROWS_AS((void)engines[0].connect(engines[1].address(), -1), base::Error);
}

}  // namespace
}  // namespace moe_p2p::test
