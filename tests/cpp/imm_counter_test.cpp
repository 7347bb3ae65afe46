#include "engine/imm_counter.h"

#include <atomic>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "patience.h"

namespace moe_p2p::engine {
namespace {

using platform::Clock;
using std::chrono::milliseconds;

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

TEST_CASE("imm table: a free-form immediate may come before anybody asks for it") {
  ImmTable table;
  CHECK(table.value(77) == 0);
  CHECK(table.wait(77, 0, Clock::now()));
  for (int i = 0; i < 3; ++i) table.deliver(77);
  CHECK(table.value(77) == 3);
  CHECK(table.wait(77, 3, Clock::now()));
  CHECK_FALSE(table.wait(77, 4, Clock::now() + milliseconds(1)));
  CHECK_FALSE(table.wait(78, 1, Clock::now() + milliseconds(1)));
}

TEST_CASE("imm table: values far apart keep counters of their own until the table is full") {
  ImmTable table;
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value) table.deliver(value * 4096);
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value)
    REQUIRE(table.value(value * 4096) == 1);
  table.deliver(1);
  CHECK(table.discarded() == 1);
  CHECK(table.value(1) == 0);
  CHECK_FALSE(table.can_count(1));
  CHECK(table.can_count(4096));
}

TEST_CASE("imm table: a value that is given back counts from zero, and makes room for another") {
  ImmTable table;
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value) table.deliver(value);
  CHECK(table.give_back(7) == 1);
  CHECK(table.value(7) == 0);
  CHECK(table.give_back(7) == 0);
  CHECK(table.can_count(9'999));
  table.deliver(9'999);
  CHECK(table.value(9'999) == 1);
  table.deliver(7);
  CHECK(table.discarded() == 1);
  CHECK(table.give_back(9'999) == 1);
  for (int i = 0; i < 2; ++i) table.deliver(7);
  CHECK(table.value(7) == 2);
  for (uint32_t value = 0; value < ImmTable::kMaxFreeForm; ++value)
    REQUIRE(table.value(value) == (value == 7 ? 2 : 1));
}

TEST_CASE("imm table: one value after the other is counted for the life of an engine") {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr uint32_t kValues = 200'000;
#else
  constexpr uint32_t kValues = 10'000'000;
#endif
  constexpr uint32_t kKept = 1'000;  // of the last ones some are not given back yet
  ImmTable table;
  uint64_t num_given = 0;
  for (uint32_t value = 0; value < kValues; ++value) {
    table.deliver(value);
    if (value >= kKept) num_given += table.give_back(value - kKept).value_or(0);
  }
  CHECK(table.discarded() == 0);
  CHECK(num_given == kValues - kKept);
  for (uint32_t value = kValues - kKept; value < kValues; ++value) REQUIRE(table.value(value) == 1);
}

TEST_CASE("imm table: a value that is waited for is not given back") {
  ImmTable table;
  table.deliver(5);
  std::thread waiter([&] { CHECK(table.wait(5, 2, test::soon())); });
  while (table.give_back(5)) table.deliver(5);  // until the waiter has it
  for (int i = 0; i < 2; ++i) table.deliver(5);
  waiter.join();
  CHECK(table.give_back(5) >= 2);
}

// TSan sees a waiter that leaves without the lock; elsewhere it takes many turns to lose a step.
TEST_CASE("imm table: a value that several threads wait for is given back after the last") {
  ImmTable table;
  table.deliver(5);
  std::vector<std::thread> waiters;
  std::atomic<uint32_t> num_wrong{0};
  for (int i = 0; i < 3; ++i)
    waiters.emplace_back([&] {
      for (int turn = 0; turn < 20'000; ++turn)
        if (!table.wait(5, 1, test::soon())) ++num_wrong;
    });
  for (std::thread& waiter : waiters) waiter.join();
  CHECK(num_wrong == 0);
  CHECK(table.give_back(5) == 1);
}

// Two threads wake each other in turn, with a value that has its counter or gets it then.
TEST_CASE("imm table: each immediate wakes who sleeps for it") {
  const test::OnlyNotified guard;
  for (const bool fresh : {false, true}) {
    ImmTable ping, pong;
    std::atomic<uint32_t> num_late{0};
    const auto turns = [&](ImmTable& mine, ImmTable& theirs, bool begins) {
      for (uint32_t i = 1; i <= 200 && num_late == 0; ++i) {
        const uint32_t value = fresh ? i : 1, expected = fresh ? 1 : i;
        if (begins) theirs.deliver(value);
        const auto wait = [&](platform::Deadline deadline) {
          return mine.wait(value, expected, deadline, test::OnlyNotified::kAtOnce);
        };
        if (!test::OnlyNotified::woken(wait)) ++num_late;
        if (!begins) theirs.deliver(value);
      }
    };
    std::thread other([&] { turns(ping, pong, false); });
    turns(pong, ping, true);
    other.join();
    REQUIRE(num_late == 0);
  }
}

TEST_CASE("imm table: the largest free-form value is counted") {
  ImmTable table;
  table.deliver(ImmKey::kKeyedBit - 1);
  CHECK(table.value(ImmKey::kKeyedBit - 1) == 1);
}

TEST_CASE("imm table: sleepers wake when the expected count is reached") {
  ImmTable table;
  uint64_t payload = 0;
  std::thread waiter([&] {
    CHECK(table.wait(5, 1000, test::soon()));
    CHECK(payload == 42);
  });
  payload = 42;
  for (int i = 0; i < 1000; ++i) table.deliver(5);
  waiter.join();
}

TEST_CASE("imm table: users wait for and give back what the polling thread counts") {
  constexpr uint32_t kValues = 20'000;
  ImmTable table;
  std::thread poller([&] {
    for (uint32_t value = 0; value < kValues; ++value) {
      while (!table.can_count(value)) std::this_thread::yield();
      table.deliver(value);
    }
  });
  std::atomic<uint32_t> num_wrong{0};
  std::vector<std::thread> users;
  for (uint32_t first : {0u, 1u})
    users.emplace_back([&table, &num_wrong, first] {
      for (uint32_t value = first; value < kValues; value += 2)
        if (!table.wait(value, 1, test::soon()) || table.give_back(value) != 1) ++num_wrong;
    });
  poller.join();
  for (std::thread& user : users) user.join();
  CHECK(num_wrong == 0);
  CHECK(table.discarded() == 0);
}

}  // namespace
}  // namespace moe_p2p::engine
