// Engine, proxy and the software NIC together: what the layers above rely on, in order and under
// the adversary. The seed of a failing run is in the message.
#include <algorithm>

#include "engine_traffic.h"
#include "fake_driver.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using platform::Clock;
using platform::Deadline;

EngineOptions loopback_options(const std::string& settings, int num_nics) {
  return engine_options("loopback", settings, num_nics);
}

TEST_CASE("engine over loopback: every kind of request arrives, in order and reordered") {
  for (const int seed : {0, 1, 2, 3}) {
    CAPTURE(seed);
    const auto settings =
        base::concat("seed=", seed, ",max_write_bytes=700,max_in_flight=16,ring_kib=64,channels=4");
    TransferEngine from(loopback_options(settings, 2)), to(loopback_options(settings, 3));
    proxy::ProxyThread first(from, {}), second(to, {});
    check_every_kind_of_request(from, to);
  }
}

TEST_CASE("engine over loopback: whatever comes wakes who sleeps for it") {
  const OnlyNotified guard;
  TransferEngine from(loopback_options("", 1)), to(loopback_options("", 1));
  proxy::ProxyThread first(from, {.wait = OnlyNotified::kAtOnce});
  proxy::ProxyThread second(to, {.wait = OnlyNotified::kAtOnce});
  Buffer source(from, pattern(100)), target(to, std::vector<std::byte>(100));
  const auto* region = from.resolve(to.descriptor(target.handle));
  for (uint64_t i = 1; i <= 100; ++i) {
    Request write(Write{source.handle, 0, region, 0, 100, 1});
    from.submit(write);
    REQUIRE(OnlyNotified::woken([&](Deadline deadline) {
      return to.imm_table().wait(1, i, deadline, OnlyNotified::kAtOnce);
    }));
    REQUIRE(OnlyNotified::woken(
        [&](Deadline deadline) { return write.wait(deadline, OnlyNotified::kAtOnce); }));
  }
  CHECK(target.data == source.data);
  const pid_t caller = gettid();
  const auto until_it_sleeps = [caller] {
    CHECK(poll_until([] { return false; }, [caller] { return sleeps(caller); }));
  };
  REQUIRE(OnlyNotified::woken([&](Deadline deadline) {
    to.run_on_poller(until_it_sleeps, deadline);
    return true;
  }));
}

// A buffer that passes for memory of GPU 0 (fake_driver.h).
struct GpuBuffer {
  GpuBuffer(TransferEngine& engine, size_t bytes)
      : data(bytes), handle(engine.register_memory(span())) {}
  provider::MemorySpan span() { return {data.data(), data.size(), provider::MemoryKind::kCuda, 0}; }
  std::vector<std::byte> data;
  const MemoryHandle* handle;
};

TEST_CASE("engine over loopback: GPU memory is written by every NIC's ring, then its window") {
  FakeDriver::install();
  for (const int seed : {0, 1, 2}) {
    CAPTURE(seed);
    const auto settings = base::concat("seed=", seed, ",ring_kib=64,channels=8");
    TransferEngine from(loopback_options(settings, 3)), to(loopback_options(settings, 2));
    proxy::ProxyThread first(from, {}), second(to, {});
    GpuBuffer source(from, 50'000), target(to, 50'000);
    std::ranges::copy(pattern(50'000), source.data.begin());
    const auto descriptor = to.descriptor(target.handle);
    for (uint64_t round = 1; round <= 3; ++round) {
      const auto* region = from.resolve(descriptor);
      Request write(Write{source.handle, 0, region, 0, 50'000, 1});
      uint64_t before = to.imm_table().value(1);
      from.submit(write);
      REQUIRE(write.wait(soon()));
      CHECK(write.status().ok());
      REQUIRE(to.imm_table().wait(1, before + 3, soon()));
      CHECK(target.data == source.data);
      std::ranges::fill(target.data, std::byte{0});

      from.map_region(region, target.span());
      before = to.imm_table().value(1);
      from.submit(write);
      REQUIRE(write.wait(soon()));
      CHECK(write.status().ok());
      REQUIRE(to.imm_table().wait(1, before + 3, soon()));
      CHECK(target.data == source.data);
      CHECK_THROWS_AS(from.map_region(region, target.span()), base::Error);  // mapped already
      from.disconnect(region->owner);  // drops the windows: the next round finds none
      std::ranges::fill(target.data, std::byte{0});
    }
    to.unregister_memory(target.handle);
    from.unregister_memory(source.handle);
  }
}

// Puts the driver back: without handles, GPU memory is written by the ring.
struct Sharing {
  FakeDriver& fake = FakeDriver::install();
  Sharing() { fake.share_memory(true); }
  ~Sharing() { fake.share_memory(false); }
};
struct SharingPair : Sharing {
  const std::string settings = base::concat("channels=8,row_kernel=", FakeDriver::kRowKernel);
  TransferEngine from{loopback_options(settings, 2)}, to{loopback_options(settings, 2)};
  proxy::ProxyThread first{from, {}}, second{to, {}};
};

TEST_CASE("engine over loopback: GPU memory whose descriptor says how is mapped by itself") {
  SharingPair sharing;
  TransferEngine &from = sharing.from, &to = sharing.to;
  GpuBuffer target(to, 50'000);
  const auto descriptor = MemoryDescriptor::parse(to.descriptor(target.handle).serialize());
  const auto* region = from.resolve(descriptor);  // before the engine knows its own device
  GpuBuffer source(from, 50'000);
  std::ranges::copy(pattern(50'000), source.data.begin());
  for (uint64_t round = 1; round <= 3; ++round) {
    const uint64_t before = sharing.fake.num_row_launches();
    Request write(Write{source.handle, 0, region, 0, 50'000, 1});
    from.submit(write);
    REQUIRE(write.wait(soon()));
    CHECK(write.status().ok());
    REQUIRE(to.imm_table().wait(1, 2 * round, soon()));
    CHECK(target.data == source.data);
    CHECK(sharing.fake.num_row_launches() > before);
    std::ranges::fill(target.data, std::byte{0});
    from.disconnect(region->owner);
    region = from.resolve(descriptor);
  }
  to.unregister_memory(target.handle);  // nobody has dropped a window
  Request write(Write{source.handle, 0, region, 0, 50'000, 1});
  from.submit(write);
  REQUIRE(write.wait(soon()));
  CHECK(write.status().code == base::Code::kRemoteAccess);
  CHECK(std::ranges::count(target.data, std::byte{0}) == std::ssize(target.data));
}

TEST_CASE("engine over loopback: a window goes when its owner lends the memory no more") {
  SharingPair sharing;
  TransferEngine &from = sharing.from, &to = sharing.to;
  GpuBuffer source(from, 5000);
  std::vector<std::byte> memory(5000);
  const provider::MemorySpan span{memory.data(), memory.size(), provider::MemoryKind::kCuda, 0};
  std::ranges::copy(pattern(5000), source.data.begin());
  for (uint64_t round = 1; round <= 3; ++round) {  // each time the memory is another, at its place
    sharing.fake.allocate(memory);
    const MemoryHandle* handle = to.register_memory(span);
    MemoryDescriptor descriptor = to.descriptor(handle);
    REQUIRE(!descriptor.shared.empty());
    descriptor.shared[0] ^= std::byte{1};  // as if of another process
    const auto* region = from.resolve(descriptor);
    CHECK(sharing.fake.num_mapped() == 1);
    const uint64_t before = sharing.fake.num_row_launches();
    Request write(Write{source.handle, 0, region, 0, 5000, 1});
    from.submit(write);
    REQUIRE(write.wait(soon()));
    CHECK(write.status().ok());
    CHECK(sharing.fake.num_row_launches() > before);
    CHECK(memory == source.data);
    std::ranges::fill(memory, std::byte{0});
    to.unregister_memory(handle);
    sharing.fake.free_memory(memory);
  }
  from.disconnect(from.resolve(to.descriptor(to.register_memory(span)))->owner);
  CHECK(sharing.fake.num_mapped() == 0);
}

TEST_CASE("engine over loopback: regions of two classes share a window until both are gone") {
  SharingPair sharing;
  TransferEngine &from = sharing.from, &to = sharing.to;
  GpuBuffer source(from, 5000);
  std::ranges::copy(pattern(5000), source.data.begin());
  std::vector<std::byte> memory(5000);
  sharing.fake.allocate(memory);
  const MemoryHandle* handle =
      to.register_memory({memory.data(), memory.size(), provider::MemoryKind::kCuda, 0});
  MemoryDescriptor descriptor = to.descriptor(handle);
  descriptor.shared[0] ^= std::byte{1};  // as if of another process
  const auto* urgent = from.resolve(descriptor, nullptr, 0);
  const auto* lower = from.resolve(descriptor, nullptr, 2);
  const auto arrives = [&](const RemoteRegion* region, uint8_t priority) {
    std::ranges::fill(memory, std::byte{0});
    const uint64_t before = sharing.fake.num_row_launches();
    Request write(Write{source.handle, 0, region, 0, 5000, 1});
    write.priority = priority;
    from.submit(write);
    REQUIRE(write.wait(soon()));
    CHECK(write.status().ok());
    CHECK(sharing.fake.num_row_launches() > before);
    CHECK(memory == source.data);
  };
  CHECK(sharing.fake.num_mapped() == 1);
  arrives(urgent, 0);
  arrives(lower, 2);
  from.disconnect(urgent->owner);
  CHECK(sharing.fake.num_mapped() == 1);
  arrives(lower, 2);
  from.disconnect(lower->owner);
  CHECK(sharing.fake.num_mapped() == 0);
  to.unregister_memory(handle);
  sharing.fake.free_memory(memory);
}

TEST_CASE("engine over loopback: a peer that closes fails what is sent to it, others go on") {
  const std::string settings = "seed=5,ring_kib=64,channels=4";
  TransferEngine from(loopback_options(settings, 2)), stays(loopback_options(settings, 2));
  auto leaves = std::make_unique<TransferEngine>(loopback_options(settings, 2));
  proxy::ProxyThread first(from, {}), second(stays, {});
  Buffer source(from, pattern(200'000)), kept(stays, std::vector<std::byte>(200'000));
  Buffer lost(*leaves, std::vector<std::byte>(200'000));
  const auto* to_kept = from.resolve(stays.descriptor(kept.handle));
  const auto* to_lost = from.resolve(leaves->descriptor(lost.handle));
  Request doomed(Write{source.handle, 0, to_lost, 0, 200'000, 1});
  Request good(Write{source.handle, 0, to_kept, 0, 200'000, 1});
  from.submit(doomed);  // nobody polls at the other end: it cannot complete
  from.submit(good);
  REQUIRE(good.wait(soon()));
  CHECK(good.status().ok());
  CHECK_FALSE(doomed.done());
  leaves.reset();
  from.disconnect(to_lost->owner);
  REQUIRE(doomed.wait(soon()));
  // Whichever is first: the NIC sees that the peer is gone, or this engine drops it.
  CHECK((doomed.status().code == base::Code::kPeerDead ||
         doomed.status().code == base::Code::kClosed));
  REQUIRE(stays.imm_table().wait(1, 2, soon()));
  CHECK(kept.data == source.data);
}

TEST_CASE("benchmark: engine over loopback, immediate there and back" * doctest::skip()) {
  for (const auto mode : {platform::WaitMode::kYield, platform::WaitMode::kSleep}) {
    TransferEngine left(loopback_options("", 1)), right(loopback_options("", 1));
    proxy::ProxyThread first(left, {.wait = {.mode = mode}});
    proxy::ProxyThread second(right, {.wait = {.mode = mode}});
    Request forth(Imm{left.connect(right.address()), 1}),
        back(Imm{right.connect(left.address()), 1});
    std::vector<int64_t> ns;
    for (uint64_t i = 1; i <= 500; ++i) {
      const auto start = Clock::now();
      left.submit(forth);
      REQUIRE(right.imm_table().wait(1, i, soon()));
      right.submit(back);
      REQUIRE(left.imm_table().wait(1, i, soon()));
      ns.push_back((Clock::now() - start).count());
      REQUIRE(forth.wait(soon()));
      REQUIRE(back.wait(soon()));
    }
    std::sort(ns.begin(), ns.end());
    const char* name = mode == platform::WaitMode::kYield ? "yield" : "sleep";
    MESSAGE(std::string(name), ": ", ns[250], " ns (p50), ", ns[495], " ns (p99)");
  }
}

struct CountingSink final : ImmSink {
  int count = 0;
  void on_imm(const ImmKey& /*key*/) noexcept override { ++count; }
};

// How often the next communicator of a number counts what a stopped rank of the one before sends
// when it goes on, for which the memory is not registered any more. The second of its two pieces
// is empty and needs none.
int counted_by_successor(const std::string& settings, bool severed) {
  constexpr uint64_t kTag = 7;
  constexpr ImmKey kKey{.communicator = 3, .phase = 0, .slot = 0, .source = 1};
  TransferEngine stopped(loopback_options(settings, 2)), here(loopback_options(settings, 2));
  Buffer source(stopped, pattern(128)), target(here, std::vector<std::byte>(128));
  const Peer* peer = stopped.connect(here.address(), 0, kTag);
  const auto* region = stopped.resolve(here.descriptor(target.handle), peer);
  Request late(Write{source.handle, 0, region, 0, 128, kKey.pack()});
  stopped.submit(late);
  CountingSink before, after;
  here.imm_table().set_sink(kKey.communicator, &before);
  here.progress();
  here.imm_table().set_sink(kKey.communicator, nullptr);
  here.unregister_memory(target.handle);
  for (int i = 0; severed && i < 100; ++i) {
    try {
      here.sever(kTag, {}, Clock::now());
      break;
    } catch (const base::Error& error) {
      REQUIRE(error.code() == base::Code::kTimeout);
    }
    REQUIRE(i < 99);
    here.progress();
  }
  here.imm_table().set_sink(kKey.communicator, &after);
  for (int i = 0; i < 5'000; ++i) {
    stopped.progress();
    here.progress();
  }
  CHECK(before.count == 0);
  CHECK(late.done());
  CHECK(!late.status().ok());
  here.imm_table().set_sink(kKey.communicator, nullptr);
  return after.count;
}

TEST_CASE(
    "engine over loopback: a number that returns unsevered counts what a stopped rank sends") {
  for (const char* settings : {"", "seed=3", "seed=4,ordered=1"}) {
    CAPTURE(std::string(settings));
    CHECK(counted_by_successor(settings, true) == 0);
    CHECK(counted_by_successor(settings, false) == 1);  // the fault that severing prevents
  }
}

}  // namespace
}  // namespace moe_p2p::test
