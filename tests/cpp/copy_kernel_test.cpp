// The queue of copies with a copy kernel beside the engines: who carries what, what is left behind
// by a kernel that leaves, who waits for it. The kernel is a thread of fake_driver.h.
#include "platform/copy_kernel.h"

#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "fake_driver.h"
#include "patience.h"
#include "platform/cuda_copy.h"

namespace moe_p2p::test {
namespace {

using base::Code;
using platform::Clock;
using platform::CopyQueue;

constexpr uint64_t kFunction = 1;

struct Driver {
  FakeDriver& fake = FakeDriver::install();
  ~Driver() {
    fake.keep_kernels_out(false);
    fake.keep_kernels_in(false);
    fake.let_kernels_leave_after(~uint64_t{0});
    fake.fail_queries(0);
    fake.hold(false);
  }
};

// A queue and memory to copy, value i to place i.
struct Job {
  CopyQueue queue{0, kFunction};
  std::vector<uint64_t> from, to;

  explicit Job(size_t num) : from(num), to(num) {
    for (size_t i = 0; i < num; ++i) from[i] = i + 1;
  }
  uint64_t copy(size_t i) {
    while (queue.full()) queue.poll();
    const auto started = queue.copy(reinterpret_cast<std::byte*>(&to[i]),
                                    reinterpret_cast<const std::byte*>(&from[i]), 8);
    REQUIRE(started.status.ok());
    return started.ticket;
  }
  void finish(uint64_t ticket) {
    const auto deadline = soon();
    while (!queue.done(ticket) && Clock::now() < deadline) queue.poll();
    REQUIRE(queue.done(ticket));
  }
  // Copies place 0 until a copy needs no engine: the kernel is there.
  void await_kernel(FakeDriver& fake) {
    const auto deadline = soon();
    for (uint64_t before = ~uint64_t{0}; before != fake.num_copies();) {
      REQUIRE(Clock::now() < deadline);
      before = fake.num_copies();
      finish(copy(0));
    }
  }
};

TEST_CASE("copy kernel: engines carry until it is on the device, then it does") {
  const Driver driver;
  driver.fake.keep_kernels_out(true);
  Job job(1000);
  const uint64_t before = driver.fake.num_copies();
  for (size_t i = 0; i < 5; ++i) job.finish(job.copy(i));
  CHECK(driver.fake.num_copies() == before + 5);
  driver.fake.keep_kernels_in(true);  // where the machine is slow it would leave between two copies
  driver.fake.keep_kernels_out(false);
  job.await_kernel(driver.fake);
  const uint64_t by_engines = driver.fake.num_copies();
  uint64_t last = 0;
  for (size_t i = 5; i < 1000; ++i) last = job.copy(i);
  job.finish(last);
  CHECK(job.to == job.from);
  CHECK(driver.fake.num_copies() == by_engines);
  driver.fake.keep_kernels_in(false);
}

TEST_CASE("copy kernel: long copies are for the engines") {
  const Driver driver;
  std::vector<std::byte> from(1 << 20, std::byte{3}), to(1 << 20);
  Job job(1);
  job.await_kernel(driver.fake);
  const uint64_t before = driver.fake.num_copies();
  const auto started = job.queue.copy(to.data(), from.data(), from.size());
  REQUIRE(started.status.ok());
  job.finish(started.ticket);
  CHECK(driver.fake.num_copies() == before + 1);
  CHECK(to == from);
}

TEST_CASE("copy kernel: what it leaves behind is carried all the same, and in order") {
  const Driver driver;
  for (const uint64_t num_copies : {0, 1, 7, 100}) {
    CAPTURE(num_copies);
    driver.fake.let_kernels_leave_after(num_copies);
    Job job(2000);
    uint64_t num_done = 0;
    std::vector<uint64_t> tickets;
    for (size_t i = 0; i < 2000; ++i) {
      tickets.push_back(job.copy(i));
      if (i % 3 == 0) job.queue.poll();
      for (; num_done < tickets.size() && job.queue.done(tickets[num_done]); ++num_done)
        CHECK(job.to[num_done] == num_done + 1);
    }
    job.finish(tickets.back());
    CHECK(job.to == job.from);
  }
}

TEST_CASE("copy kernel: it leaves a device that has nothing for it, and comes back") {
  const Driver driver;
  Job job(1);
  job.await_kernel(driver.fake);
  const uint64_t launches = driver.fake.num_launches();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  job.await_kernel(driver.fake);
  CHECK(driver.fake.num_launches() > launches);
}

TEST_CASE("copy kernel: draining waits for its copies, and closing for itself") {
  const Driver driver;
  const int broken_off = driver.fake.num_broken_off();
  {
    Job job(200);
    job.await_kernel(driver.fake);
    for (size_t i = 0; i < 200; ++i) job.copy(i);
    bool drained = false;
    std::thread([&] {
      while (!(drained = job.queue.drain(soon()))) {
      }
    }).join();
    job.queue.poll();
    CHECK(drained);
    CHECK(job.to == job.from);
  }
  CHECK(driver.fake.num_broken_off() == broken_off);
}

TEST_CASE("copy kernel: a device that fails ends the queue") {
  const Driver driver;
  std::vector<std::byte> long_copy(1 << 20);  // as long as it may be copied
  Job job(1);
  job.await_kernel(driver.fake);
  const auto lost = job.queue.copy(long_copy.data(), long_copy.data(), long_copy.size());
  REQUIRE(lost.status.ok());
  driver.fake.fail_queries(700);
  job.queue.poll();
  CHECK(job.queue.status() == base::Status{Code::kTransport, 700});
  CHECK_FALSE(job.queue.done(lost.ticket));
  CHECK_FALSE(job.queue.copy(long_copy.data(), long_copy.data(), 8).status.ok());
  driver.fake.fail_queries(0);
}

}  // namespace
}  // namespace moe_p2p::test
