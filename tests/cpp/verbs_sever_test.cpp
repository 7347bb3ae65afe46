// The fence by queue pair over a libibverbs as strict as mlx5: each of its steps is needed, and no
// other connection notices.
#include <algorithm>

#include "delayed_domain.h"
#include "engine/loop_back.h"
#include "engine_traffic.h"
#include "proxy/proxy_thread.h"
#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

using engine::LoopBack;
using engine::MemoryHandle;
using engine::Request;
using engine::TransferEngine;
using engine::Write;
using platform::Clock;
using test::soon;

constexpr uint64_t kTag = 0x51e1;
constexpr size_t kBytes = 5000;

// Two NICs each, polled by threads, connected under a tag; the sender's first NIC may delay.
struct Severed {
  explicit Severed(const FakeVerbs::Faults& faults = {}, bool in_order = true)
      : fake(FakeVerbs::install()),
        options(test::engine_options("verbs", "library=fake", 2)),
        sender(options,
               [this](const provider::DomainOptions& domain) {
                 auto opened =
                     std::make_unique<test::DelayedDomain>(provider::open_domain("verbs", domain));
                 nics.push_back(opened.get());
                 return opened;
               }),
        receiver(options),
        source(kBytes, std::byte{1}),
        cache(kBytes) {
    fake.locked([&](FakeVerbs& f) { f.faults = faults; });
    from = sender.register_memory({.data = source.data(), .bytes = kBytes});
    memory =
        receiver.register_memory({.data = cache.data(), .bytes = kBytes, .in_order = in_order});
    peer = sender.connect(receiver.address(), 1, kTag);
    region = sender.resolve(receiver.descriptor(memory), peer);
    sending.emplace(sender, proxy::ProxyOptions{});
    receiving.emplace(receiver, proxy::ProxyOptions{});
  }
  ~Severed() {
    sending.reset();
    receiving.reset();
    FakeVerbs::install();
  }
  void delay(bool delayed) {
    sender.run_on_poller(
        [&] {
          for (auto* nic : nics) nic->delay(delayed);
        },
        soon());
  }
  // One write, which ends well or not.
  base::Status write(const engine::RemoteRegion* to) {
    Request request(Write{from, 0, to, 0, kBytes, {}});
    sender.submit(request);
    REQUIRE(request.wait(soon()));
    return request.status();
  }
  // Whether anything changes the pages of the next request after this.
  bool lands_late() {
    std::ranges::fill(cache, std::byte{7});
    delay(false);
    for (int i = 0; i < 20; ++i) {
      fake.let_through();
      sender.run_on_poller([] {}, soon());
      receiver.run_on_poller([] {}, soon());
    }
    return std::ranges::count(cache, std::byte{7}) != static_cast<int64_t>(kBytes);
  }

  FakeVerbs& fake;
  const engine::EngineOptions options;
  std::vector<test::DelayedDomain*> nics;
  TransferEngine sender, receiver;
  std::vector<std::byte> source, cache;
  const MemoryHandle *from = nullptr, *memory = nullptr;
  const engine::Peer* peer = nullptr;
  const engine::RemoteRegion* region = nullptr;
  std::optional<proxy::ProxyThread> sending, receiving;
};

// Reads of an engine through its own NICs, without the rest of the fence.
struct OwnReads {
  explicit OwnReads(TransferEngine& engine) : engine(engine), reads(engine.num_nics()) {
    reads.use(engine.register_memory(reads.landing()),
              engine.connect(engine.address(), LoopBack::kPriority));
  }
  void read(const MemoryHandle* memory) {
    const MemoryHandle* const all[] = {memory};
    for (Request* request : reads.reads(all)) {
      engine.submit(*request);
      REQUIRE(request->wait(soon()));
      CHECK(request->status().ok());
    }
  }

  TransferEngine& engine;
  LoopBack reads;
};

TEST_CASE("verbs sever: a write delayed past the cancel lands unless its connection was severed") {
  for (const bool fenced : {false, true}) {
    CAPTURE(fenced);
    Severed pair;
    CHECK(pair.write(pair.region).ok());
    pair.delay(true);
    Request late(Write{pair.from, 0, pair.region, 0, kBytes, {}});
    pair.sender.submit(late);
    const MemoryHandle* const memory[] = {pair.memory};
    if (fenced) pair.receiver.sever(kTag, memory, soon());
    CHECK(pair.lands_late() == !fenced);
    REQUIRE(late.wait(soon()));
    CHECK(late.status().code == (fenced ? Code::kPeerDead : Code::kOk));
  }
}

TEST_CASE("verbs sever: what the NIC has accepted is in memory before it returns") {
  FakeVerbs::Faults faults;
  faults.slow_memory = true;
  SUBCASE("the whole fence") {
    Severed pair(faults);
    CHECK(pair.write(pair.region).ok());
    CHECK(std::ranges::count(pair.cache, std::byte{0}) > 0);  // not there yet
    const MemoryHandle* const memory[] = {pair.memory};
    pair.receiver.sever(kTag, memory, soon());
    CHECK(std::ranges::equal(pair.cache, pair.source));
    CHECK_FALSE(pair.lands_late());
  }
  SUBCASE("without the read") {
    Severed pair(faults);
    CHECK(pair.write(pair.region).ok());
    pair.receiver.sever(kTag, {}, soon());
    CHECK(pair.lands_late());
  }
  SUBCASE("the read alone") {
    Severed pair(faults);
    OwnReads own(pair.receiver);
    pair.delay(true);
    Request late(Write{pair.from, 0, pair.region, 0, kBytes, {}});
    pair.sender.submit(late);
    own.read(pair.memory);
    pair.delay(false);
    REQUIRE(late.wait(soon()));
    CHECK(pair.lands_late());
  }
  SUBCASE("relaxed order") {
    Severed pair(faults, false);
    OwnReads own(pair.receiver);
    CHECK(pair.write(pair.region).ok());
    const MemoryHandle* const memory[] = {pair.memory};
    CHECK(contains(text_of_error([&] { pair.receiver.sever(kTag, memory, soon()); }),
                   "not registered in order"));
    pair.receiver.sever(kTag, {}, soon());
    own.read(pair.memory);
    CHECK(pair.lands_late());
  }
  SUBCASE("one NIC alone") {
    Severed pair(faults);
    CHECK(pair.write(pair.region).ok());
    // Half of the bytes came through the other one.
    const MemoryHandle half{pair.memory->span, {pair.memory->keys[0], pair.memory->keys[0]}};
    pair.receiver.sever(kTag, {}, soon());
    const MemoryHandle* const memory[] = {&half};
    CHECK(contains(text_of_error([&] { pair.receiver.sever(kTag, memory, soon()); }), "failed"));
    CHECK(pair.lands_late());
  }
}

TEST_CASE("verbs sever: other connections of the same peer go on, later ones of the tag do not") {
  Severed pair;
  const auto* other = pair.sender.connect(pair.receiver.address(), 0);
  const auto* beside = pair.sender.resolve(pair.receiver.descriptor(pair.memory), other);
  const MemoryHandle* const memory[] = {pair.memory};
  pair.receiver.sever(kTag, memory, soon());
  CHECK(pair.write(pair.region).code == Code::kPeerDead);
  CHECK(pair.write(beside).ok());
  CHECK_THROWS_AS(pair.sender.connect(pair.receiver.address(), 1, kTag), base::Error);
  const auto* anew = pair.sender.connect(pair.receiver.address(), 1, kTag + 1);
  CHECK(pair.write(pair.sender.resolve(pair.receiver.descriptor(pair.memory), anew)).ok());
  pair.receiver.sever(kTag, memory, soon());  // again: nothing is left to do
}

TEST_CASE("verbs sever: the sender's own end, with a peer that does not answer") {
  Severed pair;
  const auto* own =
      pair.sender.register_memory({.data = pair.source.data(), .bytes = kBytes, .in_order = true});
  const MemoryHandle* const memory[] = {own};
  pair.delay(true);
  Request late(Write{pair.from, 0, pair.region, 0, kBytes, {}});
  pair.sender.submit(late);
  CHECK(contains(text_of_error([&] { pair.sender.sever(kTag, memory, soon()); }),
                 "disconnect it first"));
  pair.delay(false);
  pair.sender.disconnect(pair.peer);
  REQUIRE(late.wait(soon()));
  pair.sender.sever(kTag, memory, soon());
  CHECK(contains(text_of_error([&] { pair.sender.connect(pair.receiver.address(), 1, kTag); }),
                 "severed"));
}

TEST_CASE("verbs sever: it ends at its deadline, and later") {
  FakeVerbs::Faults faults;
  faults.no_last_receive = true;  // then a queue pair is drained for half a second
  Severed pair(faults);
  const MemoryHandle* const memory[] = {pair.memory};
  CHECK(contains(text_of_error([&] { pair.receiver.sever(kTag, memory, Clock::now()); }),
                 "have not ended at NIC 0 in time"));
  pair.receiver.sever(kTag, memory, soon());
  CHECK(pair.write(pair.region).code == Code::kPeerDead);
}

TEST_CASE("providers without a fence by queue pair say so") {
  TransferEngine engine(test::engine_options("null", "", 1));
  CHECK(contains(text_of_error([&] { engine.sever(kTag, {}, soon()); }),
                 "null has no fence by queue pair"));
}

}  // namespace
}  // namespace moe_p2p::provider_test
