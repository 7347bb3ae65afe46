// The queue of copies, over a driver that copies late: what is done and when, what a failing driver
// leaves, and that threads which only make or drain a queue keep their own context.
#include "platform/cuda_copy.h"

#include <memory>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "fake_driver.h"
#include "patience.h"

namespace moe_p2p::test {
namespace {

using base::Code;
using platform::Clock;
using platform::CopyQueue;

// Put back to what it was at first, or other tests would see what this one did.
struct Driver {
  FakeDriver& fake = FakeDriver::install();
  ~Driver() {
    fake.hold(false);
    fake.fail_copies(0);
    fake.fail_queries(0);
    fake.set_max_queries(12);
  }
};

TEST_CASE("copy queue: a copy is done when its bytes are there, and in order") {
  const Driver driver;
  CopyQueue queue(0);
  std::vector<std::byte> from(40, std::byte{7}), to(40);
  std::vector<uint64_t> tickets;
  for (size_t i = 0; i < 40; ++i) {
    const auto started = queue.copy(&to[i], &from[i], 1);
    REQUIRE(started.status.ok());
    tickets.push_back(started.ticket);
  }
  size_t num_done = 0, num_polls = 0;
  for (; num_done < 40; ++num_polls) {
    queue.poll();
    for (; num_done < 40 && queue.done(tickets[num_done]); ++num_done)
      CHECK(to[num_done] == std::byte{7});
    for (size_t i = num_done + 1; i < 40; ++i) CHECK_FALSE(queue.done(tickets[i]));
  }
  CHECK(num_polls > 40);  // about six queries for each
}

// A kernel that fills the device may wait for one of the others.
TEST_CASE("copy queue: rows that wait for room on the device keep no other copy back") {
  const Driver driver;
  struct alignas(4096) Page {
    abi::CopyWords words{};
    std::byte rest[4096 - sizeof(abi::CopyWords)]{};
  };
  const auto page = std::make_unique<Page>();
  std::vector<std::byte> from(40, std::byte{7}), to(40);
  CopyQueue queue(0, 0, {.function = FakeDriver::kRowKernel, .words = &page->words});
  REQUIRE(queue.copies_lent());
  driver.fake.hold_rows(true);
  queue.announce({1});
  const auto row = queue.copy_lent(&to[0], &from[0], {1});
  queue.launch();
  uint64_t last = row.ticket;
  while (!queue.full({1})) {
    queue.announce({1});
    last = queue.copy_lent(&to[0], &from[0], {1}).ticket;
    queue.launch();
  }
  CHECK_FALSE(queue.full());
  for (size_t i = 1; i < 40; ++i) {
    const auto other = queue.copy(&to[i], &from[i], 1);
    REQUIRE(other.status.ok());
    const auto deadline = soon();
    while (!queue.done(other.ticket) && Clock::now() < deadline) queue.poll();
    CHECK(to[i] == std::byte{7});
    CHECK(queue.done(other.ticket));
    CHECK_FALSE(queue.done(row.ticket));
  }
  driver.fake.hold_rows(false);
  while (!queue.done(last)) queue.poll();
  CHECK(queue.done(row.ticket));
  CHECK(to[0] == std::byte{7});
}

TEST_CASE("copy queue: takes its capacity, and more once some are done") {
  const Driver driver;
  driver.fake.hold(true);
  CopyQueue queue(0);
  std::byte from{1}, to{0};
  uint64_t last = 0;
  while (!queue.full()) last = queue.copy(&to, &from, 1).ticket;
  CHECK(last == CopyQueue::kCapacity);
  queue.poll();
  CHECK(queue.full());
  driver.fake.hold(false);
  for (int round = 0; round < 3 * static_cast<int>(CopyQueue::kCapacity); ++round) {
    while (queue.full()) queue.poll();
    last = queue.copy(&to, &from, 1).ticket;
    REQUIRE(last != 0);
  }
  while (!queue.done(last)) queue.poll();
  CHECK(to == std::byte{1});
}

TEST_CASE("copy queue: draining waits for what was begun, and gives up at its deadline") {
  const Driver driver;
  CopyQueue queue(0);
  std::vector<std::byte> from(30, std::byte{7}), to(30);
  for (size_t i = 0; i < 30; ++i) REQUIRE(queue.copy(&to[i], &from[i], 1).status.ok());
  driver.fake.hold(true);
  CHECK_FALSE(queue.drain(Clock::now()));
  driver.fake.hold(false);
  bool drained = false;
  std::thread([&] { drained = queue.drain(soon()); }).join();  // nobody polls meanwhile
  CHECK(drained);
  CHECK(to == from);
  CHECK(CopyQueue(0).drain(Clock::now()));  // nothing to wait for
}

TEST_CASE("copy queue: a copy that the driver refuses fails alone, a failed query ends the queue") {
  const Driver driver;
  CopyQueue queue(0);
  std::byte from{1}, to{0};
  driver.fake.fail_copies(1);
  CHECK(queue.copy(&to, &from, 1).status == base::Status{Code::kTransport, 1});
  driver.fake.fail_copies(0);
  const auto good = queue.copy(&to, &from, 1);
  REQUIRE(good.status.ok());
  while (!queue.done(good.ticket)) queue.poll();
  const auto lost = queue.copy(&to, &from, 1);
  driver.fake.fail_queries(700);
  queue.poll();
  driver.fake.fail_queries(0);
  queue.poll();
  CHECK_FALSE(queue.done(lost.ticket));
  CHECK(queue.status() == base::Status{Code::kTransport, 700});
  CHECK(queue.copy(&to, &from, 1).status == queue.status());
  CHECK(queue.drain(soon()));
}

TEST_CASE("copy queue: only the polling thread's context changes, and all are given back") {
  const Driver driver;
  const int before = driver.fake.num_contexts(), broken_off = driver.fake.num_broken_off();
  const auto has_context = [] {
    int least = 0, greatest = 0;
    return platform::driver().priority_range(&least, &greatest) == 0;
  };
  std::thread([&] {
    CopyQueue queue(0);
    CHECK(driver.fake.num_contexts() == before + 1);
    CHECK(queue.drain(soon()));
    CHECK_FALSE(has_context());
    std::byte from{1}, to{0};
    CHECK(queue.copy(&to, &from, 1).status.ok());
    CHECK(has_context());
  }).join();
  CHECK(driver.fake.num_contexts() == before);
  CHECK(driver.fake.num_broken_off() == broken_off);
}

TEST_CASE("copy queue: a device that is not there is an error with the driver's text") {
  const Driver driver;
  std::string text;
  try {
    const CopyQueue queue(5);
  } catch (const base::Error& error) {
    text = error.what();
  }
  CHECK(text.find("cuda:5") != std::string::npos);
  CHECK(text.find("(101)") != std::string::npos);
}

}  // namespace
}  // namespace moe_p2p::test
