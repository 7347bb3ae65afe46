// What the verbs provider costs beside a bare loop of the library's own calls, on the same devices
// in the same run, in turns. Skipped unless asked for; benchmarks/bench_rdma.py runs it:
//   $(python tests/cpp/build.py --optimize) --no-skip -tc="benchmark: verbs*"
// Targets: large writes at least 95% of the bare loop's rate; posting a page of 8 KiB at most 1.2
// times a bare post_send.
#include <algorithm>
#include <utility>

#include "verbs_bare.h"
#include "verbs_fake.h"

namespace moe_p2p::provider_test {
namespace {

using namespace verbs_bare;  // NOLINT(google-build-using-namespace)

constexpr const char* kDevices[] = {"rxe0", "rxe1"};
// Of several rounds: what others do on the machine only ever adds.
double best(const std::vector<double>& values) { return *std::ranges::min_element(values); }

struct Ours {
  Ours()
      : a("verbs", base::concat("timeout=18,devices=", kDevices[0])),
        b("verbs", base::concat("timeout=18,devices=", kDevices[1])),
        from(a, kMemoryBytes),
        to(b, kMemoryBytes),
        peer(a.connect(b)),
        back(b.connect(a)) {}
  // The harness's Node keeps what it has seen in maps; here it is only counted.
  static void poll(Node& node, uint64_t& sent, uint64_t& seen) {
    Completion completions[32];
    const size_t num = node.domain->poll(completions);
    for (size_t i = 0; i < num; ++i) {
      REQUIRE(completions[i].status.ok());
      (completions[i].kind == Completion::Kind::kImmediate ? seen : sent) += 1;
    }
  }
  void poll_a() { poll(a, a_sent, a_seen); }
  void poll_b() { poll(b, b_sent, b_seen); }
  WorkRequest write(uint64_t offset, uint32_t size, bool imm) const {
    WorkRequest request = make_write(0, peer, from, offset, to, offset, size);
    request.has_imm = imm;
    return request;
  }
  double run(uint32_t num, uint32_t size, bool imm) {
    const uint64_t sent = a_sent + num, seen = b_seen + (imm ? num : 0);
    std::vector<WorkRequest> batch;
    const auto start = Clock::now();
    for (uint32_t posted = 0; a_sent < sent || b_seen < seen;) {
      batch.clear();
      const uint64_t done = a_sent + num - sent;
      for (uint32_t i = posted; i < num && i - done < kWindow; ++i)
        batch.push_back(write((uint64_t{i} * size) % (kMemoryBytes - size), size, imm));
      posted += static_cast<uint32_t>(a.domain->post(batch));
      poll_a();
      if (imm) poll_b();
    }
    return seconds_since(start);
  }
  double ping_pong(uint32_t num, uint32_t size) {
    const WorkRequest forth = write(0, size, true);
    const WorkRequest reply = with_imm(make_write(0, back, to, 0, from, 0, size), 1);
    const auto start = Clock::now();
    for (uint32_t i = 0; i < num; ++i) {
      const uint64_t at_b = b_seen + 1, at_a = a_seen + 1;
      REQUIRE(a.post(forth));
      while (b_seen < at_b) poll_b();
      REQUIRE(b.post(reply));
      while (a_seen < at_a) poll_a();
    }
    while (!a.domain->idle() || !b.domain->idle()) poll_a(), poll_b();
    return seconds_since(start) / num / 2;
  }
  double post_pages(uint32_t num) {
    std::vector<WorkRequest> pages;
    for (uint32_t i = 0; i < num; ++i) pages.push_back(write(uint64_t{i} * 8192, 8192, false));
    const uint64_t sent = a_sent + num;
    const auto start = Clock::now();
    REQUIRE(a.domain->post(pages) == num);
    const double seconds = seconds_since(start);
    while (a_sent < sent) poll_a();
    return seconds / num;
  }
  Node a, b;
  Memory from, to;
  PeerId peer, back;
  uint64_t a_sent = 0, a_seen = 0, b_sent = 0, b_seen = 0;
};

bool devices_there() {
  try {
    Node("verbs", base::concat("devices=", kDevices[0]));
    return true;
  } catch (const base::Error& error) {
    MESSAGE("skipped: ", error.what());
    return false;
  }
}

TEST_CASE("benchmark: verbs, beside a bare loop on the same devices" * doctest::skip()) {
  if (!devices_there()) return;
  Bare bare(kDevices[0], kDevices[1]);
  Ours ours;
  const auto in_turns = [](int rounds, auto&& first, auto&& second) {
    std::vector<double> a, b;
    for (int i = 0; i < rounds; ++i) a.push_back(first()), b.push_back(second());
    return std::pair(best(a), best(b));
  };
  for (const bool imm : {false, true}) {
    for (const uint32_t size : {8192u, 65536u, 1u << 20}) {
      const uint32_t num = std::max(32u, (8u << 20) / size);
      const auto [theirs, own] = in_turns(
          7, [&] { return bare.run(num, size, imm); }, [&] { return ours.run(num, size, imm); });
      const double bytes = double(num) * size / 1e6;
      MESSAGE(std::string(imm ? "write with immediate " : "write "), size, " B: bare ",
              bytes / theirs, " MB/s, provider ", bytes / own, " MB/s, ", 100 * theirs / own, " %");
    }
  }
  for (const uint32_t size : {8u, 8192u, 65536u}) {
    const auto [theirs, own] = in_turns(
        7, [&] { return bare.ping_pong(50, size); }, [&] { return ours.ping_pong(50, size); });
    MESSAGE(size, " B with immediate, one way: bare ", theirs * 1e6, " us, provider ", own * 1e6,
            " us, ", own / theirs, " times");
  }
  const auto [bare_post, own_post] =
      in_turns(15, [&] { return bare.post_pages(64); }, [&] { return ours.post_pages(64); });
  MESSAGE("posting a page of 8 KiB, 64 at a time: bare ", bare_post * 1e9, " ns, provider ",
          own_post * 1e9, " ns, ", own_post / bare_post, " times");
}

// Without a device: what the provider adds to the driver's own work, which here is nearly none. The
// last write of each chain completes at the next poll.
uint64_t last_posted = kReceiveId;
int post_nothing(Qp*, SendWr* wr, SendWr**) {
  while (wr->next) wr = wr->next;
  last_posted = wr->wr_id;
  return 0;
}
int poll_nothing(Cq*, int, Wc* wc) {
  if (last_posted == kReceiveId) return 0;
  *wc = {};
  wc->wr_id = std::exchange(last_posted, kReceiveId);
  return 1;
}

TEST_CASE("benchmark: verbs, posting without a device" * doctest::skip()) {
  test::FakeVerbs::install();
  Node b("verbs", "library=fake"), a("verbs", "library=fake");
  Memory from(a, 1 << 20), to(b, 1 << 20);
  const PeerId peer = a.connect(b);
  auto& ops = test::FakeVerbs::newest_context()->ops;
  std::vector<WorkRequest> pages(64, make_write(0, peer, from, 0, to, 0, 8192));
  const auto real_post = std::exchange(ops.post_send, post_nothing);
  const auto real_poll = std::exchange(ops.poll_cq, poll_nothing);
  std::vector<double> ns;
  Completion completions[64];
  for (int i = 0; i < 2000; ++i) {
    const auto start = Clock::now();
    REQUIRE(a.domain->post(pages) == pages.size());
    REQUIRE(a.domain->poll(completions) == pages.size());
    ns.push_back(seconds_since(start) * 1e9 / static_cast<double>(pages.size()));
  }
  ops.post_send = real_post;
  ops.poll_cq = real_poll;
  MESSAGE("own work per write, posted and completed, 64 at a time: ", best(ns), " ns");
}

}  // namespace
}  // namespace moe_p2p::provider_test
