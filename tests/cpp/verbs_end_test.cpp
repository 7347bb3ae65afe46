// How queue pairs of the verbs provider end, over a libibverbs as strict as mlx5: nothing that a
// peer was told has arrived is lost, nothing that the NIC held is leaked, and every end comes in
// time.
#include <cerrno>

#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

// The target's control thread has seen that the connection ended: its queue pair is broken, or,
// against the rule, gone.
bool target_has_noticed(FakePair& pair, const FakeVerbs::Counters& before) {
  return pump({&pair.a}, [&] {
    const auto now = pair.counters();
    return now.broken >= before.broken + 2 || now.queue_pairs < before.queue_pairs - 1;
  });
}

TEST_CASE("verbs: what a peer was told has arrived is shown after it has disconnected") {
  for (const bool reports : {true, false}) {
    FakePair pair;
    FakeVerbs::Faults faults;
    faults.no_last_receive = !reports;
    pair.set(faults);
    CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
    CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 10; }));
    CHECK(pair.a.num_failed() == 0);
    const auto before = pair.counters();
    pair.a.domain->disconnect(pair.peer);
    CHECK(target_has_noticed(pair, before));
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.counters().queue_pairs == 0; }));
    CHECK(sorted(pair.b.imms) == all_but(10, 10));
  }
}

TEST_CASE("verbs: what a peer was told has arrived is shown after its connection was made anew") {
  FakePair pair;
  auto writes = pair.writes(20, 100);
  writes[12].remote_key ^= 1;
  CHECK(pair.a.domain->post(writes) == 20);
  CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 20; }));  // `b` is not polled meanwhile
  CHECK(pump({&pair.b}, [&] { return pair.b.imms.size() == 19; }));
  CHECK(sorted(pair.b.imms) == all_but(20, 12));
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.counters().queue_pairs == 2; }));
}

TEST_CASE("verbs: receives are neither lost nor added by connections that come and go") {
  FakePair pair("receives=16");
  for (int round = 0; round < 20; ++round) {
    const auto before = pair.counters();
    auto writes = pair.writes(6, 100);
    if (round % 2) writes[4].remote_key ^= 1;
    CHECK(pair.a.domain->post(writes) == 6);
    const size_t done = pair.a.done.size() + 6;
    REQUIRE(pump({&pair.a}, [&] { return pair.a.done.size() == done; }));
    pair.a.domain->disconnect(pair.peer);
    CHECK(target_has_noticed(pair, before));
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.counters().queue_pairs == 0; }));
    pair.peer = pair.a.connect(pair.b);
  }
  // All sixteen are there.
  const uint64_t waits = pair.counters().receiver_waits;
  pair.a.done.clear();
  CHECK(pair.a.domain->post(pair.writes(16, 8)) == 16);
  CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 16; }));
  CHECK(pair.counters().receiver_waits == waits);
  CHECK(pump({&pair.b}, [&] { return pair.b.imms.size() == 10 * 6 + 10 * 5 + 16; }));
}

TEST_CASE("verbs: the room of a chain that was posted half comes back") {
  FakePair pair("max_in_flight=10");
  FakeVerbs::Faults faults;
  faults.post_error = EIO, faults.num_post_errors = 1, faults.posts_taken = 7;
  for (size_t turn = 1; turn <= 5; ++turn) {
    pair.set(faults);
    CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
    CHECK(pair.pump_until_done(10 * turn));
    pair.a.domain->disconnect(pair.peer);
    pair.peer = pair.a.connect(pair.b);
  }
  CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
  CHECK(pair.pump_until_done(60));
  for (uint64_t i = 0; i < 10; ++i) CHECK(pair.a.code(i) == Code::kOk);
}

TEST_CASE("verbs: a driver that flushes only what was signalled ends a lane all the same") {
  FakePair pair;
  FakeVerbs::Faults faults;
  faults.signaled_errors_only = true;
  pair.set(faults);
  auto writes = pair.writes(60, 1000);
  writes[25].remote_key ^= 1;
  pair.a.domain->post(std::span(writes).first(26));
  pair.a.domain->post(std::span(writes).subspan(26));
  CHECK(pair.pump_until_done(60));
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.imms.size() == 59; }));
  CHECK(sorted(pair.b.imms) == all_but(60, 25));
  CHECK(pair.a.num_failed() == 1);
}

TEST_CASE("verbs: a lane whose completions do not come ends at its deadline") {
  FakePair pair("receives=1,max_in_flight=20");
  const PeerId other = pair.a.connect(pair.b);
  FakeVerbs::Faults faults;
  faults.no_errors = true;
  pair.set(faults);
  CHECK(pair.a.domain->post(pair.writes(15, 8)) == 15);  // most wait for receives
  CHECK(pump({&pair.a}, [&] { return pair.counters().receiver_waits > 0; }));
  pair.a.domain->disconnect(pair.peer);
  CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 15; }));
  CHECK(pair.a.code(14) == Code::kClosed);
  pair.a.done.clear();
  auto writes = pair.writes(20, 8);
  for (auto& write : writes) write.peer = other;
  CHECK(pair.a.domain->post(writes) == 20);
  CHECK(pair.pump_until_done(20));
  for (uint64_t i = 0; i < 20; ++i) CHECK(pair.a.code(i) == Code::kOk);
}

TEST_CASE("verbs: a NIC that takes no more receives says so and lets its peers know") {
  FakePair pair("receives=8");
  FakeVerbs::Faults faults;
  faults.receive_error = EIO;
  pair.set(faults);
  const PeerId back = pair.b.connect(pair.a);
  CHECK(pair.a.domain->post(pair.writes(30, 8)) == 30);
  CHECK(pair.pump_until_done(30));
  CHECK(pair.a.code(29) == Code::kPeerDead);
  CHECK(pair.b.domain->failure().find("takes no more receives") != std::string::npos);
  CHECK(pair.b.domain->failure().find("Input/output error") != std::string::npos);
  post_all(pair.b, {&pair.a, &pair.b}, make_imm(1, back, 1));
  CHECK(pump({&pair.b}, [&] { return pair.b.done.size() == 1; }));
  CHECK(pair.b.code(1) == Code::kTransport);
}

TEST_CASE("verbs: a NIC without queue pairs refuses by name, and has them again") {
  FakePair pair;
  FakeVerbs::Faults faults;
  faults.max_queue_pairs = 3;
  pair.set(faults);
  try {
    static_cast<void>(pair.a.connect(pair.b));
    FAIL("connected");
  } catch (const base::Error& error) {
    const std::string text = error.what();
    CHECK(text.find("fake0 port 1: fake1 of ") != std::string::npos);
    CHECK(text.find("fake1 port 1: making a queue pair") != std::string::npos);
  }
  CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
  CHECK(pair.pump_until_done(10));
  CHECK(pair.a.num_failed() == 0);
  pair.a.domain->disconnect(pair.peer);
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.counters().queue_pairs == 0; }));
  pair.peer = pair.a.connect(pair.b);
  CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
  CHECK(pair.pump_until_done(20));
  CHECK(pair.a.num_failed() == 0);
}

}  // namespace
}  // namespace moe_p2p::provider_test
