#include "fake_driver_kernels.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "fake_driver.h"
#include "fake_driver_memory.h"
#include "kernels/abi/copy.h"
#include "kernels/abi/rows.h"

namespace moe_p2p::test {

struct Kernels::Waiting {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> kernels;
  bool closed = false;

  // The next one; null behind the last.
  std::function<void()> take() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return closed || !kernels.empty(); });
    if (kernels.empty()) return nullptr;
    auto kernel = std::move(kernels.front());
    kernels.pop_front();
    return kernel;
  }
  template <typename Change>
  void set(Change&& change) {
    const std::lock_guard lock(mutex);
    change();
    changed.notify_one();
  }
};

Kernels::Kernels() : waiting_(std::make_shared<Waiting>()) {
  std::thread([waiting = waiting_] {
    while (const auto kernel = waiting->take()) kernel();
  }).detach();
}
Kernels::~Kernels() {
  waiting_->set([this] { waiting_->closed = true; });
}
void Kernels::run(std::function<void()> kernel) {
  waiting_->set([&] { waiting_->kernels.push_back(std::move(kernel)); });
}

namespace {

using Stream = FakeDriver::Stream;

// CUresult
constexpr int kNoContext = 201;
constexpr int kWritesNoWords = 801;

FakeDriver& gpu() { return FakeDriver::install(); }

// What kernels/copy.cu does, by one thread.
void copy_kernel(const abi::CopyParams& p, FakeDriver& f) {
  using Clock = std::chrono::steady_clock;
  auto& ring = *reinterpret_cast<abi::CopyRing*>(p.ring);
  const auto report = [&](uint64_t& word, uint64_t value) {
    std::atomic_ref(word).store(value, std::memory_order_release);
  };
  f.wait_while([](const FakeDriver& driver) { return driver.kernels_out; });
  report(ring.entered, p.launch);
  auto idle_at = Clock::now() + std::chrono::nanoseconds(p.idle_ns);
  for (uint64_t next = p.first; next - p.first < f.kernel_copies;) {
    auto& place = ring.request[next % abi::kCopyRequests];
    const auto word = [](uint64_t& w) {
      return std::atomic_ref(w).load(std::memory_order_acquire);
    };
    const uint64_t check = word(place.check);
    const abi::CopyRequest request{word(place.to), word(place.from), word(place.bytes), check};
    if (!request.is(next)) {
      if (!f.kernels_in && Clock::now() > idle_at) break;
      std::this_thread::yield();
      continue;
    }
    f.locked([&](FakeDriver&) {  // as copies of the engines: writes may be to the same place
      return std::memcpy(reinterpret_cast<void*>(request.to),
                         reinterpret_cast<const void*>(request.from), request.bytes);
    });
    report(ring.done, ++next);
    idle_at = Clock::now() + std::chrono::nanoseconds(p.idle_ns);
  }
  report(ring.left, p.launch);
}

// What kernels/rows.cu does, by one thread.
void row_kernel(const abi::RowsParams& p, FakeDriver& f, uint32_t naps) {
  for (; naps > 0; --naps) std::this_thread::yield();
  f.wait_while([](const FakeDriver& driver) { return driver.rows_held || driver.held; });
  const auto* rows = reinterpret_cast<const abi::RowCopy*>(p.rows);
  f.locked([&](FakeDriver&) {
    for (uint64_t i = 0; i < p.count; ++i) {
      const abi::RowCopy& row = rows[(p.first + i) % abi::kRowCopies];
      std::memcpy(reinterpret_cast<void*>(row.to), reinterpret_cast<const void*>(row.from),
                  row.bytes);
    }
    return 0;
  });
  for (uint64_t& word : reinterpret_cast<abi::CopyWords*>(p.words)->rows_done)
    std::atomic_ref(word).store(p.batch, std::memory_order_release);
}

// Others wait for the words while nobody asks for an event: the stream goes on until the last.
void run_until_written(Stream* stream) {
  const auto goes_on = [&](FakeDriver& f) {
    if (!f.streams.contains(stream)) return false;
    f.advance(*stream);
    return stream->writes =
               std::ranges::any_of(stream->operations, [](const auto& each) { return each.word; });
  };
  while (gpu().locked(goes_on)) {
    gpu().wait_while(
        [&](const FakeDriver& f) { return f.streams.contains(stream) && f.stands_still(*stream); });
    std::this_thread::yield();
  }
}

}  // namespace

int stream_write(void* stream, uint64_t address, uint64_t value, unsigned) {
  if (!has_context()) return kNoContext;
  if (!gpu().writes_words) return kWritesNoWords;
  auto* const it = static_cast<Stream*>(stream);
  const bool writes = gpu().locked([&](FakeDriver&) {
    it->operations.push_back({{}, nullptr, nullptr, reinterpret_cast<uint64_t*>(address), value});
    return std::exchange(it->writes, true);
  });
  if (!writes) std::thread(run_until_written, it).detach();
  return 0;
}

int launch(const void* config, void* function, void** params, void**) {
  struct Config {  // as in csrc/platform/cuda.cpp
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
  };
  if (!has_context()) return kNoContext;
  FakeDriver& f = gpu();
  auto* const stream = static_cast<Stream*>(static_cast<const Config*>(config)->stream);
  const bool of_rows = reinterpret_cast<uint64_t>(function) == FakeDriver::kRowKernel;
  ++(of_rows ? f.row_launches : f.launches);
  const auto ended = std::make_shared<std::atomic<bool>>(false);
  f.locked([&](FakeDriver&) {
    std::function<void()> kernel;
    if (of_rows) {
      const auto naps = static_cast<uint32_t>(stream->random() % (f.max_queries + 1));
      kernel = [&f, p = *static_cast<const abi::RowsParams*>(params[0]), naps] {
        row_kernel(p, f, naps);
      };
    } else {
      kernel = [&f, p = *static_cast<const abi::CopyParams*>(params[0])] { copy_kernel(p, f); };
    }
    stream->operations.push_back({{}, nullptr, ended});
    if (!stream->kernels) stream->kernels = std::make_unique<Kernels>();
    stream->kernels->run([&f, kernel = std::move(kernel), ended] {
      kernel();
      f.change([&](FakeDriver&) { *ended = true; });
    });
    return 0;
  });
  return 0;
}

}  // namespace moe_p2p::test
