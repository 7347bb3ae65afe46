// How fast the software NIC is. Skipped unless asked for:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: loopback*"
// Targets, with a core for each end: 500,000 writes of 8 KiB a second, large writes at the speed of
// memcpy. On fewer cores the two ends take turns and the figures say little.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "provider_harness.h"

namespace moe_p2p::provider_test {
namespace {

using platform::Clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr size_t kBufferBytes = 16 << 20;

// Writes of `bytes` with an immediate each, at most 128 under way, for about half a second.
double writes_per_second(Node& a, PeerId peer, const Memory& source, const MemoryKey& target,
                         uint32_t bytes) {
  uint64_t posted = 0, done = 0;
  const auto start = Clock::now();
  std::array<WorkRequest, 16> batch;
  std::array<Completion, 64> completions;
  Patience patience;
  while (seconds_since(start) < 0.5 || done < posted) {
    size_t n = 0;
    for (; n < batch.size() && posted + n - done < 128 && seconds_since(start) < 0.5; ++n) {
      const uint64_t offset = (posted + n) * bytes % kBufferBytes;
      batch[n] = {.wr_id = posted + n,
                  .local = source.data.data() + offset,
                  .local_key = source.key.local_key,
                  .remote_addr = target.remote_addr + offset,
                  .remote_key = target.remote_key,
                  .bytes = bytes,
                  .peer = peer,
                  .imm = 1,
                  .has_imm = true};
    }
    posted += a.domain->post(std::span(batch).first(n));
    const size_t num_done = a.domain->poll(completions);
    done += num_done;
    patience.polled(num_done);
  }
  return static_cast<double>(done) / seconds_since(start);
}

void report(const std::string& ends, Node& a, PeerId peer, const Memory& source,
            const MemoryKey& target) {
  for (const uint32_t bytes : {64u, 8192u, 65536u, 1u << 20}) {
    const double rate = writes_per_second(a, peer, source, target, bytes);
    MESSAGE(ends, ", ", bytes, " bytes: ", static_cast<uint64_t>(rate), " writes/s, ",
            rate * bytes / 1e9, " GB/s");
  }
}

TEST_CASE("benchmark: loopback writes between two threads" * doctest::skip()) {
  Node a("loopback", ""), b("loopback", "");
  const Memory source(a, kBufferBytes), target(b, kBufferBytes);
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    Completion completions[64];
    Patience patience;
    while (!stop.load(std::memory_order_relaxed)) patience.polled(b.domain->poll(completions));
  });
  report("threads", a, a.connect(b), source, target.key);
  stop.store(true, std::memory_order_relaxed);
  thread.join();
}

TEST_CASE("benchmark: loopback writes between two processes" * doctest::skip()) {
  int channel[2];
  REQUIRE(pipe(channel) == 0);
  const pid_t child = fork();
  if (child == 0) {
    Node b("loopback", "");
    const Memory target(b, kBufferBytes);
    const base::Bytes address = b.domain->address();
    if (write(channel[1], &target.key, sizeof target.key) < 0 ||
        write(channel[1], address.data(), address.size()) < 0)
      _exit(1);
    Completion completions[64];
    for (Patience patience;;) patience.polled(b.domain->poll(completions));
  }
  MemoryKey target;
  base::Bytes address(512);
  REQUIRE(read(channel[0], &target, sizeof target) == sizeof target);
  address.resize(static_cast<size_t>(read(channel[0], address.data(), address.size())));
  Node a("loopback", "");
  const Memory source(a, kBufferBytes);
  report("processes", a, a.domain->connect(address), source, target);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST_CASE("benchmark: loopback round trip of an immediate between two threads" * doctest::skip()) {
  Node a("loopback", ""), b("loopback", "");
  const PeerId to_b = a.connect(b), to_a = b.connect(a);
  constexpr uint32_t kTurns = 100'000;
  const auto run = [](Node& node, PeerId peer, bool first) {
    Completion completions[64];
    uint32_t seen = 0;
    if (first) node.post(make_imm(0, peer, 0));
    while (seen < kTurns) {
      const size_t n = node.domain->poll(completions);
      for (size_t i = 0; i < n; ++i)
        if (completions[i].kind == Completion::Kind::kImmediate && (++seen < kTurns || !first))
          node.post(make_imm(0, peer, 0));
    }
  };
  const auto start = Clock::now();
  std::thread thread([&] { run(b, to_a, false); });
  run(a, to_b, true);
  thread.join();
  MESSAGE("round trip: ", seconds_since(start) / kTurns * 1e9, " ns");
}

}  // namespace
}  // namespace moe_p2p::provider_test
