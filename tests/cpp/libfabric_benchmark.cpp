// The libfabric provider beside a bare loop of fi_writemsg and fi_cq_read over the same kind of
// endpoint, turn by turn in one run. One thread polls both ends, so that the numbers are the cost
// of the code and not of the scheduler. Skipped unless asked for; benchmarks/bench_fabric.py runs
// it:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: libfabric*"
// Goals: large writes at least 0.95 of the bare loop, posting at most 1.2 times its cost.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <iomanip>
#include <sstream>
#include <thread>

#include "fabric_bare.h"

namespace moe_p2p::provider_test {
namespace {

using platform::Clock;
using namespace fabric_bare;  // NOLINT(google-build-using-namespace)

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// Offers what RawPair does.
class OwnPair {
 public:
  explicit OwnPair(const std::string& settings)
      : a_("libfabric", settings),
        b_("libfabric", settings),
        source_(a_, buffers().source),
        target_(b_, buffers().target),
        peer_(a_.connect(b_)),
        batch_(kMaxWindow) {}
  size_t post(size_t count, size_t bytes) {
    for (size_t i = 0; i < count; ++i) {
      const size_t offset = (next_ + i) % (kBufferBytes / bytes) * bytes;
      batch_[i] = with_imm(make_write(next_ + i, peer_, source_, offset, target_, offset, bytes),
                           static_cast<uint32_t>(next_ + i));
    }
    const size_t posted = a_.domain->post(std::span(batch_).first(count));
    next_ += posted;
    return posted;
  }
  size_t poll() {
    num_imms_ += take(*b_.domain);
    return take(*a_.domain);
  }
  size_t num_imms() const { return num_imms_; }
  Domain& domain() { return *a_.domain; }

 private:
  static size_t take(Domain& domain) {
    Completion completions[64];
    const size_t count = domain.poll(completions);
    for (size_t i = 0; i < count; ++i)
      if (!completions[i].status.ok()) FAIL("a write failed");
    return count;
  }

  Node a_, b_;
  Memory source_, target_;
  PeerId peer_;
  std::vector<WorkRequest> batch_;
  uint64_t next_ = 0;
  size_t num_imms_ = 0;
};

// Bytes per second with `window` writes under way.
template <typename Ends>
double bandwidth(Ends& ends, size_t bytes, size_t window) {
  size_t under_way = 0, num_done = 0;
  const auto start = Clock::now();
  while (seconds_since(start) < 0.15) {
    if (under_way < window) under_way += ends.post(window - under_way, bytes);
    const size_t done = ends.poll();
    num_done += done;
    under_way -= done;
  }
  const double rate = static_cast<double>(num_done * bytes) / seconds_since(start);
  while (under_way > 0) under_way -= ends.poll();
  return rate;
}

// Nanoseconds inside post() per write of 8 KiB, in batches of 64 with nothing else under way.
template <typename Ends>
double posting_ns(Ends& ends) {
  constexpr size_t kBatch = 64;
  double inside = 0;
  size_t num_posted = 0;
  for (const auto begin = Clock::now(); num_posted == 0 || seconds_since(begin) < 0.1;) {
    size_t left = kBatch, under_way = 0;
    while (left > 0) {
      const auto start = Clock::now();
      const size_t posted = ends.post(left, 8192);
      inside += seconds_since(start);
      num_posted += posted;
      left -= posted;
      under_way += posted;
      under_way -= ends.poll();
    }
    while (under_way > 0) under_way -= ends.poll();
  }
  return inside / static_cast<double>(num_posted) * 1e9;
}

// Microseconds from the post to the immediate, one write at a time.
template <typename Ends>
double latency_us(Ends& ends, size_t bytes) {
  std::vector<double> all;
  for (const auto begin = Clock::now(); all.empty() || seconds_since(begin) < 0.1;) {
    const size_t seen = ends.num_imms();
    const auto start = Clock::now();
    while (ends.post(1, bytes) == 0) ends.poll();
    size_t under_way = 1;
    while (ends.num_imms() == seen) under_way -= ends.poll();
    all.push_back(seconds_since(start) * 1e6);
    while (under_way > 0) under_way -= ends.poll();
  }
  return median(all);
}

// Nine turns of each, in turn; "own 5.10 bare 5.00 ratio 1.02".
template <typename Measure>
double compare(const std::string& what, double unit, Measure&& measure) {
  std::vector<double> own, bare, ratios;
  for (int turn = 0; turn < 9; ++turn) {
    bare.push_back(measure(/*is_own=*/false) / unit);
    own.push_back(measure(/*is_own=*/true) / unit);
    ratios.push_back(own.back() / bare.back());
  }
  std::ostringstream line;
  line << std::setprecision(4) << what << ": own " << median(own) << ", bare " << median(bare)
       << ", ratio " << median(ratios);
  MESSAGE(line.str());
  return median(ratios);
}

TEST_CASE("benchmark: libfabric beside a bare loop" * doctest::skip()) {
  const std::pair<std::string, std::string> providers[] = {
      {"tcp", ",interfaces=lo"}, {"shm", ""}, {"verbs;ofi_rxm", ",interfaces=10.77.0.1"}};
  for (const auto& [provider, interfaces] : providers) {
    const std::string settings = "provider=" + provider + interfaces;
    const std::string reason = why_unavailable({.name = "libfabric", .settings = settings.c_str()});
    if (!reason.empty()) {
      MESSAGE("skipped: ", reason);
      continue;
    }
    RawPair raw(settings);
    OwnPair own(settings);
    const struct {
      size_t bytes, window;
    } sizes[] = {{8192, 128}, {65'536, 64}, {1 << 20, 16}, {4 << 20, 4}};
    for (const auto& size : sizes) {
      const std::string what = base::concat(provider, ", GB/s, writes of ", size.bytes, " bytes, ",
                                            size.window, " under way");
      compare(what, 1e9, [&](bool is_own) {
        return is_own ? bandwidth(own, size.bytes, size.window)
                      : bandwidth(raw, size.bytes, size.window);
      });
    }
    compare(provider + ", ns per post of 8 KiB", 1,
            [&](bool is_own) { return is_own ? posting_ns(own) : posting_ns(raw); });
    for (const size_t bytes : {8ul, 8192ul, 262'144ul})
      compare(
          base::concat(provider, ", us from post to immediate, ", bytes, " bytes"), 1,
          [&](bool is_own) { return is_own ? latency_us(own, bytes) : latency_us(raw, bytes); });
  }
}

// Registers and gives back 1 GiB until it ends. Over the fake of EFA each registration takes 200
// ms, with 20 between; libfabric's tcp only notes it.
class Registrar {
 public:
  Registrar(Domain& domain, bool is_fake)
      : domain_(domain), is_fake_(is_fake), thread_([this] { run(); }) {}
  ~Registrar() {
    stop_.store(true);
    thread_.join();
  }
  size_t num_done() const { return num_done_.load(); }

 private:
  static constexpr size_t kBytes = size_t{1} << 30;
  void run() {
    void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const MemorySpan span{static_cast<std::byte*>(memory), kBytes};
    while (!stop_.load()) {
      test::FakeFabric::hold_registrations(is_fake_);
      std::jthread release([this] {
        std::this_thread::sleep_for(std::chrono::milliseconds(is_fake_ ? 200 : 0));
        test::FakeFabric::hold_registrations(false);
      });
      domain_.unregister_memory(domain_.register_memory(span));
      num_done_.fetch_add(1);
      if (is_fake_) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    munmap(memory, kBytes);
  }

  Domain& domain_;
  const bool is_fake_;
  std::atomic<bool> stop_{false};
  std::atomic<size_t> num_done_{0};
  std::thread thread_;
};

struct Traffic {
  double per_s;     // completions
  double pause_ms;  // the longest without one
};

Traffic carry(OwnPair& ends) {
  constexpr size_t kWindow = 64;
  size_t under_way = 0, num_done = 0;
  const auto start = Clock::now();
  auto last = start;
  double pause = 0;
  while (seconds_since(start) < 0.5) {
    if (under_way < kWindow) under_way += ends.post(kWindow - under_way, 8192);
    const size_t done = ends.poll();
    if (done == 0) continue;
    pause = std::max(pause, seconds_since(last));
    last = Clock::now();
    num_done += done;
    under_way -= done;
  }
  pause = std::max(pause, seconds_since(last));
  const double rate = static_cast<double>(num_done) / seconds_since(start);
  while (under_way > 0) under_way -= ends.poll();
  return {rate, pause * 1e3};
}

TEST_CASE("benchmark: registering beside traffic of libfabric" * doctest::skip()) {
  for (const std::string settings :
       {"provider=tcp,interfaces=lo", "provider=efa,interfaces=efa7"}) {
    const ProviderUnderTest provider{.name = "libfabric", .settings = settings.c_str()};
    const std::string reason = why_unavailable(provider);
    if (!reason.empty()) {
      MESSAGE("skipped: ", reason);
      continue;
    }
    test::FakeFabric::use_for(settings);
    OwnPair ends(settings);
    std::vector<double> rates[2], pauses[2];
    size_t num_registrations = 0;
    for (int turn = 0; turn < 9; ++turn) {
      for (const bool registers : {false, true}) {
        std::optional<Registrar> registrar;
        if (registers) registrar.emplace(ends.domain(), provider.settings[9] == 'e');
        const Traffic traffic = carry(ends);
        if (registers) num_registrations += registrar->num_done();
        rates[registers].push_back(traffic.per_s);
        pauses[registers].push_back(traffic.pause_ms);
      }
    }
    MESSAGE(settings, ": ", num_registrations,
            " registrations of 1 GiB in 4.5 s; writes of 8 KiB per s ", median(rates[0]),
            " without, ", median(rates[1]), " beside them; longest pause in ms ", median(pauses[0]),
            " without, ", median(pauses[1]), " beside them");
  }
}

}  // namespace
}  // namespace moe_p2p::provider_test
