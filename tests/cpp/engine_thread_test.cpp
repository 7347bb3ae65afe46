// The engine between threads: submitters, control calls and closures beside a polling thread.
#include <atomic>
#include <thread>

#include "engine_traffic.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using platform::Clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Polls both engines of a pair until the end of the scope, one thread each. As a ProxyThread it has
// made a turn before others may call: without a polling thread their calls would do its work.
class Pollers {
 public:
  Pollers(Engines& engines, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, &engine = engines[i]] {
        engine.progress();
        num_running_.fetch_add(1);
        while (!stop_.load(std::memory_order_acquire))
          if (!engine.progress()) std::this_thread::yield();
        engine.detach_poller();
      });
    }
    while (num_running_.load() < count) std::this_thread::yield();
  }
  ~Pollers() {
    stop_.store(true, std::memory_order_release);
    for (auto& thread : threads_) thread.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::atomic<size_t> num_running_{0};
  std::vector<std::thread> threads_;
};

TEST_CASE("engine: several threads submit and wait at once") {
  constexpr size_t kThreads = 4, kWrites = 100, kBytes = 300;
  FakeNetwork network({.seed = 11, .limits = {.max_write_bytes = 128, .max_in_flight = 16}});
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(kThreads * kWrites * kBytes));
  Buffer target(engines[1], std::vector<std::byte>(source.data.size()));
  const auto* region = engines.region(0, 1, target);
  Pollers pollers(engines, 2);
  std::vector<std::thread> submitters;
  for (size_t t = 0; t < kThreads; ++t) {
    submitters.emplace_back([&, t] {
      for (size_t i = 0; i < kWrites; ++i) {
        const uint64_t offset = (t * kWrites + i) * kBytes;
        Request request(Write{source.handle, offset, region, offset, kBytes, 3});
        engines[0].submit(request);
        REQUIRE(request.wait(soon()));  // and is destroyed at once
        REQUIRE(request.status().ok());
      }
    });
  }
  CHECK(engines[1].imm_table().wait(3, kThreads * kWrites * 2, soon()));
  CHECK(target.data == source.data);
  for (auto& submitter : submitters) submitter.join();
}

TEST_CASE("engine: a wait ends at its deadline and the request stays usable") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  const auto* peer = engines[0].connect(engines[1].address());
  network.nic(0).hold(true);
  Pollers pollers(engines, 2);
  Request request(Imm{peer, 1});
  engines[0].submit(request);
  CHECK_FALSE(request.wait(Clock::now() + milliseconds(2)));
  CHECK_FALSE(engines[1].imm_table().wait(1, 1, Clock::now() + milliseconds(2)));
  CHECK(request.active());
  network.nic(0).hold(false);
  CHECK(request.wait(soon()));
  CHECK(engines[1].imm_table().wait(1, 1, soon()));
}

TEST_CASE("engine: closures run on the polling thread, after earlier submissions") {
  FakeNetwork network;
  Engines engines(network, {1, 1});
  const auto* peer = engines[0].connect(engines[1].address());
  Pollers pollers(engines, 2);
  std::thread::id poller;
  engines[0].run_on_poller([&] { poller = std::this_thread::get_id(); }, soon());
  CHECK(poller != std::this_thread::get_id());
  for (int i = 0; i < 100; ++i) {
    Request request(Imm{peer, 1});
    engines[0].submit(request);
    bool inside = false;
    const auto nested = [&] {
      engines[0].run_on_poller([&] { inside = engines[0].idle() == request.done(); }, soon());
    };
    engines[0].run_on_poller(nested, soon());
    REQUIRE(inside);
    REQUIRE(request.wait(soon()));
  }
  CHECK_THROWS_WITH(engines[0].run_on_poller([] { throw std::runtime_error("told"); }, soon()),
                    "told");
}

TEST_CASE("engine: a closure may drop a peer whose requests came after it in the same mail") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100, 9));
  const auto* region = engines.region(0, 1, target);
  Request late(Write{source.handle, 0, region, 0, 100, 1});
  const Closure drop = [&] {
    engines[0].submit(late);  // in the mailbox when the peer goes
    engines[0].disconnect(region->owner);
  };
  Pollers pollers(engines, 1);
  engines[0].run_on_poller(drop, soon());
  CHECK(late.wait(soon()));
  CHECK(late.status().code == base::Code::kClosed);
}

TEST_CASE("engine: a closure that nobody takes times out and never runs") {
  FakeNetwork network;
  Engines engines(network, {1});
  bool ran = false;
  try {
    engines[0].run_on_poller([&] { ran = true; }, Clock::now() + milliseconds(2));
    FAIL("no Error");
  } catch (const base::Error& error) {
    CHECK(error.code() == base::Code::kTimeout);
  }
  engines.turn();
  CHECK_FALSE(ran);
}

TEST_CASE("engine: several threads make control calls at once where nobody polls") {
  FakeNetwork network;
  Engines engines(network, {1});
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> users;
  for (int i = 0; i < 2; ++i)
    users.emplace_back([&] {
      Request request;
      for (int call = 0; call < 100; ++call) num_wrong += engines[0].cancel(request).has_value();
    });
  for (auto& user : users) user.join();
  CHECK(num_wrong == 0);
}

TEST_CASE("engine: peers leave and memory goes while other requests are running") {
  FakeNetwork network({.seed = 12, .limits = {.max_write_bytes = 64, .max_in_flight = 8}});
  Engines engines(network, {2, 2, 2});
  Buffer source(engines[0], pattern(4096));
  Buffer steady(engines[1], std::vector<std::byte>(4096));
  Buffer fleeting(engines[2], std::vector<std::byte>(4096));
  const auto* to_steady = engines.region(0, 1, steady);
  const auto descriptor = engines[2].descriptor(fleeting.handle);
  Pollers pollers(engines, 3);
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop.load(std::memory_order_acquire)) {
      Request request(Write{source.handle, 0, to_steady, 0, 4096, 1});
      engines[0].submit(request);
      REQUIRE(request.wait(soon()));
      REQUIRE(request.status().ok());
    }
  });
  for (int round = 0; round < 40; ++round) {
    std::vector<std::byte> scratch = pattern(4096, 5);
    const auto* handle = engines[0].register_memory({scratch.data(), scratch.size()});
    const auto* region = engines[0].resolve(descriptor);
    Request first(Write{handle, 0, region, 0, 4096, 2});
    Request second(Write{source.handle, 0, region, 0, 4096, 2});
    engines[0].submit(first);
    engines[0].submit(second);
    if (round % 2 == 0) engines[0].unregister_memory(handle);
    engines[0].disconnect(region->owner);
    for (Request* request : {&first, &second}) {
      REQUIRE(request->wait(soon()));  // done well or failed, but done
      const auto code = request->status().code;
      REQUIRE((code == base::Code::kOk || code == base::Code::kClosed ||
               code == base::Code::kTransport));  // kTransport: the source went first
    }
    if (round % 2 != 0) engines[0].unregister_memory(handle);
  }
  stop.store(true, std::memory_order_release);
  worker.join();
}

TEST_CASE("engine: control calls work after the polling thread has ended") {
  FakeNetwork network;
  Engines engines(network, {2, 2});
  Buffer source(engines[0], pattern(100)), target(engines[1], pattern(100, 9));
  const auto* region = engines.region(0, 1, target);
  {
    Pollers pollers(engines, 2);
    Request request(Write{source.handle, 0, region, 0, 100, 1});
    engines[0].submit(request);
    REQUIRE(request.wait(soon()));
  }
  Request mailed(Imm{region->owner, 1});
  engines[0].submit(mailed);
  engines[0].disconnect(region->owner);
  CHECK(mailed.done());
  CHECK(mailed.status().code == base::Code::kClosed);
  engines[0].unregister_memory(source.handle);
}

}  // namespace
}  // namespace moe_p2p::test
