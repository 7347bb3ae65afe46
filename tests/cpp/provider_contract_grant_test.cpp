// The contract of provider/provider.h as a fence relies on it: one memory registered several times,
// a key for each peer. Unregistering one of them keeps that peer out, whatever it has posted
// before, and no other.
#include <algorithm>

#include "delayed_domain.h"
#include "engine/transfer_engine.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

bool ends_refused(const ProviderUnderTest& provider, Code code) {
  return provider.notices_death ? is_refusal(provider, code) : code == Code::kClosed;
}

TEST_CASE("provider contract: a key that is given back keeps its peer out, and no other") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), c = open(provider), b = open(provider);
    Memory target(b, 4000), for_a(b, target.data), for_c(b, target.data);
    Memory source_a(a, 4000), source_c(c, 4000);
    fill(source_a.data, 1);
    fill(source_c.data, 2);
    const PeerId a_to_b = a.connect(b), c_to_b = c.connect(b);
    const auto write = [&](Node& from, PeerId peer, const Memory& source, const Memory& key,
                           uint64_t wr_id) {
      post_all(from, {&a, &b, &c}, make_write(wr_id, peer, source, 0, key, 0, 2000));
    };
    CHECK(for_a.key.remote_key != for_c.key.remote_key);
    write(a, a_to_b, source_a, for_a, 0);
    CHECK(pump({&a, &b, &c}, [&] { return a.done.size() == 1; }));
    CHECK(holds(target.data.first(2000), 1));
    for (uint64_t i = 0; i < 8; ++i) write(c, c_to_b, source_c, for_c, i);  // under way
    for_a.unregister();
    write(a, a_to_b, source_a, for_a, 1);
    if (!provider.notices_death) a.domain->disconnect(a_to_b);  // shm never ends a refused write
    CHECK(pump({&a, &b, &c}, [&] { return a.done.size() == 2 && c.done.size() == 8; }));
    CHECK(ends_refused(provider, a.code(1)));
    CHECK(c.num_failed() == 0);
    CHECK(holds(target.data.first(2000), 2));
    for (uint64_t i = 8; i < 16; ++i) write(c, c_to_b, source_c, for_c, i);  // after the refusal
    CHECK(pump({&a, &b, &c}, [&] { return c.done.size() == 16; }));
    CHECK(c.num_failed() == 0);
    CHECK(all_zero(target.data.subspan(2000)));
    if (!provider.recovers) return;
    Memory anew(b, target.data);  // the peer comes back with a new key
    const auto again = make_write(2, a_to_b, source_a, 0, anew, 2000, 2000);
    CHECK(pump({&a, &b, &c}, [&] {
      if (a.code(a.done.back()) == Code::kOk && a.done.size() > 2) return true;
      if (a.domain->idle()) a.post(again);
      return false;
    }));
    CHECK(holds(target.data.subspan(2000), 1));
  });
}

// An engine whose only NIC delays, and one that owns the memory; polled by turns.
struct Delayed {
  explicit Delayed(const ProviderUnderTest& provider)
      : kind(provider.memory),
        options{.provider = provider.name, .num_nics = 1, .settings = provider.settings} {
    test::FakeFabric::use_for(provider.settings);
    if (kind == MemoryKind::kCuda) test::FakeDriver::install();
    sender = std::make_unique<engine::TransferEngine>(
        options, [&](const provider::DomainOptions& domain) {
          auto opened = std::make_unique<test::DelayedDomain>(
              provider::open_domain(options.provider, domain));
          nic = opened.get();
          return opened;
        });
    receiver = std::make_unique<engine::TransferEngine>(options);
  }
  MemorySpan span(std::vector<std::byte>& bytes) const {
    return {bytes.data(), bytes.size(), kind, kind == MemoryKind::kHost ? -1 : 0};
  }
  bool pump(const std::function<bool()>& ready) const {
    return test::poll_until([this] { return sender->progress() | receiver->progress(); }, ready);
  }

  const MemoryKind kind;
  const engine::EngineOptions options;
  test::DelayedDomain* nic = nullptr;
  std::unique_ptr<engine::TransferEngine> sender, receiver;
};

// Returns whether a write that was posted before the page was given to somebody else has changed
// it after that.
bool lands_late(const ProviderUnderTest& provider, bool with_fence) {
  Delayed pair(provider);
  constexpr size_t kBytes = 3000;
  std::vector<std::byte> from(kBytes, std::byte{1}), cache(kBytes);
  const auto* source = pair.sender->register_memory(pair.span(from));
  const auto* memory = pair.receiver->register_memory(pair.span(cache));
  const auto* grant = pair.receiver->register_memory(pair.span(cache));
  const auto* region = pair.sender->resolve(pair.receiver->descriptor(grant));
  engine::Request first(engine::Write{source, 0, region, 0, kBytes, {}});
  pair.sender->submit(first);
  CHECK(pair.pump([&] { return first.done(); }));
  CHECK(first.status().ok());
  pair.nic->delay(true);
  engine::Request late(engine::Write{source, 0, region, 0, kBytes, {}});
  pair.sender->submit(late);
  pair.sender->progress();
  CHECK(pair.nic->num_delayed() == 1);
  const auto cancelled = pair.sender->cancel(late);
  CHECK(cancelled->posted.bytes == kBytes);  // cancel comes too late for it
  if (with_fence) pair.receiver->unregister_memory(grant);
  std::ranges::fill(cache, std::byte{7});  // of the next request
  pair.nic->delay(false);
  for (int i = 0; i < 500; ++i) pair.sender->progress(), pair.receiver->progress();
  if (!provider.notices_death) pair.sender->disconnect(region->owner);
  CHECK(pair.pump([&] { return late.done(); }));
  CHECK(with_fence ? ends_refused(provider, late.status().code)
                   : late.status().code == Code::kCancelled);
  if (provider.notices_death) pair.sender->disconnect(region->owner);
  if (!with_fence) pair.receiver->unregister_memory(grant);
  pair.receiver->unregister_memory(memory);
  return std::ranges::count(cache, std::byte{7}) != static_cast<int64_t>(kBytes);
}

TEST_CASE("provider contract: a write delayed past the cancel lands unless its key is withdrawn") {
  for_each_provider([](const ProviderUnderTest& provider) {
    CHECK(lands_late(provider, false));
    CHECK_FALSE(lands_late(provider, true));
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
