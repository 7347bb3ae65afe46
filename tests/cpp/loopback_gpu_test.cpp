// The software NIC with GPU memory beyond the contract: what is refused, what a failing driver
// becomes, who waits for copies under way, the link model. The driver is fake_driver.h.
#include <algorithm>

#include "loopback_gpu.h"
#include "provider/loopback/test_hooks.h"
#include "seeds.h"

namespace moe_p2p::provider_test {
namespace {

TEST_CASE("loopback GPU: an immediate never comes before its payload, however slow the copies") {
  const Driver driver;
  for (uint32_t seed = 0; seed < num_seeds(31); ++seed) {
    driver.fake.set_max_queries(seed % 3 * 40);
    const auto settings =
        base::concat("seed=", seed, ",ring_kib=", 4 << seed % 3, ",copy_kernel=", seed % 2);
    CAPTURE(settings);
    CHECK(num_early(gpu(settings)) == 0);
  }
}

TEST_CASE("loopback GPU: without an adversary each write is one copy") {
  const Driver driver;
  Pair pair(gpu(""), 1'000'000);
  const uint64_t before = driver.fake.num_copies();
  fill(pair.source.data, 1);
  pair.post(with_imm(pair.write(0, 0, 1'000'000), 1));
  for (uint32_t i = 1; i < 10; ++i) pair.post(with_imm(pair.write(i, i, 0), i));  // nothing to copy
  CHECK(pair.pump_until_done(10));
  CHECK(driver.fake.num_copies() == before + 1);
  CHECK(holds(pair.target.data, 1));
}

TEST_CASE("loopback GPU: a second device, host windows and a second window for a key are refused") {
  Node node = open(gpu(""));
  Memory memory(node, 64);
  std::byte bytes[64];
  const auto refused = [&](MemoryKind kind, int device, uint64_t key) {
    return text_of_error([&] { node.domain->map_remote(key, {bytes, 64, kind, device}); });
  };
  CHECK(contains(refused(MemoryKind::kHost, -1, 5), "GPU memory"));
  CHECK(contains(refused(MemoryKind::kCuda, 1, 5), "device 1"));
  CHECK(contains(refused(MemoryKind::kCuda, 0, 0), "none"));
  CHECK(refused(MemoryKind::kCuda, 0, 5).empty());
  CHECK(contains(refused(MemoryKind::kCuda, 0, 5), "already"));
  CHECK(contains(
      text_of_error([&] { node.domain->register_memory({bytes, 64, MemoryKind::kCuda, 1}); }),
      "device 0"));
}

// --- giving memory back ---

TEST_CASE("loopback GPU: no copy reads a source that was given back, or writes such a target") {
  for (const char* settings : kSettings) {
    for (const bool drop_target : {false, true}) {
      CAPTURE(drop_target);
      constexpr size_t kBytes = 20'000;
      Node a = open(gpu(settings)), b = open(gpu(settings));
      const PeerId peer = a.connect(b);
      Traffic traffic(a, b, 8);
      for (size_t turn = 1; turn <= 30; ++turn) {
        Memory source(a, kBytes), target(b, kBytes);
        std::ranges::fill(target.data, std::byte{1});
        fill(source.data, turn);
        const auto request = make_write(turn, peer, source, 0, target, 0, kBytes);
        traffic.post(request, 8 * (turn - 1) + turn % 4);
        if (drop_target) {
          target.unregister();                           // after its window was dropped
          std::ranges::fill(target.data, std::byte{0});  // a copy under way would be a data race
        } else {
          source.unregister();
          std::ranges::fill(source.data, std::byte{0});
        }
        traffic.wait(8 * turn);
        if (drop_target)
          CHECK(all_zero(target.data));
        else
          CHECK(std::ranges::count(target.data, std::byte{0}) == 0);  // read after it was zeroed
      }
    }
  }
}

TEST_CASE("loopback GPU: disconnecting and dying do not wait for copies, the NIC's end does") {
  const Driver driver;
  const int broken_off = driver.fake.num_broken_off();
  for (const char* settings : kSettings) {
    for (const bool die : {false, true}) {
      driver.fake.hold(true);
      Pair pair(gpu(settings), 50'000);
      fill(pair.source.data, 1);
      for (uint64_t i = 0; i < 8; ++i) pair.post(with_imm(pair.write(i, i * 5000, 5000), 1));
      settle({&pair.a, &pair.b}, 300);
      CHECK(pair.a.done.empty());
      if (die) {
        dynamic_cast<provider::LoopbackControl&>(*pair.a.domain).kill();
      } else {
        pair.a.domain->disconnect(pair.peer);
      }
      CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.done.size() == 8; }));
      CHECK(pair.a.num_failed() == 8);
      CHECK(pair.a.domain->idle());
      CHECK(pair.b.imms.empty());
      driver.fake.hold(false);
    }
  }
  CHECK(driver.fake.num_broken_off() == broken_off);
}

TEST_CASE("loopback GPU: a new connection is not disturbed by what an old one left") {
  const Driver driver;
  for (const char* settings : kSettings) {
    Pair pair(gpu(settings), 60'000);
    for (uint64_t turn = 0; turn < 40; ++turn) {
      fill(pair.source.data.first(5000), turn);
      const PeerId left = pair.peer;
      pair.post(with_imm(pair.write(2 * turn, 5000, 50'000), 7));
      if (turn % 2) pair.a.poll();
      pair.a.domain->disconnect(left);
      pair.peer = pair.a.connect(pair.b);
      pair.post(with_imm(pair.write(2 * turn + 1, 0, 5000), 8));
      CHECK(pair.pump_until_done(2 * (turn + 1)));
      CHECK(pump({&pair.a, &pair.b}, [&] {
        return std::ranges::count(pair.b.imms, 8) == static_cast<int64_t>(turn + 1);
      }));
      CHECK(pair.a.code(2 * turn + 1) == Code::kOk);
      CHECK(holds(pair.target.data.first(5000), turn));
    }
  }
}

// --- a driver that fails ---

TEST_CASE("loopback GPU: a copy that the driver refuses fails its write with the driver's number") {
  const Driver driver;
  for (const char* settings : kSettings) {
    Pair pair(gpu(settings), 64 * 3000);
    fill(pair.source.data, 1);
    const auto post = [&](uint64_t first) {
      for (uint64_t i = first; i < first + 20; ++i)
        pair.post(with_imm(pair.write(i, i * 3000, 3000), static_cast<uint32_t>(i)));
    };
    post(0);
    pair.a.poll();
    driver.fake.fail_copies(719);  // some are under way, of others a part
    post(20);
    CHECK(pair.pump_until_done(40));
    driver.fake.fail_copies(0);
    for (uint64_t i = 20; i < 40; ++i)
      CHECK(pair.a.status().at(i) == base::Status{Code::kTransport, 719});
    const size_t num_good = 40 - pair.a.num_failed();
    post(40);  // the slots are clean again
    CHECK(pair.pump_until_done(60));
    settle({&pair.a, &pair.b}, 500);
    for (uint64_t i = 40; i < 60; ++i) CHECK(pair.a.code(i) == Code::kOk);
    CHECK(pair.b.imms.size() == num_good + 20);
    for (const uint32_t imm : pair.b.imms) CHECK(pair.a.code(imm) == Code::kOk);
  }
}

TEST_CASE(
    "loopback GPU: pieces left of a write that was given up are not taken for its successor's") {
  const Driver driver;
  size_t num_given_up = 0;
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    CAPTURE(seed);
    Pair pair(gpu(base::concat("seed=", seed)), 50'000);
    driver.fake.hold(true);
    const uint64_t before = driver.fake.num_copies();
    pair.post(with_imm(pair.write(0, 0, 50'000), 0));
    CHECK(pump({&pair.a, &pair.b}, [&] { return driver.fake.num_copies() != before; }));
    driver.fake.fail_copies(719);  // for the pieces that were not begun
    settle({&pair.a, &pair.b}, 300);
    num_given_up += pair.a.num_failed();
    driver.fake.fail_copies(0);
    driver.fake.hold(false);
    CHECK(pair.pump_until_done(1));
    fill(pair.source.data, 5);
    bool in_place = false;
    pair.b.on_imm = [&](uint32_t imm) { in_place = imm == 1 && holds(pair.target.data, 5); };
    pair.post(with_imm(pair.write(1, 0, 50'000), 1));
    CHECK(pump({&pair.a, &pair.b}, [&] { return std::ranges::count(pair.b.imms, 1u) == 1; }));
    CHECK(in_place);
    CHECK(pair.pump_until_done(2));
    CHECK(pair.a.code(1) == Code::kOk);
  }
  CHECK(num_given_up > 5);
}

TEST_CASE("loopback GPU: a device that fails fails all that is under way and all that comes") {
  const Driver driver;
  for (const char* settings : kSettings) {
    Pair pair(gpu(settings), 64 * 3000);
    driver.fake.hold(true);
    for (uint32_t i = 0; i < 20; ++i) pair.post(with_imm(pair.write(i, i * 3000, 3000), i));
    settle({&pair.a, &pair.b}, 50);
    driver.fake.fail_queries(700);
    CHECK(pair.pump_until_done(20));
    driver.fake.fail_queries(0);
    driver.fake.hold(false);
    pair.post(with_imm(pair.write(20, 0, 3000), 20));
    CHECK(pair.pump_until_done(21));
    for (uint64_t i = 0; i <= 20; ++i)
      CHECK(pair.a.status().at(i) == base::Status{Code::kTransport, 700});
    pair.post(make_imm(21, pair.peer, 21));  // needs no copy
    CHECK(pair.pump_until_seen(1));
    CHECK(pair.b.imms == std::vector<uint32_t>{21});
  }
}

// --- the link model ---

TEST_CASE("loopback GPU: an immediate comes neither before its time nor before the copy is done") {
  const Driver driver;
  using std::chrono::microseconds;
  Pair pair(gpu("gbps=8,latency_us=300"), 1'000'000);  // 1 byte per ns
  const auto start = platform::Clock::now();
  pair.post(with_imm(pair.write(0, 0, 1'000'000), 1));
  CHECK(pair.pump_until_seen(1));
  const auto arrived = platform::Clock::now() - start;
  CHECK(pair.pump_until_done(1));
  CHECK(arrived >= microseconds(1300));  // a bound from below cannot be flaky
  CHECK(platform::Clock::now() - start >= microseconds(1600));  // and the way back

  driver.fake.hold(true);
  fill(pair.source.data, 2);
  pair.post(with_imm(pair.write(1, 0, 1000), 2));
  const auto end = platform::Clock::now() + microseconds(1000);
  while (platform::Clock::now() < end) settle({&pair.a, &pair.b}, 1);
  CHECK(pair.b.imms.size() == 1);
  driver.fake.hold(false);
  CHECK(pair.pump_until_seen(2));
  CHECK(holds(pair.target.data.first(1000), 2));
}

// The link's time counts from the post, so what the copies take must not be added to it.
TEST_CASE("loopback GPU: with a link model all copies begin at once and arrive at its rate") {
  const Driver driver;
  Pair pair(gpu("gbps=8"), 100'000);  // 100 us each
  const uint64_t before = driver.fake.num_copies();
  const auto start = platform::Clock::now();
  for (uint32_t i = 0; i < 10; ++i) pair.post(with_imm(pair.write(i, 0, 100'000), i));
  CHECK(driver.fake.num_copies() == before + 10);
  CHECK(pair.pump_until_seen(10));
  CHECK(platform::Clock::now() - start >= std::chrono::microseconds(1000));
}

}  // namespace
}  // namespace moe_p2p::provider_test
