// The contract of provider/provider.h, fourth part: reads. What a good completion says, what is
// refused, and what memory that is given back may still see.
#include <algorithm>
#include <random>

#include "engine/transfer_engine.h"
#include "provider_table.h"
#include "seeds.h"

namespace moe_p2p::provider_test {
namespace {

TEST_CASE("provider contract: a good completion of a read says that the bytes are here") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 200 * 700);
    for (uint64_t i = 0; i < 200; ++i) fill(pair.target.data.subspan(i * 700, 700), i);
    for (uint64_t i = 0; i < 200; ++i) pair.post(pair.read(i, i * 700, 700));
    check_slots_when_done(pair, pair.source.data, 200, 700);
    settle({&pair.a, &pair.b}, 500);
    CHECK(pair.a.num_failed() == 0);
    CHECK(pair.a.status().size() == 200);
    CHECK(pair.a.done.size() == 200);
    CHECK(pair.b.done.empty());
    CHECK(pair.b.imms.empty());
  });
}

TEST_CASE("provider contract: reads of every size and alignment, and not a byte beside") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 80'000);
    check_ranges(pair, pair.target, pair.source, {1, 3, 63, 65, 255, 1023, 4096, 4097, 70'001},
                 {0, 1, 64, 4093}, [&](uint64_t id, size_t offset, size_t size) {
                   return pair.read(id, offset, size);
                 });
  });
}

// Of one pair's memory the first half is written to the peer and the second half read from it.
void run_mixed(const ProviderUnderTest& provider, uint64_t seed) {
  constexpr size_t kSlot = 2500, kNum = 120, kHalf = kSlot * kNum;
  Pair pair(provider, 2 * kHalf);
  std::mt19937_64 random(seed);
  size_t num_wrong = 0;
  uint32_t num_imms = 0;
  std::vector<size_t> sizes(2 * kNum);
  for (size_t& size : sizes) size = 1 + random() % kSlot;
  pair.b.on_imm = [&](uint32_t imm) {
    if (!holds(pair.target.data.subspan(imm * kSlot, sizes[imm]), imm)) ++num_wrong;
  };
  for (uint64_t i = 0; i < kNum; ++i) {
    const uint64_t read = kNum + i;
    fill(pair.source.data.subspan(i * kSlot, sizes[i]), i);
    fill(pair.target.data.subspan(read * kSlot, sizes[read]), read);
    pair.post(with_imm(pair.write(i, i * kSlot, sizes[i]), static_cast<uint32_t>(i)));
    ++num_imms;
    pair.post(pair.read(read, read * kSlot, sizes[read]));
  }
  CHECK(pair.pump_until_done(2 * kNum));
  CHECK(pair.pump_until_seen(num_imms));
  CHECK(pair.a.num_failed() == 0);
  CHECK(num_wrong == 0);
  for (uint64_t i = kNum; i < 2 * kNum; ++i)
    if (!holds(pair.source.data.subspan(i * kSlot, sizes[i]), i)) ++num_wrong;
  CHECK(num_wrong == 0);
}

TEST_CASE("provider contract: reads among writes with immediates") {
  for_each_provider([](const ProviderUnderTest& provider) { run_mixed(provider, 1); });
}

TEST_CASE("provider contract: reads among writes with immediates, under many seeds") {
  for (uint64_t seed = 1; seed <= num_seeds(40); ++seed) {
    const std::string settings = base::concat("ring_kib=", 4 << seed % 4, ",seed=", seed);
    CAPTURE(settings);
    run_mixed({"loopback", settings.c_str(), true}, seed);
  }
}

TEST_CASE("provider contract: both ends read from each other and take one completion at a time") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64 * 1000);
    const PeerId back = pair.b.connect(pair.a);
    Memory landing(pair.b, 64 * 1000), origin(pair.a, 64 * 1000);
    pair.a.poll_entries = pair.b.poll_entries = 1;
    fill(pair.target.data, 1);
    fill(origin.data, 2);
    for (uint64_t i = 0; i < 64; ++i) {
      pair.post(pair.read(i, i * 1000, 1000));
      post_all(pair.b, {&pair.a, &pair.b},
               make_read(i, back, landing, i * 1000, origin, i * 1000, 1000));
    }
    CHECK(pump({&pair.a, &pair.b},
               [&] { return pair.a.done.size() == 64 && pair.b.done.size() == 64; }));
    CHECK(pair.a.num_failed() + pair.b.num_failed() == 0);
    CHECK(holds(pair.source.data, 1));
    CHECK(holds(landing.data, 2));
  });
}

TEST_CASE("provider contract: a read of what the peer did not register is refused") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 5000);
    Memory part(pair.b, std::span(pair.target.data).subspan(1000, 3000));
    Memory gone(pair.b, 64);
    gone.unregister();
    fill(pair.target.data, 3);
    uint64_t num = 0;
    const auto bad = [&](uint64_t key, uint64_t addr, size_t bytes) {
      WorkRequest request = pair.read(num++, 0, bytes);
      request.remote_key = key;
      request.remote_addr = addr;
      pair.post(request);
    };
    bad(gone.key.remote_key, gone.key.remote_addr, 64);
    bad(~uint64_t{0}, pair.target.key.remote_addr, 64);
    bad(part.key.remote_key, part.key.remote_addr + 1, 3000);
    bad(part.key.remote_key, part.key.remote_addr - 1, 1);
    CHECK(pair.pump_until_done(num));
    for (uint64_t i = 0; i < num; ++i) CHECK(is_refusal(provider, pair.a.code(i)));
    CHECK(all_zero(pair.source.data));
    if (!provider.recovers) return;
    CHECK(pair.write_until_done(make_read(num, pair.peer, pair.source, 0, part, 2999, 1)));
    CHECK(pair.source.data[0] == pair.target.data[3999]);
  });
}

TEST_CASE("provider contract: a read into memory that is not registered changes nothing") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 1000);
    fill(pair.target.data, 3);
    WorkRequest request = pair.read(0, 0, 1000);
    request.local_key = pair.target.key.local_key;
    pair.post(request);
    pair.post(pair.read(1, 1, 1000));  // one byte too far
    CHECK(pair.pump_until_done(2));
    CHECK(pair.a.num_failed() == 2);
    settle({&pair.a, &pair.b}, 500);
    CHECK(all_zero(pair.source.data));
  });
}

TEST_CASE("provider contract: no read reaches memory after unregistering has returned") {
  for_each_provider([](const ProviderUnderTest& provider) {
    for (const bool answers : {true, false}) {
      CAPTURE(answers);
      Pair pair(provider, 8 * 3000);
      fill(pair.target.data, 1);
      for (uint64_t i = 0; i < 8; ++i) pair.post(pair.read(i, i * 3000, 3000));
      if (answers) CHECK(pair.pump_until_done(3));
      bool kept = false;
      try {
        pair.source.unregister();
      } catch (const base::Error& error) {
        kept = error.code() == Code::kTimeout;
        // Only who cannot take a read back, and only while the peer does not answer.
        CHECK(kept);
        CHECK(provider.drops_connection);
        CHECK(contains(error.what(), "must not be freed"));
      }
      if (provider.takes_unpolled || !provider.drops_connection) CHECK_FALSE(kept);
      std::ranges::fill(pair.source.data, std::byte{0});
      CHECK(pair.pump_until_done(8));
      settle({&pair.a, &pair.b}, 500);
      if (!kept) CHECK(all_zero(pair.source.data));
    }
  });
}

TEST_CASE("provider contract: a peer that is disconnected completes its reads, others go on") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 20 * 1000);
    Node c = open(provider);
    Memory other(c, 1000);
    fill(other.data, 5);
    const PeerId to_c = pair.a.connect(c);
    for (uint64_t i = 0; i < 10; ++i) pair.post(pair.read(i, i * 1000, 1000));
    pair.a.domain->disconnect(pair.peer);
    post_all(pair.a, {&pair.a, &pair.b, &c},
             make_read(10, to_c, pair.source, 19'000, other, 0, 1000));
    CHECK(pump({&pair.a, &pair.b, &c}, [&] { return pair.a.done.size() == 11; }));
    CHECK(pair.a.code(10) == Code::kOk);
    CHECK(holds(pair.source.data.subspan(19'000, 1000), 5));
  });
}

TEST_CASE("provider contract: a full queue takes fewer reads, and all of them later") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 4096);
    fill(pair.target.data, 4);
    const uint32_t limit = pair.a.domain->limits().max_in_flight;
    std::vector<WorkRequest> requests;
    for (uint32_t i = 0; i < 2 * limit; ++i) requests.push_back(pair.read(i, (i * 64) % 4096, 64));
    check_full_queue(pair, requests);
    const size_t num_read = std::min<size_t>(requests.size() * 64, 4096);
    CHECK(holds(pair.source.data.first(num_read), 4));
  });
}

// As of the case on immediates in provider_contract_gpu_test.cpp.
TEST_CASE("provider contract: a read into GPU memory is visible to its readers when it is done") {
  for_each_provider([](const ProviderUnderTest& provider) {
    if (provider.memory != MemoryKind::kCuda) return;
    auto& driver = test::FakeDriver::install();
    for (const int ordering : {0, 200}) {
      CAPTURE(ordering);
      driver.locked([&](test::FakeDriver& f) { f.writes_ordering = ordering; });
      engine::EngineOptions options{
          .provider = provider.name, .num_nics = 1, .settings = provider.settings};
      test::FakeFabric::use_for(provider.settings);
      engine::TransferEngine a(options), b(options);
      std::vector<std::byte> landing(5000), origin(5000);
      fill(origin, 7);
      const auto* here = a.register_memory({landing.data(), 5000, MemoryKind::kCuda, 0});
      const auto* there = b.register_memory({origin.data(), 5000, MemoryKind::kCuda, 0});
      driver.place(landing, 0, 200);
      engine::Request read(engine::Read{here, 0, a.resolve(b.descriptor(there)), 0, 5000});
      a.submit(read);
      for (int turns = 0; turns < 1'000'000 && !read.done(); ++turns) a.progress(), b.progress();
      CHECK(read.done());
      CHECK(read.status().ok());
      CHECK(holds(landing, 7));
      driver.take_back(landing);
      driver.locked([](test::FakeDriver& f) { f.writes_ordering = 200; });
    }
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
