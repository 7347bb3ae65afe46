// Reads through the engine, over a network that reorders: bytes, pages, counters, and what ends
// them. Writes: engine_test.cpp and engine_failure_test.cpp.
#include <numeric>

#include "engine_pair.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using base::Code;

TEST_CASE("engine: reads of every size bring the peer's bytes and no immediate") {
  for (const int num_nics : {1, 2, 4}) {
    FakeNetwork network({.seed = 3, .limits = {.max_write_bytes = 100, .max_in_flight = 3}});
    Engines engines(network, {num_nics, num_nics});
    Buffer target(engines[0], pattern(700, 9));
    Buffer source(engines[1], pattern(600));
    const auto* region = engines.region(0, 1, source);
    const auto untouched = pattern(700, 9);
    for (uint64_t bytes = 0; bytes <= 520; bytes += 13) {
      std::ranges::copy(untouched, target.data.begin());
      auto expected = untouched;
      std::copy_n(source.data.begin() + 11, bytes, expected.begin() + 23);
      Request request(Read{target.handle, 23, region, 11, bytes});
      REQUIRE(engines.run(0, request).ok());
      REQUIRE(target.data == expected);
    }
    CHECK(source.data == pattern(600));
    for (const auto& nic : engines[1].counters()) CHECK(nic.immediates_received == 0);
  }
}

TEST_CASE("engine: pages are read from their index at the peer to their index here") {
  FakeNetwork network({.seed = 5, .limits = {.max_write_bytes = 40, .max_in_flight = 7}});
  for (const int num_nics : {1, 2, 3}) {
    Engines engines(network, {num_nics, 2});
    Buffer target(engines[0], pattern(64 * 150, 9));
    Buffer source(engines[1], pattern(64 * 100));
    const auto from = indices(3, 1), to = indices(20, 2);
    for (const uint64_t page_bytes : {1, 39, 40, 41, 60}) {
      auto expected = pattern(64 * 150, 9);
      std::ranges::copy(expected, target.data.begin());
      for (size_t i = 0; i < from.size(); ++i)
        std::copy_n(source.data.begin() + 4 + from[i] * 64, page_bytes,
                    expected.begin() + 7 + to[i] * 64);
      Request request(ReadPages{
          target.handle, engines.region(0, 1, source), page_bytes, {to, 64, 7}, {from, 64, 4}});
      REQUIRE(engines.run(0, request).ok());
      CHECK(target.data == expected);
    }
  }
}

TEST_CASE("engine: rows of pages travel both ways, with an immediate for each NIC at the end") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    CAPTURE(seed);
    FakeNetwork network({.seed = seed, .limits = {.max_write_bytes = 40, .max_in_flight = 7}});
    Engines engines(network, {3, 2});
    Buffer here(engines[0], pattern(64 * 100)), there(engines[1], std::vector<std::byte>(64 * 160));
    const auto* region = engines.region(0, 1, there);
    const auto from = indices(3, 0), to = indices(20, 2);
    const Pages mine{from, 64, 0, 16}, theirs{to, 80, 7, 20};
    Request write(
        WritePages{here.handle, region, 40, mine, theirs, 6, 10, WritePages::Imms::kPerNic});
    auto expected = there.data;
    for (size_t i = 0; i < from.size(); ++i)
      for (int row = 0; row < 4; ++row)
        std::copy_n(here.data.begin() + from[i] * 64 + row * 16, 10,
                    expected.begin() + 7 + to[i] * 80 + row * 20);
    engines[0].submit(write);
    REQUIRE(engines.pump([&] {
      if (engines.count(1, 6) == 3) CHECK(there.data == expected);
      return write.done() && engines.count(1, 6) == 3;
    }));
    CHECK(write.status().ok());
    for (int i = 0; i < 20; ++i) engines.turn();
    CHECK(engines.count(1, 6) == 3);
    const auto original = here.data;
    std::ranges::fill(here.data, std::byte{0});
    Request read(ReadPages{here.handle, region, 40, mine, theirs, 10});
    REQUIRE(engines.run(0, read).ok());
    for (size_t i = 0; i < original.size(); ++i) {
      const bool moved = i >= 3 * 64 && i < 93 * 64 && i % 16 < 10;
      REQUIRE(here.data[i] == (moved ? original[i] : std::byte{0}));
    }
  }
}

TEST_CASE("engine: reads are counted apart from writes") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer target(engines[0], pattern(1000)), source(engines[1], pattern(1000, 9));
  Request request(Read{target.handle, 0, engines.region(0, 1, source), 0, 1000});
  REQUIRE(engines.run(0, request).ok());
  const auto counters = engines[0].counters();
  CHECK(counters[0].bytes_read == 512);
  CHECK(counters[1].bytes_read == 488);
  for (const auto& nic : counters) {
    CHECK(nic.reads == 1);
    CHECK(nic.writes == 0);
    CHECK(nic.bytes_written == 0);
  }
}

TEST_CASE("engine: a read outside the registered memory is refused before anything is sent") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer target(engines[0], pattern(1000)), source(engines[1], pattern(500));
  const auto* t = target.handle;
  const auto* s = engines.region(0, 1, source);
  const std::vector<int64_t> two = {0, 4}, five = {0, 5}, one = {0};
  struct Case {
    Operation operation;
    const char* words;
  };
  const Case cases[] = {
      {Read{t, 0, s, 0, 501}, "Read source: 501 bytes"},
      {Read{t, 900, s, 0, 101}, "Read target: 101 bytes at offset 900"},
      {Read{nullptr, 0, s, 0, 1}, "Read has no target"},
      {Read{t, 0, nullptr, 0, 1}, "Read has no source"},
      {ReadPages{t, s, 100, {two, 100, 0}, {five, 100, 0}}, "ReadPages source: page index 5"},
      {ReadPages{t, s, 100, {two, 100, 0}, {one, 100, 0}}, "2 target pages and 1 source pages"},
  };
  for (const auto& [operation, words] : cases) {
    Request request(operation);
    CHECK_THROWS_WITH_AS(engines[0].submit(request), doctest::Contains(words), base::Error);
  }
  for (int i = 0; i < 10; ++i) engines.turn();
  CHECK(network.nic(0).posted().empty());
  CHECK(network.nic(1).posted().empty());
}

TEST_CASE("engine: reads end with their peer and with the memory they fill, and others go on") {
  FakeNetwork network({.limits = {.max_write_bytes = 100, .max_in_flight = 4}});
  Engines engines(network, {2, 2, 2});
  Buffer lost_target(engines[0], pattern(5000)), target(engines[0], pattern(5000));
  Buffer left(engines[1], pattern(5000, 9)), right(engines[2], pattern(5000, 9));
  const auto* from_left = engines.region(0, 1, left);
  const auto* from_right = engines.region(0, 2, right);
  const std::vector<int64_t> pages = {0, 1, 2};
  for (const size_t nic : {0, 1}) network.nic(nic).hold(true);
  Request of_peer(Read{target.handle, 0, from_left, 0, 5000});
  Request of_peer_pages(
      ReadPages{target.handle, from_left, 1000, {pages, 1000, 0}, {pages, 1000, 0}});
  Request of_memory(Read{lost_target.handle, 0, from_right, 0, 5000});
  Request of_memory_pages(
      ReadPages{lost_target.handle, from_right, 1000, {pages, 1000, 0}, {pages, 1000, 0}});
  Request kept(Read{target.handle, 0, from_right, 0, 5000});
  for (Request* request : {&of_peer, &of_peer_pages, &of_memory, &of_memory_pages, &kept})
    engines[0].submit(*request);
  for (int i = 0; i < 5; ++i) engines.turn();
  engines[0].disconnect(from_left->owner);
  engines[0].unregister_memory(lost_target.handle);
  for (const size_t nic : {0, 1}) network.nic(nic).hold(false);
  for (Request* request : {&of_peer, &of_peer_pages, &of_memory, &of_memory_pages}) {
    REQUIRE(engines.pump(*request));
    CHECK(request->status().code == Code::kClosed);
  }
  REQUIRE(engines.pump(kept));
  CHECK(kept.status().ok());
  CHECK(target.data == right.data);
}

}  // namespace
}  // namespace moe_p2p::test
