// What the engine delivers, over a network that reorders: bytes, immediates, limits, control calls.
// Polled by the test's own thread; see engine_thread_test.cpp for threads and
// engine_failure_test.cpp for what goes wrong.
#include <numeric>
#include <set>

#include "engine_pair.h"

namespace moe_p2p::test {
namespace {

using namespace engine;

TEST_CASE("engine: writes of every size arrive exactly, with one immediate per NIC") {
  for (const int num_nics : {1, 2, 4}) {
    FakeNetwork network({.seed = 3});
    Engines engines(network, {num_nics, num_nics});
    Buffer source(engines[0], pattern(600));
    Buffer target(engines[1], pattern(700, 9));
    const auto* region = engines.region(0, 1, target);
    const auto untouched = pattern(700, 9);
    uint64_t sent = 0;
    for (uint64_t bytes = 0; bytes <= 520; ++bytes) {
      std::ranges::copy(untouched, target.data.begin());
      auto expected = untouched;
      std::copy_n(source.data.begin() + 11, bytes, expected.begin() + 23);
      Request request(Write{source.handle, 11, region, 23, bytes, 5});
      REQUIRE(engines.run(0, request).ok());
      REQUIRE(target.data == expected);
      REQUIRE(engines.count(1, 5) == (sent += static_cast<uint64_t>(num_nics)));
    }
  }
}

TEST_CASE("engine: a write without an immediate delivers bytes and no immediate") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(1000)), target(engines[1], pattern(1000, 9));
  Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 1000, {}});
  REQUIRE(engines.run(0, request).ok());
  CHECK(target.data == source.data);
  CHECK(engines[1].counters()[0].immediates_received == 0);
  CHECK(engines[1].counters()[1].immediates_received == 0);
}

TEST_CASE("engine: an immediate is never seen before all of its own shard") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    FakeNetwork network({.seed = seed, .limits = {.max_write_bytes = 64, .max_in_flight = 6}});
    Engines engines(network, {2, 2});
    Buffer source(engines[0], pattern(2000));
    Buffer target(engines[1], std::vector<std::byte>(2000, std::byte{0xff}));  // not in the pattern
    Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 2000, 8});
    engines[0].submit(request);
    const auto complete_shards = [&] {
      uint64_t complete = 0;
      for (const auto& [begin, end] : {std::pair{0, 1024}, std::pair{1024, 2000}})
        complete += std::equal(source.data.begin() + begin, source.data.begin() + end,
                               target.data.begin() + begin);
      return complete;
    };
    REQUIRE(engines.pump([&] {
      REQUIRE(engines.count(1, 8) <= complete_shards());
      return request.done();
    }));
    REQUIRE(engines.pump([&] { return engines.count(1, 8) == 2; }));
    CHECK(target.data == source.data);
  }
}

TEST_CASE("engine: pages go from their source index to their target index, one immediate each") {
  FakeNetwork network({.seed = 5, .limits = {.max_write_bytes = 40, .max_in_flight = 7}});
  for (const int num_nics : {1, 2, 3}) {
    Engines engines(network, {num_nics, 2});
    Buffer source(engines[0], pattern(64 * 100));
    Buffer target(engines[1], pattern(64 * 150, 9));
    const auto untouched = pattern(64 * 150, 9);
    const auto from = indices(3, 1), to = indices(20, 2);
    for (const uint64_t page_bytes : {1, 39, 40, 41, 60}) {
      std::ranges::copy(untouched, target.data.begin());
      auto expected = untouched;
      for (size_t i = 0; i < from.size(); ++i)
        std::copy_n(source.data.begin() + 4 + from[i] * 64, page_bytes,
                    expected.begin() + 7 + to[i] * 80);
      const uint64_t before = engines.count(1, 6);
      Request request(WritePages{
          source.handle, engines.region(0, 1, target), page_bytes, {from, 64, 4}, {to, 80, 7}, 6});
      REQUIRE(engines.run(0, request).ok());
      CHECK(target.data == expected);
      CHECK(engines.count(1, 6) - before == 90);
    }
  }
}

TEST_CASE("engine: a scatter gives each peer its slice and the promised immediates") {
  for (const auto sharding : {Scatter::Sharding::kByPeer, Scatter::Sharding::kByBytes}) {
    FakeNetwork network({.seed = 6, .limits = {.max_write_bytes = 100, .max_in_flight = 5}});
    Engines engines(network, {2, 1, 2, 4});
    Buffer source(engines[0], pattern(5000));
    std::vector<std::unique_ptr<Buffer>> targets;
    std::vector<Slice> slices;
    const std::array<uint64_t, 3> sizes = {0, 777, 1301};
    for (size_t i = 0; i < 3; ++i) {
      targets.push_back(std::make_unique<Buffer>(engines[i + 1], std::vector<std::byte>(2000)));
      slices.push_back({i * 1500, engines.region(0, i + 1, *targets[i]), i * 10, sizes[i]});
    }
    Request request(Scatter{source.handle, slices, sharding, 4});
    REQUIRE(engines.run(0, request).ok());
    for (size_t i = 0; i < 3; ++i) {
      std::vector<std::byte> expected(2000);
      std::copy_n(source.data.begin() + static_cast<int>(i * 1500), sizes[i],
                  expected.begin() + static_cast<int>(i * 10));
      CHECK(targets[i]->data == expected);
      CHECK(engines.count(i + 1, 4) == (sharding == Scatter::Sharding::kByPeer ? 1 : 2));
    }
  }
}

TEST_CASE(
    "engine: peers may have other NIC counts; every write uses the keys of the NIC it goes to") {
  for (const auto& [local, remote] : {std::pair{1, 4}, std::pair{4, 1}, std::pair{3, 2}}) {
    CAPTURE(local);
    CAPTURE(remote);
    FakeNetwork network;
    Engines engines(network, {local, remote});
    Buffer source(engines[0], pattern(4000)), target(engines[1], pattern(4000, 9));
    Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 4000, 3});
    REQUIRE(engines.run(0, request).ok());  // the network refuses the keys of another NIC
    CHECK(target.data == source.data);
    CHECK(engines.count(1, 3) == static_cast<uint64_t>(local));
    for (size_t nic = 0; nic < static_cast<size_t>(local); ++nic)
      for (const auto& posted : network.nic(nic).posted())
        CHECK(posted.to == static_cast<size_t>(local) + nic % static_cast<size_t>(remote));
  }
}

TEST_CASE("engine: a write of more than 4 GiB at an offset above 4 GiB covers each byte once") {
  FakeNetwork network({.limits = {.max_write_bytes = 1u << 30, .max_in_flight = 4}, .copy = false});
  Engines engines(network, {2, 2});
  const uint64_t all = uint64_t{1} << 40;
  const auto* source = engines[0].register_memory({reinterpret_cast<std::byte*>(1u << 20), all});
  const auto* target = engines[1].register_memory({reinterpret_cast<std::byte*>(1u << 21), all});
  const uint64_t bytes = (uint64_t{9} << 30) + 12345;
  const uint64_t offset = (uint64_t{7} << 32) + 77;
  const auto* region = engines[0].resolve(engines[1].descriptor(target));
  Request request(Write{source, offset, region, offset + 1, bytes, 2});
  REQUIRE(engines.run(0, request).ok());
  std::map<uint64_t, uint64_t> pieces;  // target address -> bytes
  for (const size_t nic : {0, 1}) {
    for (const auto& [work, to] : network.nic(nic).posted()) {
      pieces[work.remote_addr] = work.bytes;
      CHECK(work.remote_addr - (1u << 21) - offset - 1 ==
            reinterpret_cast<uint64_t>(work.local) - (1u << 20) - offset);
    }
  }
  uint64_t next = (1u << 21) + offset + 1;
  for (const auto& [address, piece_bytes] : pieces) {
    CHECK(address == next);
    next += piece_bytes;
  }
  CHECK(next == (1u << 21) + offset + 1 + bytes);
  CHECK(engines.count(1, 2) == 2);
  CHECK(engines[0].counters()[0].bytes_written + engines[0].counters()[1].bytes_written == bytes);
}

TEST_CASE("engine: no more than max_in_flight writes are out, and short posts lose nothing") {
  FakeNetwork network(
      {.seed = 8, .limits = {.max_write_bytes = 50, .max_in_flight = 3}, .short_posts = true});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(9000)), target(engines[1], pattern(9000, 9));
  const auto* region = engines.region(0, 1, target);
  std::vector<std::unique_ptr<Request>> requests;
  for (uint64_t i = 0; i < 30; ++i) {
    requests.push_back(
        std::make_unique<Request>(Write{source.handle, i * 300, region, i * 300, 300, 1}));
    engines[0].submit(*requests.back());
  }
  for (const auto& request : requests) {
    REQUIRE(engines.pump(*request));
    CHECK(request->status().ok());
  }
  REQUIRE(engines.pump([&] { return engines.count(1, 1) == 60; }));
  CHECK(target.data == source.data);
  for (const size_t nic : {0, 1}) CHECK(network.nic(nic).max_in_flight() == 3);
  CHECK(engines[0].idle());
}

TEST_CASE("engine: a full NIC holds up no request for another NIC") {
  FakeNetwork network({.limits = {.max_in_flight = 4}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(1 << 16)), target(engines[1], pattern(1 << 16, 9));
  const auto* region = engines.region(0, 1, target);
  network.nic(0).refuse(true);
  std::vector<int64_t> pages(500);
  std::iota(pages.begin(), pages.end(), 0);
  Request large(WritePages{source.handle, region, 100, {pages, 100, 0}, {pages, 100, 0}, 1});
  engines[0].submit(large);
  // By peer: the empty first slice belongs to NIC 0 and is not sent, the second to NIC 1.
  const std::vector<Slice> slices = {{0, region, 0, 0}, {60'000, region, 60'000, 100}};
  Request small(Scatter{source.handle, slices, Scatter::Sharding::kByPeer, {}});
  engines[0].submit(small);
  REQUIRE(engines.pump(small));
  CHECK(small.status().ok());
  CHECK_FALSE(large.done());
  network.nic(0).refuse(false);
  REQUIRE(engines.pump(large));
  CHECK(large.status().ok());
}

TEST_CASE("engine: a small request does not wait for a large one before it") {
  FakeNetwork network({.limits = {.max_in_flight = 64}});
  Engines engines(network, {1, 1});
  Buffer source(engines[0], pattern(1 << 16)), target(engines[1], pattern(1 << 16, 9));
  const auto* region = engines.region(0, 1, target);
  std::vector<int64_t> pages(10'000);
  std::iota(pages.begin(), pages.end(), 0);
  Request large(WritePages{source.handle, region, 6, {pages, 6, 0}, {pages, 6, 0}, 1});
  engines[0].submit(large);
  engines.turn();
  Request small(Imm{engines[0].connect(engines[1].address()), 2});
  engines[0].submit(small);
  REQUIRE(engines.pump(small));
  CHECK_FALSE(large.done());
  CHECK(network.nic(0).posted().size() < 1000);  // of 10,000
  REQUIRE(engines.pump(large));
}

TEST_CASE("engine: requests with nothing to send are done at once") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(10)), target(engines[1], pattern(10));
  const auto* region = engines.region(0, 1, target);
  Request write(Write{source.handle, 0, region, 0, 0, {}});
  Request pages(WritePages{source.handle, region, 1, {}, {}, 1});
  Request scatter(Scatter{source.handle, {}, Scatter::Sharding::kByBytes, 1});
  for (Request* request : {&write, &pages, &scatter}) {
    engines[0].submit(*request);
    engines[0].progress();
    CHECK(request->done());
    CHECK(request->status().ok());
  }
  CHECK(network.nic(0).posted().empty());
}

TEST_CASE("engine: a request can be submitted again once it is done, and not before") {
  FakeNetwork network;
  Engines engines(network, {1, 1});
  const auto* peer = engines[0].connect(engines[1].address());
  Request request(Imm{peer, 9});
  CHECK_FALSE(request.wait(platform::Clock::now()));
  for (uint64_t i = 1; i <= 5; ++i) {
    engines[0].submit(request);
    CHECK_THROWS_AS(engines[0].submit(request), base::Error);
    REQUIRE(engines.pump(request));
    CHECK(request.wait(platform::Clock::now()));
    REQUIRE(engines.pump([&] { return engines.count(1, 9) == i; }));
  }
}

TEST_CASE("engine: requests from the polling thread need no mailbox") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Request request(Imm{engines[0].connect(engines[1].address()), 9});
  CHECK(engines[0].idle());
  engines[0].submit_from_poller(request);
  CHECK_FALSE(engines[0].idle());
  REQUIRE(engines.pump(request));
  CHECK(engines[0].idle());
}

TEST_CASE(
    "engine: keyed immediates reach their communicator, those of an unknown one are discarded") {
  struct Sink final : ImmSink {
    void on_imm(const ImmKey& key) noexcept override { sources.insert(key.source); }
    std::set<uint32_t> sources;
  } sink;
  FakeNetwork network;
  Engines engines(network, {2, 2});
  const auto* peer = engines[0].connect(engines[1].address());
  engines[1].imm_table().set_sink(7, &sink);
  for (const uint32_t communicator : {7u, 8u}) {
    for (const uint32_t source : {3u, 8'191u}) {
      Request request(Imm{peer, ImmKey{communicator, 1, 2, source}.pack()});
      REQUIRE(engines.run(0, request).ok());
    }
  }
  REQUIRE(engines.pump([&] { return engines[1].imm_table().discarded() == 2; }));
  CHECK(sink.sources == std::set<uint32_t>{3, 8'191});
}

TEST_CASE("engine: counts bytes, writes and immediates per NIC") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(1000)), target(engines[1], pattern(1000, 9));
  CHECK(engines[0].counters()[0].last_post_ns == 0);
  Request request(Write{source.handle, 0, engines.region(0, 1, target), 0, 1000, 3});
  REQUIRE(engines.run(0, request).ok());
  REQUIRE(engines.pump([&] { return engines.count(1, 3) == 2; }));
  const auto sent = engines[0].counters(), received = engines[1].counters();
  CHECK(sent[0].bytes_written == 512);
  CHECK(sent[1].bytes_written == 488);
  for (const size_t nic : {0, 1}) {
    CHECK(sent[nic].writes == 1);
    CHECK(sent[nic].immediates_sent == 1);
    CHECK(sent[nic].immediates_received == 0);
    CHECK(sent[nic].last_post_ns != 0);
    CHECK(received[nic].immediates_received == 1);
    CHECK(received[nic].writes == 0);
  }
}

TEST_CASE("engine: addresses and descriptors survive the wire, damaged ones are refused by name") {
  FakeNetwork network;
  Engines engines(network, {3, 2});
  Buffer buffer(engines[0], pattern(100));
  const auto address = engines[0].address();
  CHECK(EngineAddress::parse(address.serialize()) == address);
  const auto descriptor = engines[0].descriptor(buffer.handle);
  const auto bytes = descriptor.serialize();
  const auto parsed = MemoryDescriptor::parse(bytes);
  CHECK(parsed.owner == descriptor.owner);
  CHECK(parsed.bytes == 100);
  CHECK(parsed.rails == descriptor.rails);
  CHECK(parsed.rails.size() == 3);
  for (size_t size = 0; size < bytes.size(); ++size)
    CHECK_THROWS_AS(MemoryDescriptor::parse(std::span(bytes).first(size)), base::Error);
  CHECK_THROWS_AS(MemoryDescriptor::parse(address.serialize()), base::Error);
  CHECK_THROWS_AS(EngineAddress::parse(bytes), base::Error);
}

TEST_CASE("engine: resolving connects once, gives the same region again, and checks the peer") {
  FakeNetwork network;
  Engines engines(network, {2, 2, 2});
  Buffer first(engines[1], pattern(100)), second(engines[1], pattern(50));
  const auto* region = engines.region(0, 1, first);
  CHECK(engines.region(0, 1, first) == region);
  const auto* other = engines.region(0, 1, second);
  CHECK(other != region);
  CHECK(other->owner == region->owner);
  CHECK(other->bytes == 50);
  CHECK(network.nic(0).num_peers() == 1);
  const auto* stranger = engines[0].connect(engines[2].address());
  CHECK_THROWS_AS(engines[0].resolve(engines[1].descriptor(first.handle), stranger), base::Error);
}

TEST_CASE("engine: memory registered again at the same address gets keys of its own") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(100)), target(engines[1], std::vector<std::byte>(100));
  const auto* stale = engines.region(0, 1, target);
  engines[1].unregister_memory(target.handle);
  target.handle = engines[1].register_memory({target.data.data(), target.data.size()});
  Request late(Write{source.handle, 0, stale, 0, 100, 1});
  CHECK(engines.run(0, late).code == base::Code::kRemoteAccess);
  Request fresh(Write{source.handle, 0, engines.region(0, 1, target), 0, 100, 1});
  CHECK(engines.run(0, fresh).ok());
  CHECK(target.data == source.data);
}

TEST_CASE("engine: the null provider completes everything and delivers nothing") {
  EngineOptions options;
  options.provider = "null";
  options.settings = "max_in_flight=8,max_write_bytes=1000";
  TransferEngine engine(options);
  std::vector<std::byte> data(5000);
  const auto* handle = engine.register_memory({data.data(), data.size()});
  Request request(Write{handle, 0, engine.resolve(engine.descriptor(handle)), 0, 5000, 1});
  engine.submit(request);
  for (int i = 0; i < 100 && !request.done(); ++i) engine.progress();
  REQUIRE(request.done());
  CHECK(request.status().ok());
  CHECK(engine.counters()[0].writes == 3);
  CHECK(engine.imm_table().value(1) == 0);
  CHECK(engine.idle());
}

TEST_CASE("engine: an unknown provider or setting is refused with the list of known ones") {
  EngineOptions options;
  options.provider = "pigeon";
  try {
    TransferEngine engine(options);
    FAIL("no Error");
  } catch (const base::Error& error) {
    CHECK(error.code() == base::Code::kUnavailable);
    CHECK(std::string(error.what()).find("null") != std::string::npos);
  }
  options.provider = "null";
  options.settings = "max_inflight=8";
  CHECK_THROWS_AS(TransferEngine{options}, base::Error);
  options.settings = "";
  for (const int num_nics : {0, kMaxNics + 1}) {
    options.num_nics = num_nics;
    CHECK_THROWS_AS(TransferEngine{options}, base::Error);
  }
}

}  // namespace
}  // namespace moe_p2p::test
