// The data path of the verbs provider over a fake libibverbs: queues that are full, drivers that
// refuse, and completions that are not good.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

TEST_CASE("verbs: a batch to one peer is one doorbell and one signal, small writes travel inline") {
  FakePair pair;
  CHECK(pair.a.domain->post(pair.writes(64, 100)) == 64);
  CHECK(pair.counters().doorbells == 1);
  CHECK(pair.counters().inlined == 0);
  CHECK(pair.pump_until_done(64));
  CHECK(pair.a.domain->post(pair.writes(10, 64)) == 10);
  CHECK(pair.counters().inlined == 10);
  CHECK(pair.pump_until_done(74));
  CHECK(pair.a.num_failed() == 0);
  CHECK(pair.counters().overruns == 0);
}

TEST_CASE("verbs: GPU memory is never read for inlining") {
  FakePair pair("", MemoryKind::kCuda);
  CHECK(pair.a.domain->post(pair.writes(10, 64)) == 10);
  CHECK(pair.counters().inlined == 0);
  CHECK(pair.pump_until_done(10));
}

TEST_CASE("verbs: immediates beyond the receives wait, none is lost") {
  FakePair pair("receives=7,max_in_flight=500");
  CHECK(pair.a.domain->post(pair.writes(200, 8)) == 200);
  for (int i = 0; i < 50; ++i) pair.a.poll();  // nobody polls at the target
  CHECK(pair.counters().receiver_waits > 0);
  CHECK(pair.pump_until_done(200));
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.imms.size() == 200; }));
  CHECK(sorted(pair.b.imms) == all_but(200, 200));
  CHECK(pair.counters().overruns == 0);
}

TEST_CASE("verbs: a queue that is full half way takes the rest later") {
  for (const int error : {EAGAIN, ENOMEM}) {
    CAPTURE(error);
    FakePair pair;
    pair.set({.post_error = error, .num_post_errors = 5, .posts_taken = 3});
    CHECK(pair.a.domain->post(pair.writes(40, 100)) == 40);
    CHECK(pair.pump_until_done(40));
    CHECK(pair.a.num_failed() == 0);
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.imms.size() == 40; }));
    CHECK(sorted(pair.b.imms) == all_but(40, 40));
  }
}

TEST_CASE("verbs: a driver that refuses to post fails that peer, says why, and no other") {
  FakePair pair;
  const PeerId other = pair.a.connect(pair.b);
  pair.set({.post_error = EIO, .num_post_errors = 1, .posts_taken = 2});
  CHECK(pair.a.domain->post(pair.writes(10, 100)) == 10);
  CHECK(pair.pump_until_done(10));
  for (uint64_t i = 2; i < 10; ++i) CHECK(pair.a.code(i) == Code::kTransport);
  CHECK(pair.a.domain->failure().find("Input/output error") != std::string::npos);
  post_all(pair.a, {&pair.a, &pair.b}, make_imm(20, pair.peer, 1));
  post_all(pair.a, {&pair.a, &pair.b}, make_imm(21, other, 1000));
  CHECK(pair.pump_until_done(12));
  CHECK(pair.a.code(20) == Code::kTransport);
  CHECK(pair.a.code(21) == Code::kOk);
  pair.a.domain->disconnect(pair.peer);
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.counters().queue_pairs == 2; }));
}

TEST_CASE("verbs: a refused write fails alone, those behind it arrive once over a new connection") {
  for (const int status : {provider::verbs::kWcRemoteAccess, provider::verbs::kWcLocalProtection}) {
    FakePair pair;
    auto writes = pair.writes(60, 1000);
    (status == provider::verbs::kWcRemoteAccess ? writes[25].remote_key : writes[25].local_key) ^=
        1;
    CHECK(pair.a.domain->post(writes) == 60);
    CHECK(pair.pump_until_done(60));
    CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.imms.size() == 59; }));
    settle({&pair.a, &pair.b}, 200);
    CHECK(pair.b.imms == all_but(60, 25));
    CHECK(pair.a.num_failed() == 1);
    CHECK(pair.a.status().at(25).detail == status);
    const std::string reported = pair.a.domain->failure();
    CHECK(reported.find("fake0 port 1: a write of 1000 bytes to fake1 of ") != std::string::npos);
  }
}

TEST_CASE("verbs: a peer that does not answer fails what it owes, with a likely cause") {
  const struct {
    int status;
    Code code;
    const char* cause;
  } cases[] = {{provider::verbs::kWcRetriesExceeded, Code::kPeerDead, "no acknowledgement"},
               {provider::verbs::kWcRnrRetriesExceeded, Code::kPeerDead, "no receive posted"},
               {provider::verbs::kWcRemoteOperation, Code::kTransport, "kernel log"}};
  for (const auto& c : cases) {
    FakePair pair;
    const PeerId other = pair.a.connect(pair.b);
    pair.set({.next_status = c.status});
    CHECK(pair.a.domain->post(pair.writes(30, 1000)) == 30);
    CHECK(pair.pump_until_done(30));
    for (uint64_t i = 0; i < 30; ++i) CHECK(pair.a.code(i) == c.code);
    CHECK(pair.a.domain->failure().find(c.cause) != std::string::npos);
    post_all(pair.a, {&pair.a, &pair.b}, make_imm(40, pair.peer, 1));
    post_all(pair.a, {&pair.a, &pair.b}, make_imm(41, other, 2));
    CHECK(pair.pump_until_done(32));
    CHECK(pair.a.code(40) == c.code);
    CHECK(pair.a.code(41) == Code::kOk);
  }
}

TEST_CASE("verbs: a repair that is not answered ends the peer at its deadline") {
  FakePair pair("handshake_ms=300");
  auto writes = pair.writes(10, 1000);
  writes[0].remote_key ^= 1;
  pair.fake.locked([](FakeVerbs& f) { f.faults.queue_error = ENOMEM; });
  CHECK(pair.a.domain->post(writes) == 10);
  CHECK(pair.pump_until_done(10));
  CHECK(pair.a.code(0) == Code::kRemoteAccess);
  for (uint64_t i = 1; i < 10; ++i) CHECK(pair.a.code(i) == Code::kTransport);
}

TEST_CASE("verbs: a peer whose process ended is named, one that was disconnected is not") {
  FakeVerbs::install();
  Node a("verbs", "library=fake");
  auto b = std::make_unique<Node>("verbs", "library=fake,devices=fake1");
  const PeerId left = a.connect(*b), lost = a.connect(*b);
  a.domain->disconnect(left);
  CHECK(a.domain->failure() == "");
  b.reset();
  REQUIRE(a.post(make_imm(1, lost, 1)));
  CHECK(pump({&a}, [&] { return a.done.size() == 1; }));
  CHECK(a.code(1) == Code::kPeerDead);
  CHECK(pump({&a}, [&] { return !a.domain->failure().empty(); }));
  CHECK(a.domain->failure().find("fake1 of ") != std::string::npos);
}

TEST_CASE("verbs: a device that dies fails what is under way") {
  FakePair pair("receives=1");
  CHECK(pair.a.domain->post(pair.writes(30, 8)) == 30);  // most wait for receives
  for (int i = 0; i < 20; ++i) pair.a.poll();
  pair.fake.raise("fake0", provider::verbs::kEventPortError);
  pair.fake.raise("fake0", provider::verbs::kEventDeviceFatal);
  CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 30; }));
  CHECK(pair.a.code(29) == Code::kTransport);
}

// What stderr shows, for the time of a scope.
class Stderr {
 public:
  Stderr() { dup2(file_, STDERR_FILENO); }
  ~Stderr() {
    dup2(before_, STDERR_FILENO);
    close(before_);
    close(file_);
  }
  bool shows(const char* text) const {
    std::string all(1 << 16, ' ');
    all.resize(static_cast<size_t>(std::max<ssize_t>(pread(file_, all.data(), all.size(), 0), 0)));
    return all.find(text) != all.npos;
  }

 private:
  const int before_ = dup(STDERR_FILENO), file_ = memfd_create("stderr", 0);
};

TEST_CASE("verbs: a queue of the NIC that failed ends all its peers, on both sides, by name") {
  for (const auto& [event, name] :
       {std::pair(provider::verbs::kEventCqError, "completion queue (IBV_EVENT_CQ_ERR)"),
        std::pair(provider::verbs::kEventSrqError, "receive queue (IBV_EVENT_SRQ_ERR)"),
        std::pair(provider::verbs::kEventDeviceFatal, "fatal error")}) {
    CAPTURE(name);
    FakePair pair("receives=1");
    CHECK(pair.a.domain->post(pair.writes(30, 8)) == 30);  // most wait for receives
    for (int i = 0; i < 20; ++i) pair.a.poll();
    pair.fake.raise("fake1", event);  // the target's, which has no peers that it writes to
    CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 30; }));
    CHECK(pair.a.code(29) == Code::kPeerDead);
    CHECK(contains(pair.b.domain->failure(), name));
    CHECK(contains(text_of_error([&] { pair.b.connect(pair.a); }), name));
    pair.fake.raise("fake0", event);
    CHECK(pump({&pair.a}, [&] { return contains(pair.a.domain->failure(), name); }));
    CHECK(contains(pair.a.domain->failure(), "fake0 port 1: the own device"));
  }
}

TEST_CASE("verbs: a queue pair that reports an error is named by its connection") {
  FakePair pair;
  const Stderr log;
  pair.fake.raise("fake0", provider::verbs::kEventQpFatal);
  CHECK(pump({&pair.a}, [&] { return log.shows("failed (IBV_EVENT_QP_FATAL)"); }));
  CHECK(log.shows("fake0 port 1: a connection to fake1 of "));
  pair.fake.raise("fake1", provider::verbs::kEventQpAccessError);
  CHECK(pump({&pair.a}, [&] { return log.shows("may not use (IBV_EVENT_QP_ACCESS_ERR)"); }));
  CHECK(log.shows("fake1 port 1: a connection from "));
  pair.fake.raise("fake1", provider::verbs::kEventQpRequestError);
  CHECK(pump({&pair.a}, [&] { return log.shows("(IBV_EVENT_QP_REQ_ERR)"); }));
}

TEST_CASE("verbs: an address that changes under a NIC is named, one that stays is not") {
  FakePair pair;
  const Stderr log;
  pair.fake.raise("fake1", provider::verbs::kEventGidChange);
  pair.fake.raise("fake1", provider::verbs::kEventPortActive);  // read behind it
  CHECK(pump({&pair.a}, [&] { return log.shows("fake1 port 1: the link is up again"); }));
  CHECK_FALSE(log.shows("its GID"));
  pair.fake.locked([](FakeVerbs& f) { f.faults.gid_moved = true; });
  pair.fake.raise("fake0", provider::verbs::kEventGidChange);
  CHECK(pump({&pair.a}, [&] {
    return log.shows("fake0 port 1: its GID 2 changed from 127.0.0.1 to 10.0.0.1");
  }));
  pair.fake.locked([](FakeVerbs& f) { f.faults.gid_moved = false; });
}

TEST_CASE("verbs: a poller that sleeps is woken by what arrives") {
  FakeVerbs::install();
  platform::EventCount waker{};
  DomainOptions options;
  options.settings = "library=fake";
  options.waker = &waker;
  const auto sleeper = provider::open_domain("verbs", options);
  Node a("verbs", "library=fake");
  const PeerId peer = a.domain->connect(sleeper->address());
  Completion completions[4];
  for (uint32_t round = 0; round < 20; ++round) {
    CHECK(pump({&a}, [&] { return sleeper->poll(completions) == 0 && sleeper->idle(); }));
    REQUIRE(a.post(make_imm(round, peer, round)));
    // The poster's NIC carries it out; only the event may tell the sleeper.
    const auto deadline = soon();
    const uint32_t seen = waker.sequence.load();
    std::thread poster([&] { CHECK(pump({&a}, [&] { return a.done.size() == round + 1; })); });
    const bool woken = platform::wait_until(waker, {.mode = platform::WaitMode::kSleep}, deadline,
                                            [&] { return waker.sequence.load() != seen; });
    poster.join();
    CHECK(woken);
    REQUIRE(sleeper->poll(completions) == 1);
    CHECK(completions[0].imm == round);
  }
}

}  // namespace
}  // namespace moe_p2p::provider_test
