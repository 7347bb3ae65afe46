// What the engine itself costs, with the null provider. Skipped unless asked for:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: engine*"
// Targets: at most 150 ns per page of a 10,000-page WritePages from submit to done; at most 1 us at
// the median from a doorbell's ring to the provider's first post, 5 us from a layer's signal.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "engine/gate.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using platform::Clock;
using platform::WaitMode;

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

uint64_t percentile(std::vector<uint64_t> values, size_t percent) {
  std::sort(values.begin(), values.end());
  return values[(values.size() - 1) * percent / 100];
}

EngineOptions null_options(int num_nics) {
  EngineOptions options;
  options.provider = "null";
  options.num_nics = num_nics;
  return options;
}

TEST_CASE("benchmark: engine, 10,000 pages from submit to done" * doctest::skip()) {
  constexpr size_t kPages = 10'000, kPageBytes = 4096;
  for (const int num_nics : {1, 2, 4}) {
    TransferEngine engine(null_options(num_nics));
    std::vector<std::byte> data(kPages * kPageBytes);
    const auto* handle = engine.register_memory({data.data(), data.size()});
    const auto* region = engine.resolve(engine.descriptor(handle));
    std::vector<int64_t> from(kPages), to(kPages);
    std::iota(from.begin(), from.end(), 0);
    to = from;
    std::shuffle(from.begin(), from.end(), std::mt19937(1));
    std::shuffle(to.begin(), to.end(), std::mt19937(2));
    Request request(
        WritePages{handle, region, kPageBytes, {from, kPageBytes, 0}, {to, kPageBytes, 0}, 1});
    std::vector<uint64_t> ns;
    for (int i = 0; i < 300; ++i) {
      const auto start = now_ns();
      engine.submit(request);
      while (!request.done()) engine.progress();
      ns.push_back((now_ns() - start) * 10 / kPages);
    }
    MESSAGE(num_nics, " NICs: ", static_cast<double>(percentile(ns, 50)) / 10,
            " ns per page (p50), ", static_cast<double>(percentile(ns, 99)) / 10, " (p99)");
    CHECK(percentile(ns, 50) <= 1500);
  }
}

TEST_CASE("benchmark: engine, one write from submit to done" * doctest::skip()) {
  TransferEngine engine(null_options(2));
  std::vector<std::byte> data(1 << 20);
  const auto* handle = engine.register_memory({data.data(), data.size()});
  const auto* region = engine.resolve(engine.descriptor(handle));
  Request request(Write{handle, 0, region, 0, data.size(), 1});
  std::vector<uint64_t> ns;
  for (int i = 0; i < 200'000; ++i) {
    const auto start = now_ns();
    engine.submit(request);
    while (!request.done()) engine.progress();
    ns.push_back(now_ns() - start);
  }
  MESSAGE(percentile(ns, 50), " ns (p50), ", percentile(ns, 99), " ns (p99)");
}

// Rings once per round from another thread and reads from the counters when the provider was
// posted.
TEST_CASE("benchmark: engine, doorbell to first post" * doctest::skip()) {
  class Task final : public proxy::ProxyTask {
   public:
    Task(TransferEngine& engine, Operation operation) : engine_(engine), request_(operation) {}
    bool take_doorbells() noexcept override {
      if (bell.load(std::memory_order_acquire) == taken_ || request_.active()) return false;
      ++taken_;
      engine_.submit_from_poller(request_);
      return true;
    }
    bool publish_arrivals() noexcept override {
      if (done.load(std::memory_order_relaxed) == taken_ || !request_.done()) return false;
      done.store(taken_, std::memory_order_release);
      return true;
    }
    std::atomic<uint64_t> bell{0}, done{0};

   private:
    TransferEngine& engine_;
    Request request_;
    uint64_t taken_ = 0;
  };

  for (const auto mode : {WaitMode::kSpin, WaitMode::kYield, WaitMode::kSleep}) {
    TransferEngine engine(null_options(2));
    std::vector<std::byte> data(1 << 20);
    const auto* handle = engine.register_memory({data.data(), data.size()});
    const auto* region = engine.resolve(engine.descriptor(handle));
    proxy::ProxyThread proxy(engine, {.wait = {.mode = mode}});
    Task task(engine, Write{handle, 0, region, 0, data.size(), 1});
    proxy.add_task(&task);
    std::vector<uint64_t> ns;
    for (uint64_t i = 1; i <= 3000; ++i) {
      const auto pause = Clock::now() + std::chrono::microseconds(20);
      while (Clock::now() < pause) {
      }
      const auto rung = now_ns();
      task.bell.store(i, std::memory_order_release);
      if (mode == WaitMode::kSleep) platform::notify_all(engine.waker());
      while (task.done.load(std::memory_order_acquire) != i) {
      }
      // NIC 0 is posted first, and only once per round.
      ns.push_back(engine.counters()[0].last_post_ns - rung);
    }
    proxy.remove_task(&task);
    const std::string names[] = {"spin", "yield", "sleep"};
    MESSAGE(names[static_cast<size_t>(mode)], ": ", percentile(ns, 50), " ns (p50), ",
            percentile(ns, 99), " ns (p99)");
  }
}

// As a GPU stores it: nobody is notified. All layers of a step wait, for two receivers.
TEST_CASE("benchmark: engine, from a layer's signal to the first post" * doctest::skip()) {
  constexpr size_t kLayers = 61, kReceivers = 2, kPages = 64;
  for (const auto mode : {WaitMode::kSpin, WaitMode::kYield, WaitMode::kSleep}) {
    TransferEngine engine(null_options(2));
    std::vector<std::byte> data(1 << 20);
    const auto* handle = engine.register_memory({data.data(), data.size()});
    const auto* region = engine.resolve(engine.descriptor(handle));
    std::vector<int64_t> pages(kPages);
    std::iota(pages.begin(), pages.end(), 0);
    uint64_t words[kLayers] = {};
    std::vector<Gate> gates;
    for (const uint64_t& word : words) gates.emplace_back(&word, false);
    std::vector<std::unique_ptr<Request>> requests;
    for (size_t i = 0; i < kLayers * kReceivers; ++i) {
      requests.push_back(std::make_unique<Request>(
          WritePages{handle, region, 4096, {pages, 8192, 0}, {pages, 8192, 0}, 1}));
      requests.back()->gate = &gates[i % kLayers];
    }
    proxy::ProxyThread proxy(engine, {.wait = {.mode = mode}});
    std::vector<uint64_t> ns;
    for (uint64_t step = 1; step <= 50; ++step) {
      for (auto& request : requests) {
        request->gate_value = step;
        engine.submit(*request);
      }
      for (size_t layer = 0; layer < kLayers; ++layer) {
        const auto pause = Clock::now() + std::chrono::microseconds(100);
        while (Clock::now() < pause) {
        }
        const auto stored = now_ns();
        std::atomic_ref(words[layer]).store(step, std::memory_order_release);
        while (engine.counters()[0].last_post_ns < stored) {
        }
        ns.push_back(engine.counters()[0].last_post_ns - stored);
        for (size_t i = layer; i < requests.size(); i += kLayers)
          while (!requests[i]->done()) {
          }
      }
    }
    const std::string names[] = {"spin", "yield", "sleep"};
    MESSAGE(names[static_cast<size_t>(mode)], ": ", percentile(ns, 50), " ns (p50), ",
            percentile(ns, 99), " ns (p99), ", ns.size(), " signals");
  }
}

}  // namespace
}  // namespace moe_p2p::test
