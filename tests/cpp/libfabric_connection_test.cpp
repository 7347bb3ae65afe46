// Connections of libfabric's tcp that end in the middle of something, and addresses of peers that
// have gone. Where 1.17 would crash: fence.h, and Writes::may_end_connection.
#include <algorithm>
#include <memory>
#include <thread>

#include "doctest/doctest.h"
#include "provider/libfabric/domain.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

const ProviderUnderTest kTcp = {.name = "libfabric",
                                .settings = "provider=tcp,interfaces=lo,timeout_ms=3000"};

bool has_tcp() {
  const std::string reason = why_unavailable(kTcp);
  if (!reason.empty()) MESSAGE("skipped: ", reason);
  return reason.empty();
}

size_t num_addresses(const Node& node) {
  return dynamic_cast<const provider::libfabric::LibfabricDomain&>(*node.domain).num_addresses();
}

enum class End { kDisconnect, kClose };

TEST_CASE("libfabric over tcp: a connection ends in the middle of writes with immediates") {
  if (!has_tcp()) return;
  for (const uint32_t bytes : {16'000u, 1u << 20}) {
    for (const End end : {End::kDisconnect, End::kClose}) {
      for (int turn = 0; turn < 10; ++turn) {
        CAPTURE(bytes);
        CAPTURE(turn);
        Pair pair(kTcp, bytes);
        const PeerId back = pair.b.connect(pair.a);
        REQUIRE(pair.write_until_done(pair.write(1, 0, 1)));
        // `a` fills the sockets, and `b` takes some of it: the last write is cut in two.
        uint64_t posted = 0;
        for (int polls = 0; polls < 50; ++polls) {
          while (posted < 1000 && pair.a.post(with_imm(pair.write(1000 + posted, 0, bytes), 7)))
            ++posted;
          pair.a.poll();
        }
        for (int polls = 0; polls <= 5 * turn; ++polls) pair.b.poll();
        if (end == End::kClose) pair.b.domain.reset();
        if (end == End::kDisconnect) pair.b.domain->disconnect(back);
        pair.a.domain->disconnect(pair.peer);
        const auto is_done = [&] { return pair.a.done.size() == 1 + posted; };
        CHECK(pump({&pair.a}, is_done));
        CHECK(num_addresses(pair.a) == 0);
      }
    }
  }
}

TEST_CASE("libfabric over tcp: a connection stays until a read over it is answered") {
  if (!has_tcp()) return;
  for (const End end : {End::kDisconnect, End::kClose}) {
    for (int turn = 0; turn < 5; ++turn) {
      Pair pair(kTcp, 32 << 20);
      std::ranges::fill(pair.target.data, std::byte{9});
      REQUIRE(pair.write_until_done(pair.write(1, 0, 1)));
      pair.post(pair.read(2, 0, 32 << 20));
      const auto has_begun = [&] { return pair.source.data[1] == std::byte{9}; };
      REQUIRE(pump({&pair.a, &pair.b}, has_begun));
      REQUIRE(pair.source.data.back() == std::byte{0});
      if (end == End::kClose) {
        pair.a.domain.reset();
        pair.b.domain.reset();  // before its memory: libfabric may still send from it
        continue;
      }
      pair.a.domain->disconnect(pair.peer);
      REQUIRE(pump({&pair.a}, [&] { return pair.a.done.size() == 2; }));
      CHECK(pair.a.code(2) == Code::kClosed);
      CHECK(num_addresses(pair.a) == 1);
      const auto is_answered = [&] { return pair.source.data.back() == std::byte{9}; };
      REQUIRE(pump({&pair.a, &pair.b}, is_answered));
      settle({&pair.a, &pair.b}, 100);
      Node c = open(kTcp);
      pair.a.domain->disconnect(pair.a.connect(c));
      CHECK(num_addresses(pair.a) == 0);
    }
  }
}

TEST_CASE("libfabric over tcp: a peer that is gone is not waited for, one that is slow is") {
  if (!has_tcp()) return;
  const ProviderUnderTest patient = {.name = "libfabric",
                                     .settings = "provider=tcp,interfaces=lo,timeout_ms=600000"};
  for (const bool connected : {true, false}) {
    CAPTURE(connected);
    Pair pair(patient, 100);
    if (connected) REQUIRE(pair.write_until_done(pair.write(1, 0, 100)));
    pair.b.domain.reset();
    if (connected) settle({&pair.a}, 1000);  // libfabric learns of it
    pair.post(pair.write(2, 0, 100));
    CHECK(pump({&pair.a}, [&] { return pair.a.code(2) == Code::kPeerDead; }));
  }
  Pair slow(patient, 100);
  slow.post(slow.write(1, 0, 100));
  const auto asked = platform::Clock::now() + std::chrono::milliseconds(500);
  pump({&slow.a}, [&] { return platform::Clock::now() > asked; });
  CHECK(slow.a.done.empty());
  CHECK(pump({&slow.a, &slow.b}, [&] { return slow.a.code(1) == Code::kOk; }));
}

TEST_CASE("libfabric over tcp: nothing is kept of peers that have gone") {
  if (!has_tcp()) return;
  Node a = open(kTcp), other = open(kTcp);
  const Memory source(a, 100);
  for (int restart = 0; restart < 50; ++restart) {
    CAPTURE(restart);
    auto b = std::make_unique<Node>(open(kTcp));
    const PeerId peer = a.connect(*b);
    {
      const Memory target(*b, 100);
      const bool writes_before = restart % 2 == 0;
      if (writes_before) {
        post_all(a, {&a, b.get()}, make_write(2 * restart, peer, source, 0, target, 0, 100));
        REQUIRE(pump({&a, b.get()}, [&] { return a.code(2 * restart) == Code::kOk; }));
      }
      b->domain.reset();
      if (restart % 3 != 0) {  // libfabric finds nobody there
        const auto write = make_write(2 * restart + 1, peer, source, 0, target, 0, 100);
        post_all(a, {&a}, write);
        for (int polls = 0; polls < 100; ++polls) a.poll();
      }
    }
    a.domain->disconnect(peer);
    const auto nothing_kept = [&] {
      a.domain->disconnect(a.connect(other));  // libfabric is asked again
      return num_addresses(a) == 0;
    };
    CHECK(pump({&a}, nothing_kept));
  }
}

TEST_CASE("libfabric over tcp: a peer to which no connection can begin is disconnected") {
  if (!has_tcp()) return;
  Node a = open(kTcp);
  auto there = provider::libfabric::Address::parse(a.domain->address(), "tcp");
  there.name[4] = std::byte{10};  // no way leads there from the loopback interface
  const PeerId peer = a.domain->connect(there.serialize("tcp"));
  CHECK(a.post(make_imm(1, peer, 7)));
  for (int polls = 0; polls < 10; ++polls) a.poll();
  a.domain->disconnect(peer);
  CHECK(pump({&a}, [&] { return a.num_failed() == 1; }));
}

TEST_CASE("libfabric over tcp: nothing is kept of writers that have gone") {
  if (!has_tcp()) return;
  Node a = open(kTcp);
  const Memory kept(a, 100);
  for (int restart = 0; restart < 50; ++restart) {
    CAPTURE(restart);
    Memory target(a, 100);
    auto writer = std::make_unique<Node>(open(kTcp));
    const PeerId peer = writer->connect(a);
    writer->domain->announce(peer, kept.key.remote_key);
    writer->domain->announce(peer, target.key.remote_key);
    const Memory source(*writer, 100);
    post_all(*writer, {&a, writer.get()}, make_write(1, peer, source, 0, target, 0, 100));
    REQUIRE(pump({&a, writer.get()}, [&] { return writer->done.size() == 1; }));
    std::jthread polls;
    if (restart % 2 == 0)
      writer->domain.reset();
    else
      polls = std::jthread([&](const std::stop_token& stop) {
        while (!stop.stop_requested()) writer->poll();
      });
    target.unregister();
  }
  const Node other = open(kTcp);
  const auto nothing_kept = [&] {            // of the last three at most
    a.domain->disconnect(a.connect(other));  // libfabric is asked again
    return num_addresses(a) <= 3;
  };
  CHECK(pump({&a}, nothing_kept));
}

}  // namespace
}  // namespace moe_p2p::provider_test
