// GPU memory that a software NIC lends to its peers: many rows by one launch, and the fence. Taking
// it back returns only when no copy into it is under way, or says that it cannot.
#include <algorithm>
#include <thread>

#include "loopback_gpu.h"
#include "platform/row_copies.h"

namespace moe_p2p::provider_test {
namespace {

const std::string kRows = base::concat("row_kernel=", test::FakeDriver::kRowKernel);

constexpr size_t kLong = platform::RowCopies::kMostBytes + 1;

ProviderUnderTest lent(const std::string& settings) {
  ProviderUnderTest provider = gpu(settings);
  provider.lent = true;
  return provider;
}

// 60 short writes or reads of one post, then a long one; `from` of the pair's memory is copied.
template <typename Make>
void check_one_launch(Pair& pair, const Memory& from, const Memory& to, Make&& make) {
  auto& fake = test::FakeDriver::install();
  fill(from.data, 1);
  std::vector<WorkRequest> rows;
  for (uint32_t i = 0; i < 60; ++i) rows.push_back(make(i, i * 600, 576));
  const uint64_t launches = fake.num_row_launches(), copies = fake.num_copies();
  CHECK(pair.a.domain->post(rows) == 60);
  CHECK(fake.num_row_launches() == launches + 1);
  CHECK(pair.pump_until_done(60));
  for (size_t i = 0; i < 60; ++i)
    CHECK(std::ranges::equal(to.data.subspan(i * 600, 576), from.data.subspan(i * 600, 576)));
  CHECK(fake.num_copies() == copies);
  pair.post(make(60, kLong, kLong));
  CHECK(pair.pump_until_done(61));
  CHECK(pair.a.num_failed() == 0);
  CHECK(fake.num_copies() == copies + 1);
  CHECK(std::ranges::equal(to.data.subspan(kLong), from.data.subspan(kLong)));
}

TEST_CASE("lent memory: the rows of one post are one launch, long ones are for the engines") {
  const Driver driver;
  Pair pair(lent(kRows), 2 * kLong);
  check_one_launch(pair, pair.source, pair.target, [&](uint32_t i, size_t offset, size_t bytes) {
    return with_imm(pair.write(i, offset, bytes), i);
  });
}

TEST_CASE("lent memory: it is read in place, short reads of one post by one launch") {
  const Driver driver;
  Pair pair(lent(kRows), 2 * kLong);
  check_one_launch(pair, pair.target, pair.source, [&](uint32_t i, size_t offset, size_t bytes) {
    return pair.read(i, offset, bytes);
  });
}

TEST_CASE("lent memory: it comes back when reads of it are over; later ones are refused") {
  const Driver driver;
  for (const size_t bytes : {size_t{5000}, size_t{5} << 20}) {  // by the kernel, by the engines
    CAPTURE(bytes);
    Pair pair(lent(kRows), bytes);
    driver.fake.hold(true);
    fill(pair.target.data, 1);
    pair.post(pair.read(0, 0, bytes));
    bool back = pair.target.give_back();
    CHECK_FALSE(back);
    driver.fake.hold(false);
    while (!back) back = pair.target.give_back();
    std::ranges::fill(pair.target.data, std::byte{7});  // who still read it would see this
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.done.size() == 1; }));
    CHECK(pair.a.code(0) == Code::kRemoteAccess);  // it was not known to have ended
    CHECK(holds(pair.source.data, 1));
    pair.post(pair.read(1, 0, 100));
    CHECK(pair.pump_until_done(2));
    CHECK(pair.a.code(1) == Code::kRemoteAccess);
    CHECK(holds(pair.source.data, 1));
  }
}

TEST_CASE("lent memory: a read into memory that was given back ends before, by the device too") {
  const Driver driver;
  Pair pair(lent(kRows), 5000);
  driver.fake.hold(true);
  fill(pair.target.data, 1);
  pair.post(pair.read(0, 0, 5000));
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    driver.fake.hold(false);
  });
  pair.source.unregister();
  CHECK(holds(pair.source.data, 1));  // nothing follows
  later.join();
  CHECK(pair.pump_until_done(1));
}

TEST_CASE("lent memory: a read of a peer that leaves ends after its copy") {
  const Driver driver;
  for (const bool disconnects : {true, false}) {
    CAPTURE(disconnects);
    Pair pair(lent(kRows), 5000);
    driver.fake.hold(true);
    fill(pair.target.data, 1);
    pair.post(pair.read(0, 0, 5000));
    if (disconnects)
      pair.a.domain->disconnect(pair.peer);
    else
      pair.b.domain.reset();  // gives up waiting
    for (int i = 0; i < 1000; ++i) pair.a.poll();
    CHECK(pair.a.done.empty());
    driver.fake.hold(false);
    CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 1; }));
    std::ranges::fill(pair.source.data, std::byte{7});  // who still wrote it would undo this
    for (int i = 0; i < 1000; ++i) pair.a.poll();
    CHECK(std::ranges::count(pair.source.data, std::byte{7}) == std::ssize(pair.source.data));
    CHECK(pair.a.code(0) == (disconnects ? Code::kClosed : Code::kPeerDead));
  }
}

TEST_CASE("lent memory: a read that the driver refuses fails with its number, others go on") {
  const Driver driver;
  for (const std::string& more : {std::string(), std::string(",ring_kib=4")}) {
    constexpr size_t kLong = platform::RowCopies::kMostBytes + 1;
    Pair pair(lent(kRows + more), kLong);
    fill(pair.target.data, 1);
    driver.fake.fail_copies(700);
    pair.post(pair.read(0, 0, kLong));
    CHECK(pair.pump_until_done(1));
    CHECK(pair.a.code(0) == Code::kTransport);
    CHECK(pair.a.status().at(0).detail == 700);
    driver.fake.fail_copies(0);
    for (uint64_t i = 1; i <= 3; ++i) pair.post(pair.read(i, 0, i == 3 ? kLong : 4000));
    CHECK(pair.pump_until_done(4));
    CHECK(pair.a.num_failed() == 1);
    CHECK(holds(pair.source.data, 1));
  }
}

TEST_CASE("lent memory: more rows than fit a batch or the queue arrive, each after its bytes") {
  const Driver driver;
  for (const char* settings : {",max_in_flight=5000", ",ring_kib=16"}) {
    CAPTURE(settings);
    constexpr uint32_t kNum = 10'000;  // more than the ring of rows holds
    Pair pair(lent(kRows + settings), kNum * 8);
    fill(pair.source.data, 3);
    size_t num_early = 0;
    pair.b.on_imm = [&](uint32_t i) {
      num_early += !std::ranges::equal(pair.target.data.subspan(8 * i, 8),
                                       pair.source.data.subspan(8 * i, 8));
    };
    std::vector<WorkRequest> rows;
    for (uint32_t i = 0; i < kNum; ++i) rows.push_back(with_imm(pair.write(i, 8 * i, 8), i));
    size_t posted = 0;
    pair.a.poll_entries = pair.b.poll_entries = 64;
    CHECK(pump({&pair.a, &pair.b}, [&] {
      if (posted - pair.a.done.size() < 256)  // many at once: few launches
        posted += pair.a.domain->post(std::span(rows).subspan(posted));
      return pair.a.done.size() == kNum && pair.b.imms.size() == kNum;
    }));
    CHECK(num_early == 0);
    CHECK(pair.a.num_failed() == 0);
  }
}

TEST_CASE("lent memory: it comes back when copies into it are over, and not before") {
  const Driver driver;
  for (const size_t bytes : {size_t{5000}, size_t{5} << 20}) {  // by the kernel, by the engines
    for (const bool long_held : {false, true}) {
      CAPTURE(bytes);
      CAPTURE(long_held);
      Pair pair(lent(kRows), bytes);
      driver.fake.hold(true);
      fill(pair.source.data, 1);
      pair.post(with_imm(pair.write(0, 0, bytes), 1));
      bool refused = false;
      std::thread owner([&] {
        while (!pair.target.give_back()) {
          refused = true;
          driver.fake.hold(false);
        }
      });
      if (!long_held) driver.fake.hold(false);
      CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.done.size() == 1; }));
      owner.join();
      if (long_held) CHECK(refused);  // else when the machine is slow
      CHECK(pair.b.imms.size() == (pair.a.code(0) == Code::kOk ? 1 : 0));
      std::ranges::fill(pair.target.data, std::byte{7});
      pair.post(with_imm(pair.write(1, 0, 100), 2));  // its window is there no more: by the ring
      CHECK(pair.pump_until_done(2));
      CHECK(pair.a.code(1) == Code::kRemoteAccess);
      CHECK(std::ranges::count(pair.target.data, std::byte{7}) == std::ssize(pair.target.data));
    }
  }
}

TEST_CASE("lent memory: a window that outlives the loan is not written through") {
  const Driver driver;
  Pair pair(lent(kRows), 1000);
  Node& from = pair.a;
  const MemoryKey old = pair.target.key;
  pair.write(0, 0, 10);  // maps
  pair.target.unregister();
  from.domain->map_remote(old.remote_key, pair.target.span(), true);  // as a late peer would
  fill(pair.source.data, 1);
  auto request = with_imm(pair.write(1, 0, 500), 1);
  pair.post(request);
  CHECK(pair.pump_until_done(1));
  CHECK(pair.a.code(1) == Code::kRemoteAccess);
  CHECK(all_zero(pair.target.data));
  CHECK(pair.b.imms.empty());
}

TEST_CASE("lent memory: a device that cannot report its copies writes through the host") {
  const Driver driver;
  for (const bool words : {false, true}) {
    CAPTURE(words);
    driver.fake.write_words(words);
    driver.fake.register_pages(!words);
    Pair pair(lent(kRows), 1 << 20);
    for (const size_t bytes : {size_t{1000}, size_t{1} << 20}) {
      fill(pair.source.data, bytes);
      pair.post(with_imm(pair.write(bytes, 0, bytes), 1));
      CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.code(bytes) != Code::kTimeout; }));
      CHECK(pair.a.code(bytes) == Code::kOk);
      CHECK(std::ranges::equal(pair.target.data.first(bytes), pair.source.data.first(bytes)));
    }
  }
}

TEST_CASE("lent memory: a source that overlaps its target is refused") {
  const Driver driver;
  Node node = open(lent(kRows));
  Memory memory(node, 1000);
  const PeerId self = node.connect(node);
  for (const auto& [from, to] : {std::pair{0, 100}, {100, 0}, {50, 50}}) {
    const auto n = static_cast<uint64_t>(from + 10 * to);
    node.post(make_write(n, self, memory, static_cast<size_t>(from), memory,
                         static_cast<size_t>(to), 200));
    CHECK(pump({&node}, [&] { return node.code(n) != Code::kTimeout; }));
    CHECK(node.code(n) == Code::kInvalidArgument);
  }
  node.post(make_write(1, self, memory, 0, memory, 200, 200));
  CHECK(pump({&node}, [&] { return node.code(1) == Code::kOk; }));
}

TEST_CASE("lent memory: no copy writes a target that was given back, while others go on") {
  const Driver driver;
  for (const std::string& more : {std::string(), std::string(",seed=6"), std::string(",gbps=80")}) {
    CAPTURE(more);
    constexpr size_t kBytes = 20'000;
    Node a = open(lent(kRows + more)), b = open(lent(kRows + more));
    const PeerId peer = a.connect(b);
    Memory kept(b, kBytes);
    Traffic traffic(a, b, 8);
    for (size_t turn = 1; turn <= 12; ++turn) {
      Memory source(a, kBytes), target(b, kBytes);
      std::ranges::fill(target.data, std::byte{1});
      fill(source.data, turn);
      const auto request = make_write(turn, peer, source, 0, turn % 3 ? target : kept, 0, kBytes);
      traffic.post(request, 8 * (turn - 1) + turn % 4);
      target.unregister();
      std::ranges::fill(target.data, std::byte{0});  // a copy under way would be a data race
      traffic.wait(8 * turn);
      CHECK(all_zero(target.data));
    }
  }
}

TEST_CASE("lent memory: a NIC that closes waits for copies of its peers") {
  const Driver driver;
  Pair pair(lent(kRows), 5000);
  driver.fake.hold(true);
  fill(pair.source.data, 1);
  pair.post(with_imm(pair.write(0, 0, 5000), 1));
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    driver.fake.hold(false);
  });
  pair.b.domain.reset();
  CHECK(holds(pair.target.data, 1));  // it has arrived, and nothing follows
  later.join();
}

}  // namespace
}  // namespace moe_p2p::provider_test
