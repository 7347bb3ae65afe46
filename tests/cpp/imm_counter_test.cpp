#include "engine/imm_counter.h"

#include <thread>
#include <vector>

#include "doctest/doctest.h"

namespace moe_p2p::engine {
namespace {

using platform::Clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct RecordingSink final : ImmSink {
  void on_imm(const ImmKey& key) noexcept override { keys.push_back(key.pack()); }
  std::vector<uint32_t> keys;
};

TEST_CASE("imm key: packing and unpacking keep every field at its limits") {
  for (const uint32_t communicator : {0u, 1u, ImmKey::kMaxCommunicators - 1}) {
    for (const uint32_t phase : {0u, ImmKey::kMaxPhases - 1}) {
      for (const uint32_t slot : {0u, ImmKey::kMaxSlots - 1}) {
        for (const uint32_t source : {0u, 63u, 64u, ImmKey::kMaxSources - 1}) {
          const uint32_t part = source % ImmKey::kMaxParts;
          const bool is_last = slot == 0;
          const uint32_t imm = ImmKey{communicator, phase, slot, source, part, is_last}.pack();
          CHECK((imm & ImmKey::kKeyedBit) != 0);
          const ImmKey key = ImmKey::unpack(imm);
          CHECK(key.part == part);
          CHECK(key.is_last == is_last);
          CHECK(key.communicator == communicator);
          CHECK(key.phase == phase);
          CHECK(key.slot == slot);
          CHECK(key.source == source);
        }
      }
    }
  }
}

TEST_CASE("imm table: keyed immediates reach the sink of their communicator only") {
  ImmTable table;
  RecordingSink first, second;
  table.set_sink(3, &first);
  table.set_sink(511, &second);
  table.deliver(ImmKey{3, 1, 2, 8'000}.pack());
  table.deliver(ImmKey{511, 0, 0, 1}.pack());
  CHECK(first.keys == std::vector<uint32_t>{ImmKey{3, 1, 2, 8'000}.pack()});
  CHECK(second.keys == std::vector<uint32_t>{ImmKey{511, 0, 0, 1}.pack()});
  CHECK(table.discarded() == 0);
}

TEST_CASE("imm table: an immediate of an unknown communicator is discarded and counted") {
  ImmTable table;
  RecordingSink sink;
  table.set_sink(3, &sink);
  table.deliver(ImmKey{4, 0, 0, 0}.pack());
  table.set_sink(3, nullptr);
  table.deliver(ImmKey{3, 0, 0, 0}.pack());
  CHECK(sink.keys.empty());
  CHECK(table.discarded() == 2);
}

TEST_CASE("imm table: a free-form immediate may come before anybody asks for its counter") {
  ImmTable table;
  for (int i = 0; i < 3; ++i) table.deliver(77);
  ImmCounter* counter = table.find_or_add(77);
  REQUIRE(counter != nullptr);
  CHECK(counter->wait(3, Clock::now()));
  CHECK_FALSE(counter->wait(4, Clock::now() + milliseconds(1)));
}

TEST_CASE(
    "imm table: values with equal hashes keep counters of their own until the table is full") {
  ImmTable table;
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value) table.deliver(value * 4096);
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value) {
    ImmCounter* counter = table.find_or_add(value * 4096);
    REQUIRE(counter != nullptr);
    REQUIRE(counter->count.load(std::memory_order_relaxed) == 1);
  }
  CHECK(table.find_or_add(1) == nullptr);
  table.deliver(1);
  CHECK(table.discarded() == 1);
}

TEST_CASE("imm table: the largest free-form value is counted, a keyed value has no counter") {
  ImmTable table;
  table.deliver(ImmKey::kKeyedBit - 1);
  CHECK(table.find_or_add(ImmKey::kKeyedBit - 1)->count.load(std::memory_order_relaxed) == 1);
  CHECK(table.find_or_add(ImmKey::kKeyedBit) == nullptr);
}

TEST_CASE("imm counter: sleepers wake when the expected count is reached") {
  ImmTable table;
  uint64_t payload = 0;
  std::thread waiter([&] {
    CHECK(table.find_or_add(5)->wait(1000, Clock::now() + seconds(20)));
    CHECK(payload == 42);
  });
  payload = 42;
  for (int i = 0; i < 1000; ++i) table.deliver(5);
  waiter.join();
}

TEST_CASE("imm table: both sides asking for a new value at once get the same counter") {
  for (int round = 0; round < 50; ++round) {
    ImmTable table;
    std::thread other([&] {
      for (uint32_t value = 0; value < 64; ++value) table.find_or_add(value);
    });
    for (uint32_t value = 0; value < 64; ++value) table.deliver(value);
    other.join();
    for (uint32_t value = 0; value < 64; ++value)
      REQUIRE(table.find_or_add(value)->count.load(std::memory_order_relaxed) == 1);
  }
}

}  // namespace
}  // namespace moe_p2p::engine
