// Whole engines beside bare loops of the calls below them: pages by size, scatter to n peers, and
// two NICs against one. One thread polls all, so that figures are the cost of code and not of the
// scheduler. Skipped unless asked for; benchmarks/bench_fabric.py and bench_rdma.py run it:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: transfers*"
#include <algorithm>
#include <cstring>
#include <deque>
#include <random>

#include "engine_traffic.h"
#include "fabric_bare.h"
#include "verbs_bare.h"

namespace moe_p2p::provider_test {
namespace {

using engine::Request;
using engine::TransferEngine;
using platform::Clock;
using verbs_bare::seconds_since;

constexpr size_t kMemory = fabric_bare::kBufferBytes, kWindow = 64;
constexpr int kTurns = 7;
constexpr uint32_t kImm = 1;

// A stream of writes with immediates to one peer by the calls below the provider. It goes through
// all of its memory, as the engines do.
struct Bare {
  std::function<bool(size_t bytes)> post;  // false: try again after a poll
  std::function<size_t()> poll;            // how many are done
};
Bare bare_copies() {
  const auto num_posted = std::make_shared<size_t>(0), num_shown = std::make_shared<size_t>(0);
  return {[=](size_t bytes) {
            const size_t offset = (*num_posted)++ * bytes % kMemory;
            auto& memory = fabric_bare::buffers();
            std::memcpy(memory.target + offset, memory.source + offset, bytes);
            return true;
          },
          [=] { return *num_posted - std::exchange(*num_shown, *num_posted); }};
}
Bare bare_fabric(const std::string& from, const std::string& to) {
  const auto pair = std::make_shared<fabric_bare::RawPair>(from, to);
  return {[=](size_t bytes) { return pair->post(1, bytes) == 1; }, [=] { return pair->poll(); }};
}
Bare bare_verbs(const char* from, const char* to) {
  const auto pair = std::make_shared<verbs_bare::Bare>(from, to);
  const auto num_posted = std::make_shared<size_t>(0);
  return {[=](size_t bytes) {
            const size_t offset = (*num_posted)++ * bytes % verbs_bare::kMemoryBytes;
            return pair->a.post(pair->b, offset, static_cast<uint32_t>(bytes), true) == 0;
          },
          [=] {
            const uint64_t before = pair->a.sent;
            pair->b.poll();
            pair->a.poll();
            return static_cast<size_t>(pair->a.sent - before);
          }};
}

// Seconds until each of the streams has carried `num` writes.
double bare_s(std::span<const Bare> streams, size_t num, size_t bytes) {
  std::vector<size_t> posted(streams.size()), done(streams.size());
  const auto start = Clock::now();
  for (size_t num_left = num * streams.size(); num_left > 0;) {
    for (size_t i = 0; i < streams.size(); ++i) {
      while (posted[i] < num && posted[i] - done[i] < kWindow && streams[i].post(bytes))
        ++posted[i];
      const size_t shown = streams[i].poll();
      done[i] += shown;
      num_left -= shown;
    }
  }
  return seconds_since(start);
}

// An engine that writes to others: from and to the memory of the bare loops, for where its pages
// lie matters more than what is measured.
class Engines {
 public:
  Engines(const std::string& provider, int num_nics, const std::string& from,
          const std::vector<std::string>& to)
      : from_(test::engine_options(provider, limited(from), num_nics)),
        source_(from_.register_memory({fabric_bare::buffers().source, kMemory})) {
    for (const auto& settings : to) {
      auto& end = ends_.emplace_back(
          std::make_unique<End>(test::engine_options(provider, limited(settings), num_nics)));
      regions_.push_back(from_.resolve(end->engine.descriptor(end->target)));
    }
  }
  // In random order.
  double pages_s(size_t num, size_t page_bytes) {
    std::vector<int64_t> pages(num);
    for (int64_t& page : pages) page = static_cast<int64_t>(next_offset(page_bytes) / page_bytes);
    auto order = pages;
    std::ranges::shuffle(order, std::mt19937(1));
    Request request(engine::WritePages{.source = source_,
                                       .target = regions_[0],
                                       .page_bytes = page_bytes,
                                       .source_pages = {order, page_bytes, 0},
                                       .target_pages = {pages, page_bytes, 0},
                                       .imm = kImm});
    return run({&request});
  }
  double scatter_s(size_t num_peers, size_t bytes) {
    std::vector<engine::Slice> slices;
    for (size_t i = 0; i < num_peers; ++i) {
      const size_t offset = next_offset(bytes);
      slices.push_back({offset, regions_[i], offset, bytes});
    }
    Request request(
        engine::Scatter{.source = source_, .slices = slices, .sharding = {}, .imm = kImm});
    return run({&request}, num_peers);
  }
  double writes_s(size_t num, size_t bytes) {
    std::deque<Request> requests;
    std::vector<Request*> all;
    for (size_t i = 0; i < num; ++i)
      all.push_back(&requests.emplace_back(
          engine::Write{source_, i * bytes, regions_[0], i * bytes, bytes, kImm}));
    return run(all);
  }

 private:
  static std::string limited(const std::string& settings) {  // as many under way as the bare loop
    return settings + (settings.empty() ? "" : ",") + "max_in_flight=64";
  }
  struct End {
    explicit End(const engine::EngineOptions& options)
        : engine(options),
          target(engine.register_memory({fabric_bare::buffers().target, kMemory})) {}
    TransferEngine engine;
    const engine::MemoryHandle* target;
  };
  size_t next_offset(size_t bytes) { return std::exchange(next_, (next_ + bytes) % kMemory); }
  double run(const std::vector<Request*>& requests, size_t num_peers = 1) {
    const auto start = Clock::now();
    for (Request* request : requests) from_.submit(*request);
    for (Request* request : requests) {
      while (!request->done()) {
        from_.progress();
        for (size_t i = 0; i < num_peers; ++i) ends_[i]->engine.progress();
      }
      REQUIRE(request->status().ok());
    }
    return seconds_since(start);
  }

  TransferEngine from_;
  const engine::MemoryHandle* source_;
  std::vector<std::unique_ptr<End>> ends_;
  std::vector<const engine::RemoteRegion*> regions_;
  size_t next_ = kMemory / 2;  // far from where the bare loop is, whose bytes lie in caches
};

// Both in turns, and the best of each: what others do on the machine only ever adds.
template <typename First, typename Second>
void compare(const std::string& what, const std::string& first, const std::string& second,
             double megabytes, First&& first_s, Second&& second_s) {
  double a = first_s(), b = second_s();
  const auto begin = Clock::now();
  for (int turn = 1; turn < kTurns || (turn < 20 * kTurns && seconds_since(begin) < 0.5); ++turn) {
    a = std::min(a, first_s());
    b = std::min(b, second_s());
  }
  MESSAGE(what, ": ", first, " ", megabytes / a, " MB/s, ", second, " ", megabytes / b,
          " MB/s, ratio ", a / b);
}

bool is_there(const std::string& provider, const std::string& settings) {
  try {
    Node(provider, settings);
    return true;
  } catch (const base::Error& error) {
    MESSAGE("skipped: ", std::string(error.what()));
    return false;
  }
}

// A provider between one end and up to four.
struct Fan {
  const char* provider;
  const char* from;
  const char* to;
};
constexpr Fan kFans[] = {
    {"loopback", "", ""},
    {"libfabric", "provider=tcp,interfaces=lo", "provider=tcp,interfaces=lo"},
    {"libfabric", "provider=shm", "provider=shm"},
    {"libfabric", "provider=verbs;ofi_rxm,interfaces=10.77.0.1",
     "provider=verbs;ofi_rxm,interfaces=10.77.0.1"},
    {"verbs", "timeout=18,devices=rxe0", "timeout=18,devices=rxe1"},
};

Bare bare_of(const Fan& fan) {
  if (fan.provider == std::string("verbs")) return bare_verbs("rxe0", "rxe1");
  return fan.provider == std::string("libfabric") ? bare_fabric(fan.from, fan.to) : bare_copies();
}

TEST_CASE("benchmark: transfers, pages by size and scatter to n peers" * doctest::skip()) {
  for (const Fan& fan : kFans) {
    if (!is_there(fan.provider, fan.from)) continue;
    const std::string name = base::concat(fan.provider, *fan.from ? " " : "", fan.from);
    std::vector<Bare> bare;
    for (int i = 0; i < 4; ++i) bare.push_back(bare_of(fan));
    Engines own(fan.provider, 1, fan.from, std::vector<std::string>(4, fan.to));
    for (const size_t bytes : {1024, 8192, 65536}) {
      const size_t num = std::min<size_t>(512, (4 << 20) / bytes);
      compare(
          base::concat(name, ", ", num, " pages of ", bytes, " B"), "bare loop", "engine",
          static_cast<double>(num * bytes) / 1e6,
          [&] { return bare_s(std::span(bare).first(1), num, bytes); },
          [&] { return own.pages_s(num, bytes); });
    }
    for (const size_t num_peers : {1, 2, 4})
      compare(
          base::concat(name, ", scatter of 64 KiB each to ", num_peers, " peers"), "bare loops",
          "engine", static_cast<double>(num_peers * 65536) / 1e6,
          [&] { return bare_s(std::span(bare).first(num_peers), 1, 65536); },
          [&] { return own.scatter_s(num_peers, 65536); });
  }
}

// Two wires: rxe0 to rxe2, rxe1 to rxe3. They need `vm.py --devices 4`; with --netem "rate 40mbit"
// the wires are the limit and not the cores.
struct TwoWires {
  const char* provider;
  std::string from[2], to[2];  // of one NIC, of two
  Bare (*bare)(const TwoWires& wires, int wire);
};
const TwoWires kTwoWires[] = {
    {"verbs",
     {"timeout=18,devices=rxe0", "timeout=18,devices=rxe0:rxe1"},
     {"timeout=18,devices=rxe2", "timeout=18,devices=rxe2:rxe3"},
     [](const TwoWires&, int wire) {
       return wire == 0 ? bare_verbs("rxe0", "rxe2") : bare_verbs("rxe1", "rxe3");
     }},
    {"libfabric",
     {"provider=tcp,interfaces=10.77.0.1", "provider=tcp,interfaces=10.77.0.1:10.77.0.2"},
     {"provider=tcp,interfaces=10.77.0.3", "provider=tcp,interfaces=10.77.0.3:10.77.0.4"},
     [](const TwoWires& wires, int wire) {
       const std::string second = "provider=tcp,interfaces=10.77.0.";
       return wire == 0 ? bare_fabric(wires.from[0], wires.to[0])
                        : bare_fabric(second + "2", second + "4");
     }},
};

TEST_CASE("benchmark: rails, two NICs against one" * doctest::skip()) {
  constexpr size_t kBytes = 1 << 20, kNum = 8, kTotal = kNum * kBytes;
  constexpr double kMegabytes = kTotal / 1e6;
  for (const TwoWires& wires : kTwoWires) {
    if (!is_there(wires.provider, wires.to[0])) continue;
    const std::vector<Bare> bare = {wires.bare(wires, 0), wires.bare(wires, 1)};
    compare(
        base::concat(wires.provider, ", bare loops"), "one wire", "both at once", kMegabytes,
        [&] { return bare_s(std::span(bare).first(1), kNum, kBytes); },
        [&] { return bare_s(bare, kNum / 2, kBytes); });
    Engines one(wires.provider, 1, wires.from[0], {wires.to[0]});
    Engines two(wires.provider, 2, wires.from[1], {wires.to[1]});
    for (const size_t bytes : {kBytes, kTotal})
      compare(
          base::concat(wires.provider, ", writes of ", bytes, " B"), "one NIC", "two NICs",
          kMegabytes, [&] { return one.writes_s(kTotal / bytes, bytes); },
          [&] { return two.writes_s(kTotal / bytes, bytes); });
  }
}

}  // namespace
}  // namespace moe_p2p::provider_test
