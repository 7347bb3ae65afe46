// The contract of provider/provider.h, for every provider in provider_table.h: what arrives, when
// it may be believed, and what is refused. Coming and going, threads and order: the other file,
// provider_contract_lifetime_test.cpp.
#include <algorithm>
#include <random>
#include <set>

#include "platform/shm.h"
#include "provider_table.h"
#include "seeds.h"

namespace moe_p2p::provider_test {
namespace {

// Posts `num` writes of random sizes with immediates 0..num-1, each to a slot of its own, and
// checks every slot at the moment its immediate is seen. Returns how many were wrong.
size_t run_slots(Pair& pair, uint32_t num, size_t slot_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<size_t> sizes(num);
  for (size_t& size : sizes) size = random() % 4 == 0 ? 0 : random() % (slot_bytes + 1);
  size_t num_wrong = 0;
  pair.b.on_imm = [&](uint32_t imm) {
    if (!holds(pair.target.data.subspan(imm * slot_bytes, sizes[imm]), imm)) ++num_wrong;
  };
  for (uint32_t i = 0; i < num; ++i) {
    fill(pair.source.data.subspan(i * slot_bytes, sizes[i]), i);
    pair.post(with_imm(pair.write(i, i * slot_bytes, sizes[i]), i));
  }
  CHECK(pump({&pair.a, &pair.b},
             [&] { return pair.a.done.size() == num && pair.b.imms.size() == num; }));
  CHECK(pair.a.num_failed() == 0);
  pair.b.on_imm = nullptr;
  return num_wrong;
}

TEST_CASE("provider contract: payload is visible when its immediate is seen") {
  for_each_provider([](const ProviderUnderTest& provider) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      Pair pair(provider, 100 * 3000);
      CHECK(run_slots(pair, 100, 3000, seed) == 0);
    }
  });
}

TEST_CASE("provider contract: payload is visible when its immediate is seen, under many seeds") {
  for (uint64_t seed = 1; seed <= num_seeds(60); ++seed) {
    const std::string settings = base::concat("ring_kib=", 4 << seed % 4, ",seed=", seed);
    CAPTURE(settings);
    Pair pair({"loopback", settings.c_str(), true}, 60 * 2500);
    CHECK(run_slots(pair, 60, 2500, seed) == 0);
  }
}

TEST_CASE("provider contract: a good completion says that the payload is at the target") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64 * 1000);
    for (uint64_t i = 0; i < 64; ++i) {
      fill(pair.source.data.subspan(i * 1000, 1000), i);
      pair.post(pair.write(i, i * 1000, 1000));
    }
    check_slots_when_done(pair, pair.target.data, 64, 1000);
  });
}

TEST_CASE("provider contract: exactly one completion per request, exactly one immediate") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 4096);
    constexpr uint32_t kNum = 1500;
    uint32_t num_imms = 0;
    for (uint32_t i = 0; i < kNum; ++i) {
      WorkRequest request = pair.write(i, i % 64, i % 5 == 0 ? 0 : i % 4000);
      if (i % 3 != 0) {
        request = with_imm(request, i);
        ++num_imms;
      }
      pair.post(request);
    }
    CHECK(pair.pump_until_done(kNum));
    CHECK(pair.pump_until_seen(num_imms));
    settle({&pair.a, &pair.b});
    CHECK(pair.a.done.size() == kNum);
    CHECK(pair.a.status().size() == kNum);  // no id twice
    CHECK(pair.a.num_failed() == 0);
    CHECK(pair.b.imms.size() == num_imms);
    CHECK(std::set<uint32_t>(pair.b.imms.begin(), pair.b.imms.end()).size() == num_imms);
  });
}

TEST_CASE("provider contract: zero bytes need no memory, no key and no address") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64);
    for (uint32_t i = 0; i < 50; ++i) pair.post(make_imm(i, pair.peer, 1000 + i));
    WorkRequest bare;  // neither bytes nor an immediate
    bare.wr_id = 50;
    bare.peer = pair.peer;
    pair.post(bare);
    CHECK(pair.pump_until_done(51));
    CHECK(pair.pump_until_seen(50));
    CHECK(pair.a.num_failed() == 0);
    std::sort(pair.b.imms.begin(), pair.b.imms.end());
    for (uint32_t i = 0; i < 50; ++i) CHECK(pair.b.imms[i] == 1000 + i);
  });
}

TEST_CASE("provider contract: every size and alignment, and not a byte beside it") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 80'000);
    check_ranges(pair, pair.source, pair.target,
                 {1, 2, 3, 63, 64, 65, 255, 1023, 4095, 4096, 4097, 16'383, 16'385, 70'001},
                 {0, 1, 7, 64, 4093}, [&](uint64_t id, size_t offset, size_t size) {
                   return pair.write(id, offset, size);
                 });
  });
}

TEST_CASE("provider contract: many writers to one target") {
  for_each_provider([](const ProviderUnderTest& provider) {
    constexpr size_t kWriters = 8, kWrites = 40, kBytes = 500;
    Node target_node = open(provider);
    Memory target(target_node, kWriters * kWrites * kBytes);
    std::vector<std::unique_ptr<Node>> writers;
    std::vector<std::unique_ptr<Memory>> sources;
    std::vector<PeerId> peers;
    for (size_t w = 0; w < kWriters; ++w) {
      writers.push_back(std::make_unique<Node>(open(provider)));
      sources.push_back(std::make_unique<Memory>(*writers[w], kWrites * kBytes));
      peers.push_back(writers[w]->connect(target_node));
    }
    size_t num_wrong = 0;
    target_node.on_imm = [&](uint32_t imm) {
      if (!holds(target.data.subspan(imm * kBytes, kBytes), imm)) ++num_wrong;
    };
    const auto poll_all = [&] {
      target_node.poll();
      for (auto& writer : writers) writer->poll();
    };
    for (size_t i = 0; i < kWrites; ++i) {
      for (size_t w = 0; w < kWriters; ++w) {
        const auto imm = static_cast<uint32_t>(w * kWrites + i);
        fill(sources[w]->data.subspan(i * kBytes, kBytes), imm);
        const WorkRequest request = with_imm(
            make_write(i, peers[w], *sources[w], i * kBytes, target, imm * kBytes, kBytes), imm);
        while (!writers[w]->post(request)) poll_all();
      }
    }
    CHECK(pump({&target_node}, [&] {
      poll_all();
      return target_node.imms.size() == kWriters * kWrites;
    }));
    CHECK(num_wrong == 0);
  });
}

TEST_CASE("provider contract: the target may be any host memory that was registered") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Node a = open(provider), b = open(provider);
    const PeerId peer = a.connect(b);
    Memory source(a, 300);
    fill(source.data, 9);
    std::byte on_stack[300] = {};
    static std::byte in_data_segment[300];
    std::ranges::fill(in_data_segment, std::byte{0});
    auto shared = platform::SharedMemory::create("test", 300);
    uint64_t wr_id = 0;
    for (const std::span<std::byte> bytes :
         {std::span<std::byte>(on_stack), std::span<std::byte>(in_data_segment), shared.bytes()}) {
      Memory target(b, bytes.first(300));
      post_all(a, {&a, &b}, make_write(wr_id, peer, source, 0, target, 0, 300));
      CHECK(pump({&a, &b}, [&] { return a.done.size() == wr_id + 1; }));
      CHECK(a.code(wr_id++) == Code::kOk);
      CHECK(holds(target.data, 9));
    }
  });
}

TEST_CASE("provider contract: a wrong remote key fails at the poster and changes nothing") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 5000);
    Node other = open(provider);
    Memory elsewhere(other, 5000);
    Memory gone(pair.b, 64);
    gone.unregister();
    fill(pair.source.data, 3);
    std::vector<uint64_t> keys = {0, ~uint64_t{0}, pair.target.key.remote_key + 1,
                                  elsewhere.key.remote_key, gone.key.remote_key};
    for (uint64_t i = 0; i < keys.size(); ++i) {
      WorkRequest request = with_imm(pair.write(i, 0, i % 2 ? 5000 : 64), 77);
      request.remote_key = keys[i];
      pair.post(request);
    }
    CHECK(pair.pump_until_done(keys.size()));
    for (uint64_t i = 0; i < keys.size(); ++i) CHECK(is_refusal(provider, pair.a.code(i)));
    if (!provider.recovers) return;
    const WorkRequest good = with_imm(pair.write(keys.size(), 0, 5000), 78);
    if (provider.drops_connection) {
      CHECK(pair.write_until_done(good));
    } else {
      pair.post(good);
      CHECK(pair.pump_until_done(keys.size() + 1));
    }
    CHECK(pair.pump_until_seen(1));
    settle({&pair.a, &pair.b}, 500);
    CHECK(pair.b.imms == std::vector<uint32_t>{78});
    CHECK(holds(pair.target.data, 3));
  });
}

TEST_CASE("provider contract: a write that does not fit its region leaves no byte behind") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 6000);
    Memory target(pair.b, std::span(pair.target.data).subspan(1000, 4000));
    fill(pair.source.data, 3);
    const struct {
      int64_t offset;
      size_t bytes;
    } bad[] = {{1, 4000}, {3999, 2}, {4001, 1}, {-1, 10}, {-1, 4000}, {1 << 30, 1}, {0, 4001}};
    uint64_t wr_id = 0;
    for (const auto& range : bad) {
      WorkRequest request = make_write(wr_id++, pair.peer, pair.source, 0, target, 0, range.bytes);
      request.remote_addr += static_cast<uint64_t>(range.offset);
      pair.post(with_imm(request, 5));
    }
    CHECK(pair.pump_until_done(std::size(bad)));
    settle({&pair.a, &pair.b}, 500);
    for (uint64_t i = 0; i < wr_id; ++i) CHECK(is_refusal(provider, pair.a.code(i)));
    CHECK(all_zero(pair.target.data));
    CHECK(pair.b.imms.empty());
    if (!provider.recovers) return;
    // The last byte does.
    CHECK(pair.write_until_done(make_write(wr_id, pair.peer, pair.source, 0, target, 3999, 1)));
    CHECK(pair.a.code(wr_id) == Code::kOk);
  });
}

TEST_CASE("provider contract: a source that is not registered is refused, not read") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 1000);
    WorkRequest request = with_imm(pair.write(0, 0, 1000), 1);
    request.local_key = pair.target.key.local_key;
    pair.post(request);
    request = with_imm(pair.write(1, 1, 1000), 1);  // one byte too far
    pair.post(request);
    CHECK(pair.pump_until_done(2));
    CHECK(pair.a.num_failed() == 2);
    settle({&pair.a, &pair.b}, 500);
    CHECK(pair.b.imms.empty());
    CHECK(all_zero(pair.target.data));
  });
}

TEST_CASE("provider contract: completions fit into any array") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 1000);
    pair.a.poll_entries = pair.b.poll_entries = 1;
    const PeerId back = pair.b.connect(pair.a);
    constexpr uint32_t kNum = 300;
    for (uint32_t i = 0; i < kNum; ++i) {  // both kinds of completion at both nodes
      pair.post(with_imm(pair.write(i, 0, 1000), i));
      post_all(pair.b, {&pair.a, &pair.b}, make_imm(i, back, i));
    }
    CHECK(pump({&pair.a, &pair.b}, [&] {
      return pair.a.done.size() + pair.a.imms.size() + pair.b.done.size() + pair.b.imms.size() ==
             4 * kNum;
    }));
    CHECK(pair.a.num_failed() + pair.b.num_failed() == 0);
  });
}

TEST_CASE("provider contract: a full queue takes fewer, and all of them later") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64);
    const uint32_t limit = pair.a.domain->limits().max_in_flight;
    std::vector<WorkRequest> requests;
    for (uint32_t i = 0; i < 2 * limit; ++i) requests.push_back(make_imm(i, pair.peer, i));
    check_full_queue(pair, requests);
    CHECK(pair.pump_until_seen(requests.size()));
  });
}

TEST_CASE("provider contract: more immediates than any number of credits") {
  for_each_provider([](const ProviderUnderTest& provider) {
    Pair pair(provider, 64);
    constexpr uint32_t kNum = 100'000;
    uint64_t sum = 0;
    size_t num_seen = 0;
    pair.b.on_imm = [&](uint32_t imm) {
      sum += imm;
      ++num_seen;
    };
    std::vector<WorkRequest> batch(64);
    std::span<const WorkRequest> to_post;
    uint32_t next = 0;
    CHECK(pump({&pair.a, &pair.b}, [&] {
      if (to_post.empty() && next < kNum) {
        const uint32_t n = std::min<uint32_t>(64, kNum - next);
        for (uint32_t i = 0; i < n; ++i, ++next) batch[i] = make_imm(next, pair.peer, next);
        to_post = std::span(batch).first(n);
      }
      to_post = to_post.subspan(pair.a.domain->post(to_post));
      return num_seen == kNum && pair.a.done.size() == kNum;
    }));
    CHECK(sum == uint64_t{kNum} * (kNum - 1) / 2);
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
