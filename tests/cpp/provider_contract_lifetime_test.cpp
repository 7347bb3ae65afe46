// The contract of provider/provider.h, second half: registration, connections and threads that come
// and go while writes are under way, and the order in which things are shown.
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <utility>

#include "base/letter.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

// Polls its node until told to stop. The node belongs to this thread meanwhile.
class PollingThread {
 public:
  explicit PollingThread(Node& node)
      : thread_([this, &node] {
          Patience patience;
          while (!stop_.load(std::memory_order_relaxed)) patience.polled(node.poll());
        }) {}
  ~PollingThread() { stop(); }
  void stop() {
    stop_.store(true, std::memory_order_relaxed);
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

TEST_CASE("provider contract: an address of another version is refused by name") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), b = open(provider);
    base::Bytes address = b.domain->address();
    address[sizeof(uint32_t)] ^= std::byte{1};  // of the letter, which stands behind the tag
    CHECK_THROWS_WITH_AS(static_cast<void>(a.domain->connect(address)),
                         doctest::Contains(base::letter_text(base::letter() ^ 1).c_str()),
                         base::Error);
  });
}

TEST_CASE("provider contract: writes to memory that was given back fail, other memory goes on") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 4000);
    Memory kept(pair.b, 4000);
    fill(pair.source.data, 1);
    for (uint64_t i = 0; i < 10; ++i) pair.post(with_imm(pair.write(i, 0, 4000), 1));
    pair.b.poll();
    pair.target.unregister();  // some of the ten are under way
    const std::vector<std::byte> before(pair.target.data.begin(), pair.target.data.end());
    pair.post(make_write(10, pair.peer, pair.source, 0, kept, 0, 4000));
    pair.post(pair.write(11, 0, 4000));
    CHECK(pair.pump_until_done(12));
    CHECK(std::ranges::equal(before, pair.target.data));
    CHECK(is_refusal(provider, pair.a.code(11)));
    if (provider.drops_connection) return;
    CHECK(pair.a.code(10) == Code::kOk);
    CHECK(holds(kept.data, 1));
  });
}

TEST_CASE("provider contract: no write reaches memory after unregistering has returned") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), b = open(provider);
    const PeerId peer = a.connect(b);
    constexpr size_t kBytes = 3000;
    Memory source(a, kBytes);
    fill(source.data, 1);
    PollingThread target_thread(b);
    size_t num_wrong = 0;
    for (int turn = 0; turn < 20; ++turn) {
      auto target = std::make_unique<Memory>(b, kBytes);
      uint64_t next = 0;
      a.done.clear();
      for (; next < 8; ++next)  // the target thread copies while these are under way
        post_all(a, {&a}, make_write(next, peer, source, 0, *target, 0, kBytes));
      CHECK(pump({&a}, [&] { return a.done.size() > static_cast<size_t>(turn % 4); }));
      target->unregister();
      std::ranges::fill(target->data, std::byte{0});  // a copy under way would be a data race
      CHECK(pump({&a}, [&] { return a.done.size() == next; }));
      if (!all_zero(target->data)) ++num_wrong;
    }
    target_thread.stop();
    CHECK(num_wrong == 0);
  });
}

TEST_CASE("provider contract: disconnecting completes what is under way, others do not notice") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), silent = open(provider), b = open(provider);
    const PeerId to_silent = a.connect(silent), to_b = a.connect(b);
    Memory source(a, 5000), silent_target(silent, 5000), target(b, 5000);
    fill(source.data, 4);
    uint64_t wr_id = 0;
    for (; wr_id < 8; ++wr_id) {  // nobody polls `silent`, so these stay under way
      REQUIRE(a.post(make_write(wr_id, to_silent, source, 0, silent_target, 0, 5000)));
      REQUIRE(a.post(with_imm(make_write(100 + wr_id, to_b, source, 0, target, 0, 5000), 1)));
    }
    CHECK_FALSE(a.domain->idle());
    a.domain->disconnect(to_silent);
    CHECK(pump({&a, &b}, [&] { return a.done.size() == 16 && b.imms.size() == 8; }));
    for (uint64_t i = 0; i < 8; ++i)
      CHECK((a.code(i) == Code::kClosed || (provider.takes_unpolled && a.code(i) == Code::kOk)));
    for (uint64_t i = 0; i < 8; ++i) CHECK(a.code(100 + i) == Code::kOk);
    CHECK(holds(target.data, 4));
    CHECK(a.domain->idle());

    REQUIRE(a.post(make_imm(200, to_silent, 1)));  // a stale id
    CHECK(pump({&a}, [&] { return a.done.size() == 17; }));
    CHECK(a.code(200) == Code::kClosed);
    CHECK_THROWS_AS(a.domain->disconnect(to_silent), base::Error);
  });
}

TEST_CASE("provider contract: what comes from a peer that was disconnected harms nobody") {
  for_each_provider([](const ProviderUnderTest& provider) {
    for (const size_t bytes : {size_t{8}, size_t{3000}, size_t{40'000}}) {
      CAPTURE(bytes);
      Node a = open(provider), late = open(provider), b = open(provider);
      const PeerId to_late = a.connect(late), from_late = late.connect(a), to_b = a.connect(b);
      Memory source(a, bytes), other(a, bytes), at_late(late, bytes), target(b, bytes);
      post_all(a, {&a, &late}, make_imm(0, to_late, 1));
      post_all(late, {&a, &late}, make_imm(0, from_late, 1));
      CHECK(pump({&a, &late}, [&] { return a.done.size() == 1 && late.done.size() == 1; }));
      for (uint64_t i = 1; i < 5; ++i) {  // both ways, and neither end polls
        REQUIRE(a.post(with_imm(make_write(i, to_late, source, 0, at_late, 0, bytes), 1)));
        REQUIRE(late.post(with_imm(make_write(i, from_late, at_late, 0, source, 0, bytes), 1)));
      }
      a.domain->disconnect(to_late);
      settle({&late, &a});
      // Not from `source`: a NIC may read that until it is unregistered (docs/providers.md).
      fill(other.data, 4);
      post_all(a, {&a, &b}, with_imm(make_write(9, to_b, other, 0, target, 0, bytes), 1));
      CHECK(pump({&a, &b, &late}, [&] { return a.done.size() == 6 && b.imms.size() == 1; }));
      CHECK(a.code(9) == Code::kOk);
    }
  });
}

TEST_CASE("provider contract: a peer can be connected again, and several times at once") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), b = open(provider);
    Memory source(a, 3000), target(b, 3000);
    std::vector<PeerId> seen;
    PeerId second = a.connect(b);
    for (uint64_t turn = 0; turn < 20; ++turn) {
      const PeerId peer = a.connect(b);
      CHECK(std::ranges::count(seen, peer) == 0);
      seen.push_back(peer);
      fill(source.data, turn);
      post_all(a, {&a, &b}, with_imm(make_write(2 * turn, peer, source, 0, target, 0, 3000), 1));
      post_all(a, {&a, &b}, make_imm(2 * turn + 1, second, 2));
      CHECK(pump({&a, &b}, [&] {
        return a.done.size() == 2 * (turn + 1) && b.imms.size() == 2 * (turn + 1);
      }));
      CHECK(holds(target.data, turn));
      a.domain->disconnect(turn % 2 ? peer : std::exchange(second, peer));
    }
    CHECK(a.num_failed() == 0);
  });
}

TEST_CASE("provider contract: a node can write to itself") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider);
    Memory source(a, 9000), target(a, 9000);
    const PeerId peer = a.connect(a);
    fill(source.data, 5);
    post_all(a, {&a}, with_imm(make_write(0, peer, source, 0, target, 0, 9000), 1));
    CHECK(pump({&a}, [&] { return a.done.size() == 1 && a.imms.size() == 1; }));
    CHECK(holds(target.data, 5));
  });
}

TEST_CASE("provider contract: a peer that closes fails what it owes with kPeerDead") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider);
    auto b = std::make_unique<Node>(open(provider));
    const PeerId peer = a.connect(*b);
    for (uint64_t i = 0; i < 10; ++i) REQUIRE(a.post(make_imm(i, peer, 1)));
    b.reset();
    if (provider.notices_death) {
      CHECK(pump({&a}, [&] { return a.done.size() == 10; }));
      for (uint64_t i = 0; i < 10; ++i)
        CHECK(
            (a.code(i) == Code::kPeerDead || (provider.takes_unpolled && a.code(i) == Code::kOk)));
      post_all(a, {&a}, make_imm(10, peer, 1));
      CHECK(pump({&a}, [&] { return a.done.size() == 11; }));
      CHECK(a.code(10) == Code::kPeerDead);
    }
    a.domain->disconnect(peer);
    settle({&a}, 2);
    CHECK(a.domain->idle());
  });
}

TEST_CASE("provider contract: idle says whether anything is under way from here") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64);
    CHECK(pair.a.domain->idle());
    pair.post(make_imm(0, pair.peer, 1));
    CHECK_FALSE(pair.a.domain->idle());
    CHECK(pair.pump_until_done(1));
    CHECK(pair.a.domain->idle());
    CHECK(pair.pump_until_seen(1));
    CHECK(pair.b.domain->idle());
  });
}

TEST_CASE("provider contract: two nodes polled by two threads, writing both ways") {
  for_each_provider([](const ProviderUnderTest& provider) {
    constexpr uint32_t kNum = 400, kSlot = 1024;
    Node a = open(provider), b = open(provider);
    Memory from_a(a, kNum * kSlot), to_a(a, kNum * kSlot);
    Memory from_b(b, kNum * kSlot), to_b(b, kNum * kSlot);
    std::atomic<size_t> num_wrong{0};
    const auto run = [&](Node& node, Node& other, Memory& from, Memory& to, Memory& remote) {
      const PeerId peer = node.connect(other);  // a control call while the other thread polls
      node.on_imm = [&](uint32_t imm) {
        if (!holds(to.data.subspan(imm * kSlot, kSlot), imm)) num_wrong.fetch_add(1);
      };
      for (uint32_t i = 0; i < kNum; ++i) fill(from.data.subspan(i * kSlot, kSlot), i);
      uint32_t next = 0;
      Patience patience;
      bool moves = true;
      while (moves && (node.done.size() < kNum || node.imms.size() < kNum)) {
        if (next < kNum) {
          const size_t at = size_t{next} * kSlot;
          if (node.post(with_imm(make_write(next, peer, from, at, remote, at, kSlot), next)))
            ++next;
        }
        moves = patience.polled(node.poll());
      }
      // The other may still wait for our acknowledgements.
      while (moves && !node.domain->idle()) moves = patience.polled(node.poll());
    };
    std::atomic<int> num_finished{0};
    const auto keep_polling = [&](Node& node) {
      num_finished.fetch_add(1);
      Patience patience;
      while (num_finished.load() < 2) patience.polled(node.poll());
    };
    std::thread thread([&] {
      run(b, a, from_b, to_b, to_a);
      keep_polling(b);
    });
    run(a, b, from_a, to_a, to_b);
    keep_polling(a);
    thread.join();
    CHECK(num_wrong.load() == 0);
    CHECK(a.imms.size() == kNum);
    CHECK(b.imms.size() == kNum);
    CHECK(a.num_failed() + b.num_failed() == 0);
  });
}

TEST_CASE("provider contract: memory and peers come and go while another thread polls") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), b = open(provider);
    PollingThread thread_a(a), thread_b(b);
    for (int i = 0; i < 50; ++i) {
      const PeerId peer = a.connect(b);
      const Memory at_a(a, 100), at_b(b, 100);
      a.domain->disconnect(peer);
    }
    thread_a.stop();
    thread_b.stop();
    CHECK(a.done.empty());
  });
}

// --- order ---

// What both nodes were shown, poll by poll, in one number.
uint64_t event_hash(const ProviderUnderTest& provider, const std::string& settings,
                    size_t* num_inverted = nullptr) {
  ProviderUnderTest seeded = provider;
  seeded.settings = settings.c_str();
  Pair pair(seeded, 200 * 700);
  uint64_t hash = 14695981039346656037u;
  const auto add = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
  std::mt19937_64 random(11);
  uint32_t next = 0;
  for (uint64_t turn = 0; turn < 20'000; ++turn) {
    for (uint64_t n = random() % 4; n > 0 && next < 200; --n) {
      const size_t bytes = random() % 700;
      if (pair.a.post(with_imm(pair.write(next, next * 700, bytes), next))) ++next;
    }
    add(pair.a.poll());
    add(pair.b.poll());
    if (pair.a.done.size() == 200 && pair.b.imms.size() == 200) break;
  }
  CHECK(pair.b.imms.size() == 200);
  for (const uint32_t imm : pair.b.imms) add(imm);
  for (const uint64_t wr_id : pair.a.done) add(wr_id);
  if (num_inverted)
    *num_inverted = std::min(num_inversions(pair.b.imms), num_inversions(pair.a.done));
  return hash;
}

TEST_CASE("provider contract: an adversary reorders, and replays from its seed") {
  for_each_provider([](const ProviderUnderTest& provider) {
    if (!provider.reorders) return;
    std::vector<uint64_t> hashes;
    for (const char* seed : {"seed=101", "seed=102", "seed=103"}) {
      CAPTURE(seed);
      size_t num_inverted = 0;
      hashes.push_back(event_hash(provider, seed, &num_inverted));
      CHECK(num_inverted >= 40);  // of 199 pairs; about half are expected
      CHECK(event_hash(provider, seed) == hashes.back());
    }
    CHECK(hashes[0] != hashes[1]);
    CHECK(hashes[1] != hashes[2]);
  });
}

TEST_CASE("provider contract: an adversary shows an immediate while earlier payload is missing") {
  for_each_provider([](const ProviderUnderTest& provider) {
    if (!provider.reorders) return;
    constexpr uint32_t kNum = 60, kBytes = 2000;
    Pair pair(provider, kNum * kBytes);
    size_t num_missing = 0, num_halfway = 0;
    pair.b.on_imm = [&](uint32_t imm) {
      for (uint32_t earlier = 0; earlier < imm; ++earlier) {
        const auto slot = pair.target.data.subspan(earlier * kBytes, kBytes);
        if (holds(slot, earlier)) continue;
        ++num_missing;
        // Payload that began at its end: the first byte is not there, the last one is.
        if (slot.front() == std::byte{0} && slot.back() != std::byte{0}) ++num_halfway;
      }
    };
    for (uint32_t i = 0; i < kNum; ++i) {
      fill(pair.source.data.subspan(i * kBytes, kBytes), i);
      pair.post(with_imm(pair.write(i, i * kBytes, kBytes), i));
    }
    CHECK(pair.pump_until_seen(kNum));
    CHECK(num_missing > kNum);
    CHECK(num_halfway > 0);
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
