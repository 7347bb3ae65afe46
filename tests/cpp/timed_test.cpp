// The timed NIC: what arrives when, by a clock of the test. That it keeps the contract for memory
// that no window names is in provider_contract_*.
#include "provider/loopback/timed.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include "fake_driver.h"
#include "provider/loopback/link_model.h"
#include "provider/loopback/test_hooks.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

using provider::LoopbackControl;
using provider::loopback::LinkModel;
using provider::loopback::parse_timed_config;
using test::FakeDriver;

int64_t test_time = 0;
int64_t read_test_time() { return test_time; }

// Two NICs that go by test_time, and memory at both; the target is mapped at the source.
struct TimedPair {
  explicit TimedPair(const std::string& settings, size_t bytes = 1 << 20)
      : a("timed", settings), b("timed", settings), source(a, bytes), target(b, bytes) {
    test_time = 1'000'000;
    for (Node* node : {&a, &b})
      dynamic_cast<LoopbackControl&>(*node->domain).use_clock(read_test_time);
    a.domain->map_remote(target.key.remote_key, target.span());
    peer = a.connect(b);
  }
  ~TimedPair() { a.domain->map_remote(target.key.remote_key, {}); }

  WorkRequest write(uint64_t wr_id, size_t bytes) const {
    return make_write(wr_id, peer, source, 0, target, 0, bytes);
  }
  // Polls both NICs until nothing moves any more at this time.
  void poll_at(int64_t time) {
    test_time = time;
    for (int quiet = 0; quiet < 4; ++quiet)
      if (a.poll() + b.poll() != 0) quiet = 0;
  }

  Node a, b;
  Memory source, target;
  PeerId peer = 0;
};

// Two NICs of GPU memory that go by test_time.
std::array<std::unique_ptr<Node>, 2> timed_gpus(const std::string& settings) {
  test_time = 1'000'000;
  std::array<std::unique_ptr<Node>, 2> nodes;
  for (auto& node : nodes) {
    node = std::make_unique<Node>("timed", settings, 0, MemoryKind::kCuda);
    dynamic_cast<LoopbackControl&>(*node->domain).use_clock(read_test_time);
  }
  nodes[0]->maps_windows = false;
  return nodes;
}

constexpr const char* kPlain = "gbps=8,latency_us=10,post_us=0,mwrites=1000000";  // 1 byte per ns
constexpr int64_t kStart = 1'000'000, kHeader = 64;

TEST_CASE("timed: an immediate comes when the model says, its completion one way later") {
  TimedPair pair(kPlain);
  pair.a.post(with_imm(pair.write(1, 50'000), 7));
  const int64_t arrives = kStart + 50'000 + kHeader + 10'000;
  pair.poll_at(arrives - 1);
  CHECK(pair.b.imms.empty());
  pair.poll_at(arrives);
  CHECK(pair.b.imms == std::vector<uint32_t>{7});
  CHECK(pair.a.done.empty());
  pair.poll_at(arrives + 9'999);
  CHECK(pair.a.done.empty());
  pair.poll_at(arrives + 10'000);
  CHECK(pair.a.code(1) == Code::kOk);
}

TEST_CASE("timed: a write to a window carries nothing, any other its payload") {
  TimedPair pair(kPlain);
  Memory other(pair.b, 4096);
  fill(pair.source.data.first(4096), 3);
  pair.a.post(pair.write(1, 4096));
  pair.a.post(make_write(2, pair.peer, pair.source, 0, other, 0, 4096));
  pair.poll_at(kStart + 1'000'000);
  CHECK(pair.a.code(1) == Code::kOk);
  CHECK(pair.a.code(2) == Code::kOk);
  CHECK(all_zero(pair.target.data));
  CHECK(holds(other.data, 3));
}

TEST_CASE("timed: a write that does not fit is refused") {
  TimedPair pair(kPlain, 4096);
  Memory large(pair.a, 1 << 20);
  WorkRequest request = pair.write(1, 4096);
  request.local = large.data.data();
  request.local_key = large.key.local_key;
  request.bytes = 8192;
  pair.a.post(with_imm(request, 1));
  pair.poll_at(kStart + 1'000'000);
  CHECK(pair.a.code(1) == Code::kRemoteAccess);
  CHECK(pair.b.imms.empty());
}

TEST_CASE("timed: each write costs a post and keeps the link for a message at least") {
  LinkModel posts(8, 10, /*post_us=*/0.5, /*message_us=*/0);
  CHECK(posts.transmit(kStart, 0) == kStart + 500 + 10'000);
  CHECK(posts.transmit(kStart, 0) == kStart + 1'000 + 10'000);
  CHECK(posts.transmit(kStart, 100, /*first=*/false) == kStart + 1'100 + 10'000);
  LinkModel messages(8, 10, 0, /*message_us=*/2);
  CHECK(messages.transmit(kStart, 64) == kStart + 2'000 + 10'000);
  CHECK(messages.transmit(kStart, 3'000) == kStart + 5'000 + 10'000);
  CHECK(messages.backlog_ns(kStart + 1'000) == 4'000);
}

TEST_CASE("timed: urgent writes wait for little of what lower classes send") {
  TimedPair pair(kPlain, 16 << 20);
  const PeerId lower = pair.a.domain->connect_for(pair.b.domain->address(), 2, 0);
  WorkRequest bulk = pair.write(1, 16 << 20);
  bulk.peer = lower;
  pair.a.post(with_imm(bulk, 1));
  pair.poll_at(kStart + 100'000);
  const int64_t posted = test_time;
  pair.a.post(with_imm(pair.write(2, 1'000), 2));
  // Behind one fragment of 64 KiB, and what was on the link before it.
  int64_t time = posted;
  while (pair.b.imms.empty() && time < posted + 1'000'000) pair.poll_at(time += 1'000);
  CHECK(pair.b.imms == std::vector<uint32_t>{2});
  CHECK(time - posted <= 65'536 + kHeader + 5'000 + 1'000 + kHeader + 10'000 + 1'000);
  // The lower class has all of the link but that: 16 MiB at 1 byte per ns.
  while (pair.b.imms.size() < 2 && time < kStart + 30'000'000) pair.poll_at(time += 1'000);
  CHECK(pair.b.imms.size() == 2);
  CHECK(time - kStart <= (16 << 20) * 1.01 + 20'000);
}

TEST_CASE("timed: lower classes alone go at once; beside urgent writes in parts, by GPUs, too") {
  for (const bool urgent_before : {false, true}) {
    CAPTURE(urgent_before);
    FakeDriver& fake = FakeDriver::install();
    const std::string settings = base::concat(kPlain, ",row_kernel=", FakeDriver::kRowKernel);
    const auto [a_node, b_node] = timed_gpus(settings);
    Node &a = *a_node, &b = *b_node;
    constexpr size_t kBytes = 512 << 10;
    Memory source(a, kBytes), target(b, kBytes);
    fill(source.data, 3);
    a.domain->map_remote(target.key.remote_key, target.span(), true);
    const PeerId lower = a.domain->connect_for(b.domain->address(), 2, 0);
    const auto poll_at = [&](int64_t time) {
      test_time = time;
      for (int quiet = 0; quiet < 10; ++quiet) {
        if (fake.runs_by_itself()) quiet = 0, std::this_thread::yield();  // in real time
        if (a.poll() + b.poll() != 0) quiet = 0;
      }
    };
    constexpr int64_t kStep = 5'000;
    PeerId peer = urgent_before ? a.connect(b) : PeerId{};
    const int64_t posted = test_time;
    const uint64_t before = fake.num_row_launches();
    a.post(with_imm(make_write(2, lower, source, 0, target, 0, kBytes), 2));
    poll_at(posted + 1'000);
    const uint64_t launches = fake.num_row_launches() - before;
    if (!urgent_before) peer = a.connect(b);
    a.post(with_imm(make_write(3, peer, source, 0, target, 0, 64), 3));
    int64_t time = posted;
    const auto arrived = [&](uint32_t imm) { return std::ranges::count(b.imms, imm) != 0; };
    while (!arrived(3) && time < posted + 5'000'000) poll_at(time += kStep);
    const int64_t whole = kBytes + 10'000, part = 65'536 + 5'000 + 10'000;
    CHECK((urgent_before ? time - posted <= part + 2 * kStep : time - posted >= whole));
    CHECK(launches == 1);
    while (!arrived(2) && time < posted + 5'000'000) poll_at(time += kStep);
    CHECK(arrived(2));
    CHECK(std::ranges::equal(source.data, target.data));
    CHECK((fake.num_row_launches() - before > 4) == urgent_before);
    a.domain->map_remote(target.key.remote_key, {});
  }
}

TEST_CASE("timed: what lower classes have in a GPU's stream stays short, however slow the GPU is") {
  FakeDriver& fake = FakeDriver::install();
  const std::string settings = base::concat("gbps=400,row_kernel=", FakeDriver::kRowKernel);
  const auto [a_node, b_node] = timed_gpus(settings);
  Node &a = *a_node, &b = *b_node;
  constexpr size_t kBytes = 8 << 20;
  Memory source(a, kBytes), target(b, kBytes);
  fill(source.data, 3);
  a.domain->map_remote(target.key.remote_key, target.span(), true);
  static_cast<void>(a.connect(b));
  const PeerId lower = a.domain->connect_for(b.domain->address(), 2, 0);
  fake.hold(true);
  const uint64_t launches = fake.num_row_launches(), before = fake.num_copies();
  a.post(with_imm(make_write(1, lower, source, 0, target, 0, kBytes), 1));
  const auto poll = [&] {  // the link is free at each
    test_time += 100'000;
    return a.poll() + b.poll();
  };
  for (int i = 0; i < 100; ++i) poll();
  CHECK(fake.num_copies() - before == 1);
  fake.hold(false);
  CHECK(test::poll_until(poll, [&] { return !b.imms.empty(); }));
  CHECK(b.imms == std::vector<uint32_t>{1});
  CHECK(std::ranges::equal(source.data, target.data));
  // By the engines alone: kernels of urgent calls want all multiprocessors.
  CHECK(fake.num_row_launches() == launches);
  CHECK(fake.num_copies() - before < 64);
  a.domain->map_remote(target.key.remote_key, {});
}

TEST_CASE("timed: no copy of a lower class begins while urgent writes are under way, for 50 us") {
  FakeDriver& fake = FakeDriver::install();
  const std::string settings = "gbps=400,latency_us=1000";
  const auto [a_node, b_node] = timed_gpus(settings);
  Node &a = *a_node, &b = *b_node;
  Memory source(a, 4096), target(b, 4096), kept(b, 4096);
  a.domain->map_remote(target.key.remote_key, target.span(), true);
  a.domain->map_remote(kept.key.remote_key, kept.span());
  const PeerId lower = a.domain->connect_for(b.domain->address(), 2, 0);
  const PeerId urgent = a.connect(b);
  const uint64_t before = fake.num_copies();
  const auto begun = [&] { return fake.num_copies() - before; };
  a.post(make_write(1, lower, source, 0, target, 0, 64));
  a.post(make_write(2, urgent, source, 0, kept, 0, 64));
  a.post(make_write(3, lower, source, 0, target, 0, 64));
  CHECK(begun() == 1);
  test_time = kStart + 49'000;
  a.poll();
  CHECK(begun() == 1);
  test_time = kStart + 50'000;
  a.poll();
  CHECK(begun() == 2);
  const auto done = [&](size_t num) {
    return pump({&a, &b}, [&] { return test_time += 1'000, a.done.size() == num; });
  };
  CHECK(done(3));
  a.post(make_write(4, lower, source, 0, target, 0, 64));
  a.post(make_write(5, lower, source, 0, target, 0, 64));
  CHECK(begun() == 4);
  CHECK(done(5));
  for (const Memory* memory : {&target, &kept}) a.domain->map_remote(memory->key.remote_key, {});
}

TEST_CASE("timed: hollow writes of GPU memory take their time and carry nothing") {
  const std::string settings = base::concat(kPlain, ",hollow=1");
  Node a("timed", settings, 0, MemoryKind::kCuda), b("timed", settings, 0, MemoryKind::kCuda);
  a.maps_windows = false;
  Memory source(a, 4096), target(b, 4096);
  fill(source.data, 3);
  const PeerId peer = a.connect(b);
  a.post(with_imm(make_write(1, peer, source, 0, target, 0, 4096), 5));
  CHECK(pump({&a, &b}, [&] { return b.imms.size() == 1 && a.done.size() == 1; }));
  CHECK(a.code(1) == Code::kOk);
  CHECK(all_zero(target.data));
}

TEST_CASE("timed: settings") {
  const auto cx7 = parse_timed_config(""), efa = parse_timed_config("preset=efa,latency_us=9");
  CHECK(cx7.gbps == 400);
  CHECK(cx7.latency_us == doctest::Approx(2.7));
  CHECK(efa.gbps == 200);
  CHECK(efa.latency_us == 9);
  CHECK(efa.post_us > cx7.post_us);
  CHECK(efa.message_us > cx7.message_us);
  CHECK(parse_timed_config("ring_kib=16").ring_bytes == 16 << 10);
  CHECK(contains(text_of_error([] { parse_timed_config("preset=cx8"); }), "preset"));
  CHECK(contains(text_of_error([] { parse_timed_config("seed=7"); }), "seed"));
  CHECK(Node("timed", "").domain->needs_gpu_flush());
  CHECK_FALSE(Node("timed", "flush=0").domain->needs_gpu_flush());
  CHECK(std::string(Node("timed", "").domain->provider_name()) == "timed");
}

}  // namespace
}  // namespace moe_p2p::provider_test
