// The proxy thread: tasks, sleeping and waking, and two engines that talk through their proxies.
#include "proxy/proxy_thread.h"

#include <atomic>
#include <thread>

#include "engine_pair.h"
#include "patience.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using platform::Clock;
using platform::WaitMode;
using proxy::ProxyTask;
using proxy::ProxyThread;

template <typename Ready>
bool eventually(Ready&& ready) {
  return poll_until([] { return false; }, ready);
}

// A doorbell that sends one immediate per ring.
class RingTask : public ProxyTask {
 public:
  RingTask(TransferEngine& engine, const Peer* peer, uint32_t imm)
      : engine_(engine), request_(Imm{peer, imm}) {}

  bool take_doorbells() noexcept override {
    turns.fetch_add(1, std::memory_order_relaxed);
    if (rings.load(std::memory_order_acquire) == taken_ || request_.active()) return false;
    ++taken_;
    engine_.submit_from_poller(request_);
    return true;
  }
  bool publish_arrivals() noexcept override {
    const bool finished = taken_ != sent.load(std::memory_order_relaxed) && request_.done();
    if (finished) sent.store(taken_, std::memory_order_release);
    return finished;
  }

  std::atomic<uint64_t> rings{0}, sent{0}, turns{0};

 private:
  TransferEngine& engine_;
  Request request_;
  uint64_t taken_ = 0;
};

TEST_CASE("proxy: rings of a task become immediates at the peer, in every waiting mode") {
  for (const auto mode : {WaitMode::kSpin, WaitMode::kYield, WaitMode::kSleep}) {
    FakeNetwork network;
    Engines engines(network, {2, 2});
    const auto* peer = engines[0].connect(engines[1].address());
    ProxyThread first(engines[0], {.wait = {.mode = mode}});
    ProxyThread second(engines[1], {.wait = {.mode = mode}});
    RingTask task(engines[0], peer, 4);
    first.add_task(&task);
    for (uint64_t i = 1; i <= 20; ++i) {
      task.rings.store(i, std::memory_order_release);
      platform::notify_all(engines[0].waker());
      REQUIRE(engines[1].imm_table().wait(4, i, soon()));
    }
    REQUIRE(eventually([&] { return task.sent.load(std::memory_order_acquire) == 20; }));
    first.remove_task(&task);
  }
}

TEST_CASE("proxy: sleeps while idle, wakes for a submission and sleeps again") {
  FakeNetwork network;
  Engines engines(network, {1, 1});
  const auto* peer = engines[0].connect(engines[1].address());
  ProxyThread first(engines[0], {});
  ProxyThread second(engines[1], {});
  const auto asleep = [&](size_t i) {
    return engines[i].waker().num_waiters.load(std::memory_order_relaxed) != 0;
  };
  for (uint64_t i = 1; i <= 10; ++i) {
    REQUIRE(eventually([&] { return asleep(0) && asleep(1); }));
    Request request(Imm{peer, 4});
    engines[0].submit(request);
    REQUIRE(request.wait(soon()));
    REQUIRE(engines[1].imm_table().wait(4, i, soon()));
  }
}

TEST_CASE("proxy: a sleeping thread makes no turns") {
  FakeNetwork network;
  Engines engines(network, {1});
  RingTask task(engines[0], nullptr, 0);
  ProxyThread proxy(engines[0], {});
  proxy.add_task(&task);
  auto& waiters = engines[0].waker().num_waiters;
  REQUIRE(eventually([&] { return waiters.load(std::memory_order_relaxed) != 0; }));
  const uint64_t before = task.turns.load(std::memory_order_relaxed);
  // A nap lasts 100 ms and a turn less than 10 us: spinning would make far more turns than that.
  const auto end = Clock::now() + std::chrono::milliseconds(50);
  while (Clock::now() < end) std::this_thread::yield();
  CHECK(task.turns.load(std::memory_order_relaxed) - before < 20);
  proxy.remove_task(&task);
}

// Rung by a device, which cannot notify anybody.
TEST_CASE("proxy: a doorbell rung without a notification is taken while its task must be polled") {
  class DeviceTask final : public RingTask {
   public:
    using RingTask::RingTask;
    bool must_poll() const noexcept override { return polled.load(std::memory_order_relaxed); }
    std::atomic<bool> polled{true};
  };
  FakeNetwork network;
  Engines engines(network, {1, 1});
  const auto* peer = engines[0].connect(engines[1].address());
  ProxyThread first(engines[0], {.wait = {.mode = WaitMode::kSleep}});
  ProxyThread second(engines[1], {});
  DeviceTask task(engines[0], peer, 4);
  first.add_task(&task);
  auto& waiters = engines[0].waker().num_waiters;
  REQUIRE(eventually([&] { return waiters.load(std::memory_order_relaxed) == 0; }));
  size_t num_asleep = 0;
  for (uint64_t i = 1; i <= 20; ++i) {
    // Longer than the thread would stay awake by its policy, and than its patience.
    const auto end = Clock::now() + std::chrono::milliseconds(2);
    while (Clock::now() < end) num_asleep += waiters.load(std::memory_order_relaxed);
    task.rings.store(i, std::memory_order_release);
    REQUIRE(engines[1].imm_table().wait(4, i, soon()));
  }
  CHECK(num_asleep == 0);
  task.polled.store(false, std::memory_order_relaxed);
  CHECK(eventually([&] { return waiters.load(std::memory_order_relaxed) != 0; }));
  first.remove_task(&task);
}

TEST_CASE("proxy: a task is never called again once remove_task returned") {
  FakeNetwork network;
  Engines engines(network, {1});
  ProxyThread proxy(engines[0], {.wait = {.mode = WaitMode::kYield}});
  RingTask staying(engines[0], nullptr, 0);
  proxy.add_task(&staying);
  for (int round = 0; round < 100; ++round) {
    auto first = std::make_unique<RingTask>(engines[0], nullptr, 0);
    auto second = std::make_unique<RingTask>(engines[0], nullptr, 0);
    proxy.add_task(first.get());
    proxy.add_task(second.get());
    REQUIRE(eventually([&] { return second->turns.load(std::memory_order_relaxed) > 0; }));
    proxy.remove_task(first.get());
    first.reset();  // a late call would be a use after free
    proxy.remove_task(second.get());
    second.reset();
  }
  const uint64_t before = staying.turns.load(std::memory_order_relaxed);
  CHECK(eventually([&] { return staying.turns.load(std::memory_order_relaxed) > before; }));
  proxy.remove_task(&staying);
}

TEST_CASE("proxy: a task too many is refused and the others keep running") {
  FakeNetwork network;
  Engines engines(network, {1});
  ProxyThread proxy(engines[0], {});
  std::vector<std::unique_ptr<RingTask>> tasks;
  for (size_t i = 0; i <= ProxyThread::kMaxTasks; ++i)
    tasks.push_back(std::make_unique<RingTask>(engines[0], nullptr, 0));
  for (size_t i = 0; i < ProxyThread::kMaxTasks; ++i) proxy.add_task(tasks[i].get());
  CHECK_THROWS_AS(proxy.add_task(tasks.back().get()), base::Error);
  CHECK_THROWS_AS(proxy.add_task(nullptr), base::Error);
  for (size_t i = 0; i < ProxyThread::kMaxTasks; ++i) proxy.remove_task(tasks[i].get());
}

TEST_CASE("proxy: two engines write to each other while peers come and go") {
  FakeNetwork network({.seed = 13, .limits = {.max_write_bytes = 200, .max_in_flight = 8}});
  Engines engines(network, {2, 2, 1});
  Buffer left(engines[0], pattern(3000, 1)), right(engines[1], pattern(3000, 2));
  Buffer left_in(engines[0], std::vector<std::byte>(3000));
  Buffer right_in(engines[1], std::vector<std::byte>(3000));
  const auto* to_right = engines.region(0, 1, right_in);
  const auto* to_left = engines.region(1, 0, left_in);
  std::vector<std::unique_ptr<ProxyThread>> proxies;
  for (size_t i = 0; i < 3; ++i)
    proxies.push_back(std::make_unique<ProxyThread>(engines[i], proxy::ProxyOptions{}));
  for (uint64_t i = 1; i <= 30; ++i) {
    Request forth(Write{left.handle, 0, to_right, 0, 3000, 1});
    Request back(Write{right.handle, 0, to_left, 0, 3000, 2});
    Request lost(Imm{engines[0].connect(engines[2].address()), 3});
    engines[0].submit(forth);
    engines[0].submit(lost);
    engines[1].submit(back);
    engines[0].disconnect(std::get<Imm>(lost.operation).peer);
    REQUIRE(forth.wait(soon()));
    REQUIRE(back.wait(soon()));
    REQUIRE(lost.wait(soon()));
    REQUIRE(forth.status().ok());
    REQUIRE(back.status().ok());
    REQUIRE(engines[1].imm_table().wait(1, 2 * i, soon()));
    REQUIRE(engines[0].imm_table().wait(2, 2 * i, soon()));
    REQUIRE(right_in.data == left.data);
    REQUIRE(left_in.data == right.data);
  }
}

}  // namespace
}  // namespace moe_p2p::test
