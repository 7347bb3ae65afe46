// The software NIC beyond the contract: its settings, its faults on purpose, its channels, its link
// model. What needs a second process is in loopback_process_test.cpp.
#include <algorithm>
#include <atomic>
#include <thread>

#include "platform/shm.h"
#include "provider/loopback/link_model.h"
#include "provider/loopback/test_hooks.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

using provider::LoopbackControl;
using provider::loopback::LinkModel;

Pair open_pair(const char* settings, size_t bytes = 4096) {
  return Pair({"loopback", settings}, bytes);
}
LoopbackControl& control(Node& node) { return dynamic_cast<LoopbackControl&>(*node.domain); }

TEST_CASE("loopback settings: every mistake is an error that says what would be right") {
  const auto open_with = [](const char* settings) {
    return text_of_error([&] { Node("loopback", settings); });
  };
  const std::string unknown = open_with("sede=3");
  CHECK(contains(unknown, "sede=3"));
  for (const char* key : {"seed", "ring_kib", "channels", "max_in_flight", "max_write_bytes",
                          "gbps", "latency_us", "fail_nth", "mutate", "addressing"})
    CHECK(contains(unknown, key));
  CHECK(contains(open_with("seed"), "key=value"));
  CHECK(contains(open_with("seed=x"), "integer"));
  CHECK(contains(open_with("seed=-1"), "integer"));
  CHECK(contains(open_with("seed=1,seed=2"), "twice"));
  CHECK(contains(open_with("ring_kib=3"), "4 to"));
  CHECK(contains(open_with("ring_kib=12"), "power of two"));
  CHECK(contains(open_with("gbps=fast"), "number"));
  CHECK(contains(open_with("gbps=nan"), "number"));
  CHECK(contains(open_with("mutate=all"), "early_imm"));
  CHECK(contains(open_with("seed=1,gbps=100"), "clock"));
  CHECK(open_with("").empty());
  CHECK(open_with("seed=18446744073709551615,channels=1").empty());
}

TEST_CASE("loopback: the seed stands in what it says of itself") {
  Node node("loopback", "seed=77", 1);
  CHECK(control(node).describe() == "loopback NIC 1 (seed=77)");
  const std::string error = text_of_error([&] { node.domain->register_memory({nullptr, 5}); });
  CHECK(contains(error, "seed=77"));
}

TEST_CASE("loopback: addresses of others and of closed NICs are refused") {
  auto pair = open_pair("");
  auto address = pair.b.domain->address();
  CHECK(contains(text_of_error([&] { pair.a.domain->connect(std::span(address).first(9)); }),
                 "truncated"));
  address[0] = std::byte{0};
  CHECK(contains(text_of_error([&] { pair.a.domain->connect(address); }), "another provider"));
  base::Bytes closed;
  {
    Node gone("loopback", "");
    closed = gone.domain->address();
  }
  CHECK(contains(text_of_error([&] { pair.a.domain->connect(closed); }), "peer dead"));
}

// --- faults on purpose ---

TEST_CASE("loopback: the mutation breaks the contract and the contract's check sees it") {
  for (const auto memory : {MemoryKind::kHost, MemoryKind::kCuda}) {
    for (const char* settings : {"", "ring_kib=4", "seed=1", "seed=2,ring_kib=4"}) {
      CAPTURE(std::string(settings));
      CAPTURE(static_cast<int>(memory));
      CHECK(num_early({"loopback", settings, false, memory}) == 0);
      const auto mutated = base::concat(*settings ? settings : "seed=0", ",mutate=early_imm");
      CHECK(num_early({"loopback", mutated.c_str(), false, memory}) > 0);
    }
  }
}

TEST_CASE("loopback: the n-th write fails, and only that one") {
  for (const char* settings : {"fail_nth=3", "fail_nth=3,seed=5"}) {
    auto pair = open_pair(settings);
    for (uint32_t i = 1; i <= 8; ++i) pair.post(with_imm(pair.write(i, 0, 100), i));
    CHECK(pair.pump_until_done(8));
    CHECK(pair.pump_until_seen(7));
    for (uint64_t i = 1; i <= 8; ++i)
      CHECK(pair.a.code(i) == (i == 3 ? Code::kTransport : Code::kOk));
    control(pair.a).fail_write(9);
    pair.post(with_imm(pair.write(9, 0, 100), 9));
    CHECK(pair.pump_until_done(9));
    CHECK(pair.a.code(9) == Code::kTransport);
    std::ranges::sort(pair.b.imms);
    CHECK(pair.b.imms == std::vector<uint32_t>{1, 2, 4, 5, 6, 7, 8});
  }
}

TEST_CASE("loopback: a dead NIC neither takes nor gives, its peers learn of it") {
  for (const char* settings : {"", "seed=5"}) {
    auto pair = open_pair(settings);
    const PeerId back = pair.b.connect(pair.a);
    for (uint32_t i = 0; i < 10; ++i) pair.post(with_imm(pair.write(i, 0, 4000), i));
    REQUIRE(pair.b.post(make_imm(0, back, 1)));
    control(pair.b).kill();
    CHECK(pair.pump_until_done(10));
    CHECK(pair.a.code(9) == Code::kPeerDead);
    const size_t num_seen = pair.b.imms.size();
    pair.post(with_imm(pair.write(10, 0, 64), 10));
    CHECK(pair.pump_until_done(11));
    CHECK(pair.a.code(10) == Code::kPeerDead);
    REQUIRE(pair.b.post(make_imm(1, back, 2)));
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.done.size() == 2; }));
    CHECK(pair.b.code(1) == Code::kTransport);
    CHECK(pair.b.imms.size() == num_seen);
    CHECK(std::ranges::count(pair.a.imms, 2) == 0);
    CHECK(pair.a.domain->idle());
    CHECK(pair.b.domain->idle());
  }
}

TEST_CASE("loopback: a source that is given back half-way is not read any more") {
  for (const char* settings : {"ring_kib=4", "ring_kib=4,seed=3"}) {
    auto pair = open_pair(settings, 100'000);
    pair.post(with_imm(pair.write(0, 0, 100'000), 1));
    for (int i = 0; i < 5; ++i) pair.a.poll();
    pair.source.unregister();
    CHECK(pair.pump_until_done(1));
    CHECK(pair.a.code(0) == Code::kInvalidArgument);
    settle({&pair.a, &pair.b}, 200);
    CHECK(pair.b.imms.empty());
    post_all(pair.a, {&pair.a, &pair.b}, make_imm(1, pair.peer, 2));  // the slot is clean again
    CHECK(pair.pump_until_seen(1));
  }
}

// --- channels, regions, wake-ups ---

TEST_CASE("loopback: channels are given back and taken again, and their number is a limit") {
  for (const char* settings : {"channels=2", "channels=2,seed=9,ring_kib=4"}) {
    Node b("loopback", settings);
    Node a("loopback", settings);
    Memory source(a, 2000), target(b, 2000);
    for (uint64_t turn = 0; turn < 50; ++turn) {
      const PeerId first = a.connect(b), second = a.connect(b);
      CHECK(contains(text_of_error([&] { a.connect(b); }), "channels"));
      fill(source.data, turn);
      // The first is left in the middle of a write, which must not disturb its successor.
      REQUIRE(a.post(make_write(2 * turn, first, source, 0, target, 0, 2000)));
      if (turn % 2) b.poll();
      a.domain->disconnect(first);
      post_all(a, {&a, &b},
               with_imm(make_write(2 * turn + 1, second, source, 0, target, 0, 2000), 1));
      CHECK(pump({&a, &b},
                 [&] { return a.done.size() == 2 * (turn + 1) && b.imms.size() == turn + 1; }));
      CHECK(a.code(2 * turn + 1) == Code::kOk);
      CHECK(holds(target.data, turn));
      a.domain->disconnect(second);
      settle({&a, &b}, 1);
    }
  }
}

// What waits in a severed channel is not taken, and its sender learns that; other tags go on.
TEST_CASE("loopback: what is severed brings no immediate, then or later") {
  constexpr uint64_t kTag = 7, kOther = 8;
  const auto now = [] { return platform::Clock::now(); };
  for (const char* settings : {"", "seed=3", "seed=4,ordered=1"}) {
    CAPTURE(std::string(settings));
    Node a("loopback", settings), b("loopback", settings);
    const auto connect = [&](uint64_t tag) {
      return a.domain->connect_for(b.domain->address(), 0, tag);
    };
    const PeerId severed = connect(kTag), kept = connect(kOther), untagged = a.connect(b);
    const auto post = [&](uint64_t wr_id, PeerId peer) {
      post_all(a, {&a}, make_imm(wr_id, peer, static_cast<uint32_t>(wr_id)));
    };
    post(1, severed);
    CHECK(pump({&a, &b}, [&] { return a.done.size() == 1 && b.imms.size() == 1; }));
    post(2, severed);
    pump({&a}, [polls = 0]() mutable { return ++polls > 100; });  // it lies in the channel
    CHECK(!b.domain->sever(kTag, now()));                         // nobody polls
    const uint64_t already = b.imms.size();
    b.poll();
    CHECK(pump({&b}, [&] { return b.domain->sever(kTag, now()); }));
    CHECK(b.imms.size() == already);
    const auto seen = b.imms;
    post(3, severed);
    post(4, connect(kTag));  // is refused by whom it leads to
    post(5, kept);
    post(6, untagged);
    CHECK(pump({&a, &b}, [&] { return a.done.size() == 6 && b.imms.size() == seen.size() + 2; }));
    for (const uint64_t each : {2, 3, 4}) CHECK(a.code(each) == Code::kPeerDead);
    for (const uint64_t each : {1, 5, 6}) CHECK(a.code(each) == Code::kOk);
    settle({&a, &b});
    std::ranges::sort(b.imms);
    CHECK(b.imms == std::vector<uint32_t>{1, 5, 6});
    CHECK(contains(text_of_error([&] { b.domain->connect_for(a.domain->address(), 0, kTag); }),
                   "severed"));
  }
}

// The adversary has taken immediates of a channel and not shown them: they come before it is
// severed, never after.
TEST_CASE("loopback: what was taken of a severed channel is shown before") {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const std::string settings = base::concat("seed=", seed, seed % 2 ? "" : ",ordered=1");
    CAPTURE(settings);
    Node a("loopback", settings), b("loopback", settings);
    const PeerId peer = a.domain->connect_for(b.domain->address(), 0, 7);
    for (uint32_t i = 0; i < 64; ++i) post_all(a, {&a, &b}, make_imm(i, peer, i));
    settle({&a, &b}, static_cast<int>(seed % 5));
    CHECK(pump({&b}, [&] { return b.domain->sever(7, platform::Clock::now()); }));
    const size_t seen = b.imms.size();
    settle({&a, &b}, 300);
    CHECK(b.imms.size() == seen);
    CHECK(seen == a.done.size() - a.num_failed());
  }
}

TEST_CASE("loopback: regions are limited in number, and a key is used once") {
  Node node("loopback", "");
  std::vector<std::byte> bytes(64);
  std::vector<MemoryKey> keys;
  const std::string error = text_of_error([&] {
    for (;;) keys.push_back(node.domain->register_memory({bytes.data(), bytes.size()}));
  });
  CHECK(contains(error, "4096 memory regions"));
  const MemoryKey old = keys.back();
  node.domain->unregister_memory(old);
  CHECK(contains(text_of_error([&] { node.domain->unregister_memory(old); }), "not registered"));
  const MemoryKey fresh = node.domain->register_memory({bytes.data(), bytes.size()});
  CHECK(fresh.local_key != old.local_key);
  CHECK(fresh.remote_key != fresh.local_key);
}

// The copy under way is what matters here, so the writes are large and the target copies most of
// the time. Without the handshake in RegionTable::remove this fails at once, with and without TSan.
TEST_CASE("loopback: giving memory back waits for the copy that is under way") {
  for (const char* settings : {"", "seed=6"}) {
    constexpr size_t kBytes = 100'000;
    Node a("loopback", settings), b("loopback", settings);
    const PeerId peer = a.connect(b);
    Memory source(a, kBytes);
    fill(source.data, 1);
    std::atomic<bool> stop{false};
    std::thread target_thread([&] {
      Patience patience;
      while (!stop.load(std::memory_order_relaxed)) patience.polled(b.poll());
    });
    size_t num_wrong = 0;
    for (size_t turn = 0; turn < 60; ++turn) {
      Memory target(b, kBytes);
      a.done.clear();
      for (uint64_t i = 0; i < 8; ++i)
        post_all(a, {&a}, make_write(i, peer, source, 0, target, 0, kBytes));
      CHECK(pump({&a}, [&] { return a.done.size() > turn % 4; }));
      target.unregister();
      std::ranges::fill(target.data, std::byte{0});
      CHECK(pump({&a}, [&] { return a.done.size() == 8; }));
      if (!all_zero(target.data)) ++num_wrong;
    }
    stop.store(true, std::memory_order_relaxed);
    target_thread.join();
    CHECK(num_wrong == 0);
  }
}

struct WakerObject {
  platform::SharedMemory shm =
      platform::SharedMemory::create("waker", sizeof(platform::EventCount));
  platform::EventCount& event = *reinterpret_cast<platform::EventCount*>(shm.data());
  std::unique_ptr<Domain> open() {
    DomainOptions options;
    options.waker = &event;
    options.waker_name = shm.name();
    return provider::open_domain("loopback", options);
  }
};

TEST_CASE("loopback: arrivals wake the target, acknowledgements wake the poster, once per batch") {
  WakerObject waker_a, waker_b;
  auto a = waker_a.open(), b = waker_b.open();
  const PeerId peer = a->connect(b->address());
  const uint32_t before_post = waker_b.event.sequence.load();
  std::vector<WorkRequest> requests(20, make_imm(0, peer, 1));
  REQUIRE(a->post(requests) == 20);
  CHECK(waker_b.event.sequence.load() == before_post + 1);
  const uint32_t before_ack = waker_a.event.sequence.load();
  Completion completions[64];
  CHECK(b->poll(completions) == 20);
  CHECK(waker_a.event.sequence.load() == before_ack + 1);
  CHECK(b->poll(completions) == 0);
  CHECK(waker_a.event.sequence.load() == before_ack + 1);
  CHECK(a->poll(completions) == 20);
  const uint32_t before_close = waker_a.event.sequence.load();
  a->disconnect(peer);
  CHECK(waker_a.event.sequence.load() == before_close + 1);  // our own poller must carry it out
}

// --- the link model ---

TEST_CASE("loopback link model: writes of one NIC follow each other at its rate") {
  LinkModel link(/*gbps=*/400, /*latency_us=*/2);
  const int64_t start = 1'000'000;
  int64_t last = 0;
  for (int i = 0; i < 1000; ++i) last = link.transmit(start, 50'000);  // 1 us each
  CHECK(last == start + 1'000'000 + 2000);
  CHECK(link.transmit(start + 5'000'000, 50'000) ==
        start + 5'000'000 + 1000 + 2000);  // idle before
}

TEST_CASE("loopback link model: small writes do not lose time to rounding") {
  LinkModel link(400, 0);
  int64_t last = 0;
  for (int i = 0; i < 1'000'000; ++i) last = link.transmit(7, 1);  // 0.02 ns each
  CHECK(last == 7 + 20'000);
}

TEST_CASE("loopback link model: latency without a rate") {
  LinkModel link(0, 3);
  CHECK(link.transmit(100, 1 << 30) == 3100);
  CHECK_FALSE(LinkModel(0, 0).on());
}

TEST_CASE("loopback: with a link model nothing comes before its time") {
  auto pair = open_pair("gbps=8,latency_us=300", 1'000'000);  // 1 byte per ns
  const auto start = platform::Clock::now();
  pair.post(with_imm(pair.write(0, 0, 1'000'000), 1));
  CHECK(pair.pump_until_seen(1));
  const auto arrived = platform::Clock::now() - start;
  CHECK(pair.pump_until_done(1));
  CHECK(arrived >= std::chrono::microseconds(1300));  // a bound from below cannot be flaky
  CHECK(platform::Clock::now() - start >= std::chrono::microseconds(1600));  // and the way back
}

TEST_CASE("loopback: a full /dev/shm is an error with the size in it") {
  // One channel larger than any /dev/shm here: refused when the channel is claimed.
  Node b("loopback", "channels=1,ring_kib=268435456");
  Node a("loopback", "");
  const std::string error = text_of_error([&] { a.connect(b); });
  CHECK(contains(error, "resource exhausted"));
  CHECK(contains(error, "/dev/shm"));
  CHECK(contains(text_of_error([&] { a.connect(b); }), "/dev/shm"));  // the channel is free again
}

}  // namespace
}  // namespace moe_p2p::provider_test
