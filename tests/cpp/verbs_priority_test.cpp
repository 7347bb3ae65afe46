// Classes of traffic over a fake libibverbs: which class a connection is in, and that what breaks
// the connections of one does not touch the others.
#include "provider/verbs/config.h"
#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

TEST_CASE("verbs: each priority's connections are in its class, at both ends") {
  FakePair pair("traffic_class=104:64:32,service_level=3:2:1");
  pair.fake.locked([](FakeVerbs& f) { f.paths.clear(); });
  for (const int priority : {2, 1, 0}) {
    const PeerId peer = pair.a.domain->connect_for(pair.b.domain->address(), priority, 0);
    const auto paths = pair.fake.locked([](FakeVerbs& f) { return std::exchange(f.paths, {}); });
    const std::pair<int, int> expected{
        3 - priority, 104 - 40 * (priority > 0 ? 1 : 0) - 32 * (priority > 1 ? 1 : 0)};
    CHECK(paths == std::vector(2, expected));
    pair.a.post(
        make_write(static_cast<uint64_t>(priority), peer, pair.source, 0, pair.target, 0, 99));
  }
  CHECK(pair.pump_until_done(3));
  CHECK(pair.a.num_failed() == 0);
}

TEST_CASE("verbs: one class for all, or one each, and nothing else") {
  using provider::verbs::parse_config;
  const auto config = parse_config("traffic_class=7,service_level=1:2:15");
  CHECK(config.traffic_class == std::array<uint8_t, 3>{7, 7, 7});
  CHECK(config.service_level == std::array<uint8_t, 3>{1, 2, 15});
  CHECK(parse_config("").traffic_class == std::array<uint8_t, 3>{});
  CHECK_THROWS_WITH_AS(parse_config("traffic_class=1:2"), doctest::Contains("has 2 values"),
                       base::Error);
  CHECK_THROWS_WITH_AS(parse_config("service_level=0:16:0"), doctest::Contains("=16 is refused"),
                       base::Error);
}

TEST_CASE("verbs: a fence in one priority's traffic breaks no connection of another") {
  FakePair pair;
  const PeerId kv = pair.a.domain->connect_for(pair.b.domain->address(), 1, 0);
  auto grant = std::make_unique<Memory>(pair.b, pair.target.data);
  const WorkRequest late = make_write(1000, kv, pair.source, 0, *grant, 0, 500);
  const WorkRequest other = make_write(1001, kv, pair.source, 0, pair.target, 90'000, 500);
  const uint64_t made = pair.counters().queue_pairs_made;
  CHECK(made == 4);
  const auto moe = pair.writes(60, 1000);
  CHECK(pair.a.domain->post(std::span(moe).first(30)) == 30);
  grant->unregister();
  CHECK(pair.a.post(late));
  CHECK(pair.a.domain->post(std::span(moe).subspan(30)) == 30);
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.a.code(1000) != Code::kTimeout; }));
  CHECK(pair.a.code(1000) == Code::kRemoteAccess);
  CHECK(pair.a.post(other));  // over a new queue pair
  CHECK(pair.pump_until_done(62));
  CHECK(pump({&pair.a, &pair.b}, [&] { return pair.b.imms.size() == 60; }));
  CHECK(pair.a.num_failed() == 1);
  CHECK(pair.counters().queue_pairs_made == made + 2);
  // In order, once each: the connection of these was never made anew.
  std::vector<uint32_t> in_order(60);
  for (uint32_t i = 0; i < 60; ++i) in_order[i] = i;
  CHECK(pair.b.imms == in_order);
}

}  // namespace
}  // namespace moe_p2p::provider_test
