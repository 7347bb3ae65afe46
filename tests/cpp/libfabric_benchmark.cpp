// The libfabric provider beside a bare loop of fi_writemsg and fi_cq_read over the same kind of
// endpoint, turn by turn in one run. One thread polls both ends, so that the numbers are the cost
// of the code and not of the scheduler. Skipped unless asked for; benchmarks/bench_fabric.py runs
// it:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: libfabric*"
// Goals: large writes at least 0.95 of the bare loop, posting at most 1.2 times its cost.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "provider/libfabric/peers.h"
#include "provider/libfabric/regions.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

using platform::Clock;
using namespace provider::libfabric;  // NOLINT(google-build-using-namespace): all of the ABI

constexpr size_t kBufferBytes = size_t{32} << 20;
constexpr size_t kMaxWindow = 256;

// Both kinds write from and to the same memory: where pages lie matters more than what is measured.
struct alignas(1 << 21) Buffers {
  std::byte source[kBufferBytes], target[kBufferBytes];
};
Buffers& buffers() {
  static const auto instance = std::make_unique<Buffers>();
  return *instance;
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

// One end of the bare loop.
struct RawEnd {
  RawEnd(const Config& config, std::span<std::byte> memory)
      : buffer(memory),
        session(open_session(config, 0)),
        regions(session, "raw"),
        peers(session, "raw"),
        key(regions.add({buffer.data(), buffer.size()})) {}

  // Completions of own writes; immediates are added to num_imms.
  size_t poll() {
    CqEntry entries[64];
    const ssize_t result = session.cq->ops->read(session.cq.get(), entries, 64);
    if (result == -EAGAIN) return 0;
    if (result < 0) FAIL("a write failed");
    size_t num_done = 0;
    for (ssize_t i = 0; i < result; ++i) ++(entries[i].flags & kRemoteWrite ? num_imms : num_done);
    return num_done;
  }

  const std::span<std::byte> buffer;
  Session session;
  Regions regions;
  Peers peers;
  const MemoryKey key;
  size_t num_imms = 0;
};

// Both kinds offer: post `count` writes of `bytes`, as many as go; poll both ends.
class RawPair {
 public:
  explicit RawPair(const std::string& settings)
      : a_(parse_config(settings), buffers().source),
        b_(parse_config(settings), buffers().target),
        contexts_(kMaxWindow) {
    peer_ = a_.peers.find(a_.peers.connect(b_.peers.own_address()))->fi_addr;
    descriptor_ = a_.regions.find(a_.key.local_key)->descriptor;
  }
  size_t post(size_t count, size_t bytes) {
    size_t i = 0;
    for (; i < count; ++i) {
      const size_t offset = next_ % (kBufferBytes / bytes) * bytes;
      const iovec local{a_.buffer.data() + offset, bytes};
      const RmaIov remote{b_.key.remote_addr + offset, bytes, b_.key.remote_key};
      const RmaMessage message{
          &local, &descriptor_, 1, peer_, &remote, 1, &contexts_[next_ % kMaxWindow], next_};
      const uint64_t flags = kCompletion | kDeliveryComplete | kRemoteCqData;
      const ssize_t result =
          a_.session.endpoint->rma->writemsg(a_.session.endpoint.get(), &message, flags);
      if (result == -EAGAIN) break;
      if (result != 0) FAIL("a write was refused");
      next_ = (next_ + 1) & 0xffffffff;
    }
    return i;
  }
  size_t poll() {
    b_.poll();
    return a_.poll();
  }
  size_t num_imms() const { return b_.num_imms; }

 private:
  RawEnd a_, b_;
  std::vector<Context> contexts_;
  uint64_t peer_ = 0, next_ = 0;
  void* descriptor_ = nullptr;
};

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
  for (int turn = 0; turn < 50; ++turn) {
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
  for (int i = 0; i < 500; ++i) {
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
  for (const std::string provider : {"tcp", "shm"}) {
    const std::string settings =
        "provider=" + provider + (provider == "tcp" ? ",interfaces=lo" : "");
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

}  // namespace
}  // namespace moe_p2p::provider_test
