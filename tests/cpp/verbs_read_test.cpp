// Reads over the fake libibverbs: how many are under way at a time, and rights. What arrives:
// provider_contract_read_test.cpp.
#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

struct Depths {
  int sent, served;
};

// Two NICs whose devices allow different numbers of reads at a time.
struct DepthPair {
  DepthPair(Depths here, Depths there)
      : fake(FakeVerbs::install()),
        a(open(here, 0)),
        b(open(there, 1)),
        target(a, 64 * 500),
        source(b, 64 * 500),
        peer(a.connect(b)) {
    fill(source.data, 1);
  }
  ~DepthPair() { FakeVerbs::install(); }
  Node open(Depths depths, int nic) {
    fake.locked([&](FakeVerbs& f) {
      f.faults.max_reads_sent = depths.sent;
      f.faults.max_reads_served = depths.served;
    });
    Node node("verbs", "library=fake", nic);
    fake.locked([](FakeVerbs& f) { f.faults = {}; });
    return node;
  }
  bool read_all() {
    for (uint64_t i = 0; i < 64; ++i)
      post_all(a, {&a, &b}, make_read(i, peer, target, i * 500, source, i * 500, 500));
    return pump({&a, &b}, [&] { return a.done.size() == 64; });
  }
  FakeVerbs::Counters counters() {
    return fake.locked([](FakeVerbs& f) { return f.counters; });
  }

  FakeVerbs& fake;
  Node a, b;
  Memory target, source;
  PeerId peer;
};

TEST_CASE("verbs: reads beyond what both devices allow at a time wait, and all arrive") {
  const Depths cases[][2] = {{{16, 16}, {16, 16}}, {{16, 16}, {16, 2}}, {{1, 16}, {16, 16}}};
  for (const auto& [here, there] : cases) {
    CAPTURE(here.sent);
    CAPTURE(there.served);
    DepthPair pair(here, there);
    CHECK(pair.read_all());
    CHECK(pair.a.num_failed() == 0);  // a peer that is sent more than it serves refuses
    CHECK(holds(pair.target.data, 1));
    CHECK(pair.counters().reads == 64);
    CHECK(pair.counters().read_waits > 0);
    CHECK(pair.counters().inlined == 0);
  }
}

TEST_CASE("verbs: a device that serves no reads fails them by name, and writes go on") {
  DepthPair pair({16, 16}, {16, 0});
  CHECK(pair.read_all());
  CHECK(pair.a.num_failed() == 64);
  CHECK(pair.a.code(0) == Code::kInvalidArgument);
  CHECK(contains(pair.a.domain->failure(), "a read of 500 bytes from"));
  CHECK(all_zero(pair.target.data));
  fill(pair.target.data, 2);
  post_all(pair.a, {&pair.a, &pair.b},
           make_write(64, pair.peer, pair.target, 0, pair.source, 0, 64 * 500));
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.done.size() == 65; }));
  CHECK(pair.a.code(64) == Code::kOk);
  CHECK(holds(pair.source.data, 2));
}

}  // namespace
}  // namespace moe_p2p::provider_test
