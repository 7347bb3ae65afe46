// Flags behind writes (sentence 4 of provider/provider.h), for every provider that orders writes.
#include <atomic>

#include "engine/pieces.h"
#include "provider_table.h"
#include "seeds.h"
#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

constexpr size_t kSlot = 3000;

// `data` with room for a flag of each of `num` slots behind them.
struct Flagged : Pair {
  Flagged(const ProviderUnderTest& provider, size_t num)
      : Pair(provider, num * (kSlot + 8)), num_slots(num) {}

  size_t flag_at(uint64_t i) const { return num_slots * kSlot + 8 * i; }
  uint64_t flag(uint64_t i) const {
    auto* word = reinterpret_cast<uint64_t*>(target.data.data() + flag_at(i));
    return std::atomic_ref(*word).load(std::memory_order_acquire);
  }
  WorkRequest with_flag(WorkRequest request, uint64_t value) const {
    request.has_flag = true;
    request.flag_addr = target.key.remote_addr + flag_at(request.wr_id);
    request.flag_value = value;
    return request;
  }

  const size_t num_slots;
};

// Writes `num` slots of many sizes and counts those whose flag was seen before their payload.
size_t num_flags_early(const ProviderUnderTest& provider, uint64_t num) {
  Flagged pair(provider, num);
  std::vector<bool> seen(num);
  size_t num_seen = 0, num_wrong = 0;
  const auto size_of = [](uint64_t i) { return i % 4 == 0 ? 0 : i * 997 % (kSlot + 1); };
  const auto look = [&] {
    for (uint64_t i = 0; i < num; ++i) {
      if (seen[i] || pair.flag(i) != i + 100) continue;
      seen[i] = true;
      ++num_seen;
      num_wrong += !holds(pair.target.data.subspan(i * kSlot, size_of(i)), i);
    }
    return num_seen == num;
  };
  for (uint64_t i = 0; i < num; ++i) {
    fill(pair.source.data.subspan(i * kSlot, size_of(i)), i);
    const auto write = with_imm(pair.write(i, i * kSlot, size_of(i)), static_cast<uint32_t>(i));
    while (!pair.a.post(pair.with_flag(write, i + 100))) {
      pair.a.poll();
      pair.b.poll();
      look();
    }
    look();
  }
  CHECK(pump({&pair.a, &pair.b}, look));
  CHECK(pair.pump_until_done(num));
  CHECK(pair.pump_until_seen(num));
  settle({&pair.a, &pair.b}, 200);
  CHECK(pair.a.done.size() == num);  // one completion for both writes
  CHECK(pair.a.num_failed() == 0);
  CHECK(pair.b.imms.size() == num);
  return num_wrong;
}

TEST_CASE("provider contract: a flag is seen behind the payload of its write") {
  for_each_provider([](const ProviderUnderTest& provider) {
    if (open(provider).domain->orders_writes()) CHECK(num_flags_early(provider, 80) == 0);
  });
}

TEST_CASE(
    "provider contract: a flag is seen behind its payload under many seeds, or it is caught") {
  size_t caught = 0;
  for (uint64_t seed = 1; seed <= num_seeds(40); ++seed) {
    const std::string settings = base::concat("ordered=1,ring_kib=16,seed=", seed);
    CAPTURE(settings);
    CHECK(num_flags_early({"loopback", settings.c_str(), true}, 60) == 0);
    const std::string broken = settings + ",mutate=early_flag";
    if (seed <= 3) caught += num_flags_early({"loopback", broken.c_str(), true}, 60);
  }
  CHECK(caught > 0);
}

TEST_CASE("provider contract: a write that is refused leaves no flag, those behind it do") {
  for_each_provider([](const ProviderUnderTest& provider) {
    if (!open(provider).domain->orders_writes()) return;
    Flagged pair(provider, 20);
    for (uint64_t i = 0; i < 20; ++i) {
      auto write = with_imm(pair.write(i, i * kSlot, 1000), static_cast<uint32_t>(i));
      if (i == 7) write.remote_addr += pair.target.data.size();  // out of its range
      pair.post(pair.with_flag(write, 5));
    }
    CHECK(pair.pump_until_done(20));
    CHECK(pair.pump_until_seen(19));
    settle({&pair.a, &pair.b}, 2000);
    CHECK(pair.a.done.size() == 20);
    CHECK(pair.a.num_failed() == 1);
    CHECK(is_refusal(provider, pair.a.code(7)));
    for (uint64_t i = 0; i < 20; ++i) CHECK(pair.flag(i) == (i == 7 ? 0 : 5));
  });
}

TEST_CASE("verbs: a flag is a small inline write on the queue pair of its payload") {
  FakePair pair("ordered_writes=1,qps_per_peer=3");
  auto writes = pair.writes(20, 1000);
  for (WorkRequest& write : writes) {
    write.has_flag = true;
    write.flag_addr = pair.target.key.remote_addr + FakePair::kBytes - 8;
    write.flag_value = write.imm;
  }
  CHECK(pair.a.domain->post(writes) == 20);
  CHECK(pair.counters().inlined == 20);
  CHECK(pair.pump_until_done(20));
  settle({&pair.a, &pair.b}, 100);
  CHECK(pair.a.done.size() == 20);
  CHECK(pair.a.num_failed() == 0);
}

TEST_CASE(
    "verbs: flags take room in the queue, and whoever has none of either is refused by name") {
  FakePair pair("ordered_writes=1,max_in_flight=5");
  auto writes = pair.writes(9, 100);
  for (WorkRequest& write : writes) {
    write.has_flag = true;
    write.flag_addr = pair.target.key.remote_addr + FakePair::kBytes - 8;
  }
  CHECK(pair.a.domain->post(writes) == 2);
  CHECK(pair.pump_until_done(2));
  for (const char* settings :
       {"ordered_writes=1,inline_bytes=4", "ordered_writes=1,max_in_flight=1"})
    CHECK(contains(text_of_error([&] { Node("verbs", std::string("library=fake,") + settings); }),
                   "ordered_writes=1 takes"));
}

TEST_CASE("pieces: each NIC's flag goes with the last of what it carries") {
  engine::MemoryHandle source;
  std::vector<std::byte> memory(5000);
  source.span = {memory.data(), memory.size()};
  source.keys.resize(2);
  engine::RemoteRegion target;
  target.bytes = 5000;
  target.rails = {{1, 10'000, 3}, {2, 50'000, 4}};
  const engine::Operation write =
      engine::Write{&source, 0, &target, 0, 4000, 9, engine::Flag{4096, 77}};
  for (int nic = 0; nic < 2; ++nic) {
    engine::RailCursor cursor;
    std::vector<WorkRequest> out(8);
    engine::CutContext context{.nic = nic, .num_nics = 2, .max_write_bytes = 1500, .wr_id = 1};
    size_t n = 0;
    while (cursor.in_flight = 0, true) {  // as if each were done
      n = engine::cut(write, context, cursor, out);
      if (cursor.state == engine::RailCursor::State::kExhausted) break;
      for (size_t i = 0; i < n; ++i) CHECK(!out[i].has_flag);
    }
    REQUIRE(n > 0);
    const WorkRequest& last = out[n - 1];
    CHECK(last.has_flag);
    CHECK(last.has_imm);
    CHECK(last.flag_value == 77);
    CHECK(last.flag_addr == (nic == 0 ? 10'000u : 50'000u) + 4096 + 8 * static_cast<size_t>(nic));
    for (size_t i = 0; i + 1 < n; ++i) CHECK(!out[i].has_flag);
  }
}

}  // namespace
}  // namespace moe_p2p::provider_test
