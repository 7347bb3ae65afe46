// Failures of the engine's users, peers and NICs: who notices, with which code, and who does not.
#include <numeric>
#include <thread>

#include "engine_pair.h"
#include "patience.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using base::Code;

bool mentions(const std::string& text, std::initializer_list<const char*> words) {
  return std::all_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

TEST_CASE("engine: what lies outside the registered memory is refused before anything is sent") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(1000)), target(engines[1], pattern(500));
  const auto* s = source.handle;
  const auto* t = engines.region(0, 1, target);
  const std::vector<int64_t> two = {0, 4}, negative = {0, -1}, five = {0, 5}, one = {0};
  const std::vector<Slice> bad_slice = {{0, t, 0, 10}, {990, t, 0, 11}};
  constexpr uint64_t kMax = UINT64_MAX;
  struct Case {
    Operation operation;
    std::initializer_list<const char*> words;
  };
  const Case cases[] = {
      {Write{s, 0, t, 0, 501, {}}, {"rank 0", "Write target", "501", "500"}},
      {Write{s, 900, t, 0, 101, {}}, {"Write source", "offset 900", "1000"}},
      {Write{s, 0, t, kMax, 2, {}}, {"Write target"}},
      {Write{s, 0, t, 2, kMax, {}}, {"Write source"}},
      {Write{nullptr, 0, t, 0, 1, {}}, {"Write has no source"}},
      {Write{s, 0, nullptr, 0, 1, {}}, {"Write has no target"}},
      {WritePages{s, t, 100, {two, 100, 0}, {five, 100, 0}, {}},
       {"WritePages target", "index 5", "position 1", "0 to 4"}},
      {WritePages{s, t, 100, {negative, 100, 0}, {two, 100, 0}, {}},
       {"WritePages source", "index -1", "position 1"}},
      {WritePages{s, t, 100, {two, 100, 0}, {two, 100, 1}, {}}, {"WritePages target", "index 4"}},
      {WritePages{s, t, 100, {two, 1u << 31, 0}, {two, kMax / 2, 0}, {}}, {"WritePages source"}},
      {WritePages{s, t, 501, {two, 0, 0}, {two, 0, 0}, {}}, {"WritePages target", "501"}},
      {WritePages{s, t, 100, {two, 100, 0}, {one, 100, 0}, {}}, {"2 source pages", "1 target"}},
      {WritePages{s, t, 100, {one, 0, 0, 100}, {one, 0, 0, 121}, {}, 20},
       {"WritePages target", "504 bytes", "500"}},
      {WritePages{s, t, 100, {one, 0, 0, kMax}, {one, 0, 0, 20}, {}, 20}, {"WritePages source"}},
      {WritePages{s, t, 100, {one, 0, 0}, {one, 0, 0}, {}, 30}, {"multiple", "100", "30"}},
      {WritePages{s, t, 100, {one, 0, 0, 20}, {one, 0, 0, 20}, 1, 20},
       {"immediate per page", "5 rows"}},
      {Scatter{s, bad_slice, Scatter::Sharding::kByPeer, {}}, {"slice 1", "source", "11"}},
      {Imm{nullptr, 1}, {"Imm has no peer"}},
  };
  for (const auto& [operation, words] : cases) {
    Request request(operation);
    try {
      engines[0].submit(request);
      FAIL_CHECK("no Error");
    } catch (const base::Error& error) {
      CAPTURE(error.what());
      CHECK(error.code() == Code::kInvalidArgument);
      CHECK(mentions(error.what(), words));
    }
  }
  for (int i = 0; i < 10; ++i) engines.turn();
  CHECK(network.nic(0).posted().empty());
  CHECK(network.nic(1).posted().empty());
}

TEST_CASE("engine: handles and regions of an engine with other NICs are refused") {
  FakeNetwork network;
  Engines engines(network, {2, 3});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100));
  Request foreign_source(Write{target.handle, 0, engines.region(0, 1, target), 0, 1, {}});
  CHECK_THROWS_AS(engines[0].submit(foreign_source), base::Error);
  Request foreign_target(Write{source.handle, 0, engines.region(1, 0, source), 0, 1, {}});
  CHECK_THROWS_AS(engines[0].submit(foreign_target), base::Error);
  CHECK_THROWS_AS(engines[0].unregister_memory(target.handle), base::Error);
  CHECK_THROWS_AS((void)engines[0].descriptor(target.handle), base::Error);
}

TEST_CASE("engine: a failed write fails its request with the first error and no other") {
  FakeNetwork network({.limits = {.max_write_bytes = 16, .max_in_flight = 4}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(4000)), target(engines[1], pattern(4000, 9));
  const auto* region = engines.region(0, 1, target);
  network.nic(1).fail_next(1, {Code::kTransport, 12});
  Request broken(Write{source.handle, 0, region, 0, 4000, 1});
  CHECK(engines.run(0, broken) == base::Status{Code::kTransport, 12});
  CHECK(network.nic(0).posted().size() + network.nic(1).posted().size() < 250);  // gave up early
  CHECK(engines[0].idle());
  Request good(Write{source.handle, 0, region, 0, 4000, 1});
  CHECK(engines.run(0, good).ok());
  CHECK(target.data == source.data);
}

TEST_CASE("engine: disconnecting fails what is on its way to that peer and nothing else") {
  FakeNetwork network({.limits = {.max_write_bytes = 100, .max_in_flight = 4}});
  Engines engines(network, {2, 2, 2});
  Buffer source(engines[0], pattern(5000));
  Buffer left(engines[1], pattern(5000, 9)), right(engines[2], pattern(5000, 9));
  const auto* to_left = engines.region(0, 1, left);
  const auto* to_right = engines.region(0, 2, right);
  for (const size_t nic : {0, 1}) network.nic(nic).hold(true);
  Request lost(Write{source.handle, 0, to_left, 0, 5000, 1});
  const std::vector<Slice> both = {{0, to_right, 0, 10}, {0, to_left, 0, 10}};
  Request half_lost(Scatter{source.handle, both, Scatter::Sharding::kByPeer, 1});
  Request kept(Write{source.handle, 0, to_right, 0, 5000, 1});
  for (Request* request : {&lost, &half_lost, &kept}) engines[0].submit(*request);
  for (int i = 0; i < 5; ++i) engines.turn();
  Request mailed(Imm{to_left->owner, 1});
  engines[0].submit(mailed);  // still in the mailbox when the peer goes
  engines[0].disconnect(to_left->owner);
  for (const size_t nic : {0, 1}) network.nic(nic).hold(false);
  for (Request* request : {&lost, &half_lost, &mailed}) {
    REQUIRE(engines.pump(*request));
    CHECK(request->status().code == Code::kClosed);
  }
  REQUIRE(engines.pump(kept));
  CHECK(kept.status().ok());
  CHECK(right.data == source.data);
  CHECK(network.nic(0).num_peers() == 1);
  CHECK_THROWS_AS(engines[0].disconnect(nullptr), base::Error);
}

TEST_CASE("engine: a peer that dies fails the writes to it, others go on, and it may come back") {
  FakeNetwork network;
  Engines engines(network, {2, 2, 2});
  Buffer source(engines[0], pattern(500)), right(engines[2], pattern(500, 9));
  std::vector<std::byte> gone(500);
  const auto* handle = engines[1].register_memory({gone.data(), gone.size()});
  const auto* to_gone = engines[0].resolve(engines[1].descriptor(handle));
  engines.destroy(1);
  Request lost(Write{source.handle, 0, to_gone, 0, 500, 1});
  CHECK(engines.run(0, lost).code == Code::kPeerDead);
  Request kept(Write{source.handle, 0, engines.region(0, 2, right), 0, 500, 1});
  CHECK(engines.run(0, kept).ok());
  engines[0].disconnect(to_gone->owner);
  Engines returned(network, {2});
  Buffer again(returned[0], pattern(500, 9));
  const auto* region = engines[0].resolve(returned[0].descriptor(again.handle));
  Request fresh(Write{source.handle, 0, region, 0, 500, 1});
  CHECK(engines.run(0, fresh).ok());
  CHECK(again.data == source.data);
}

TEST_CASE("engine: unregistering reaches every NIC and stops requests that still read the memory") {
  FakeNetwork network({.limits = {.max_write_bytes = 100, .max_in_flight = 2}});
  Engines engines(network, {3, 3});
  Buffer source(engines[0], pattern(5000)), other(engines[0], pattern(5000));
  Buffer target(engines[1], pattern(5000, 9));
  const auto* region = engines.region(0, 1, target);
  for (const size_t nic : {0, 1, 2}) network.nic(nic).hold(true);
  Request reading(Write{source.handle, 0, region, 0, 5000, 1});
  Request unrelated(Write{other.handle, 0, region, 0, 5000, 1});
  engines[0].submit(reading);
  engines[0].submit(unrelated);
  for (int i = 0; i < 5; ++i) engines.turn();
  engines[0].unregister_memory(source.handle);
  for (const size_t nic : {0, 1, 2}) {
    network.nic(nic).hold(false);
    CHECK(network.nic(nic).num_regions() == 1);
  }
  REQUIRE(engines.pump(reading));
  CHECK(reading.status().code == Code::kClosed);
  REQUIRE(engines.pump(unrelated));
  CHECK(unrelated.status().ok());
  engines[1].unregister_memory(target.handle);
  for (const size_t nic : {3, 4, 5}) CHECK(network.nic(nic).num_regions() == 0);
  Request late(Write{other.handle, 0, region, 0, 5000, 1});
  CHECK(engines.run(0, late).code == Code::kRemoteAccess);
}

TEST_CASE("engine: memory of a kind that the NIC cannot reach is a clear error") {
  FakeNetwork network;
  Engines engines(network, {2});
  std::byte data[64];
  try {
    engines[0].register_memory({data, 64, provider::MemoryKind::kCuda, 3});
    FAIL("no Error");
  } catch (const base::Error& error) {
    CHECK(error.code() == Code::kUnavailable);
    CHECK(mentions(error.what(), {"rank 0", "64 bytes", "CUDA", "device 3", "NIC 0"}));
  }
  CHECK_THROWS_AS(engines[0].register_memory({nullptr, 64}), base::Error);
  CHECK_THROWS_AS(engines[0].register_memory({data, 0}), base::Error);
}

TEST_CASE("engine: a step that fails at one NIC is undone at the NICs before it") {
  FakeNetwork network;
  Engines engines(network, {3, 1});
  std::byte data[64];
  network.nic(2).refuse_memory(true);
  CHECK_THROWS_AS(engines[0].register_memory({data, 64}), base::Error);
  for (const size_t nic : {0, 1, 2}) CHECK(network.nic(nic).num_regions() == 0);
  network.nic(2).refuse_connections(true);
  CHECK_THROWS_AS(engines[0].connect(engines[1].address()), base::Error);
  for (const size_t nic : {0, 1, 2}) CHECK(network.nic(nic).num_peers() == 0);
}

TEST_CASE("engine: destruction fails active and mailed requests and wakes their waiters") {
  FakeNetwork network({.limits = {.max_write_bytes = 10, .max_in_flight = 2}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(1000)), target(engines[1], pattern(1000, 9));
  const auto* region = engines.region(0, 1, target);
  network.nic(0).hold(true);
  Request active(Write{source.handle, 0, region, 0, 1000, 1});
  Request mailed(Imm{region->owner, 1});
  engines[0].submit(active);
  for (int i = 0; i < 5; ++i) engines.turn();
  engines[0].submit(mailed);
  std::thread waiter([&] {
    CHECK(active.wait(soon()));
    CHECK(mailed.wait(soon()));
  });
  engines.destroy(0);
  waiter.join();
  CHECK(active.status().code == Code::kClosed);
  CHECK(mailed.status().code == Code::kClosed);
}

}  // namespace
}  // namespace moe_p2p::test
