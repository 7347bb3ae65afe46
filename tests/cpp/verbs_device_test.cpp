// The verbs provider over real devices: soft-RoCE's rxe0 and rxe1, two ends of one wire, as
// tests/rdma/vm.py makes them. Skipped where they are not. Links are taken down by name, so these
// cases belong into that machine.
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>
#include <cstdlib>
#include <numeric>

#include "engine_traffic.h"
#include "provider/verbs/api.h"
#include "provider_harness.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::provider_test {
namespace {

using engine::Request;
using engine::TransferEngine;
using platform::Clock;
using test::engine_options;
using test::soon;

std::string why_no_devices() {
  if (std::getenv("MOE_P2P_RDMA_MACHINE") == nullptr)
    return "links are taken down only in the machine of tests/rdma/vm.py (MOE_P2P_RDMA_MACHINE)";
  try {
    Node("verbs", "devices=rxe0");
    Node("verbs", "devices=rxe1");
    return "";
  } catch (const base::Error& error) {
    return error.what();
  }
}
#define NEEDS_DEVICES()                                  \
  if (const auto why = why_no_devices(); !why.empty()) { \
    MESSAGE("skipped: ", why);                           \
    return;                                              \
  }

// The far end of rxe0's cable: its carrier goes, its addresses stay.
void set_link(const char* state) {
  const std::string command = base::concat("ip link set rp0 ", state);
  REQUIRE(std::system(command.c_str()) == 0);
}

// Between an engine of two NICs and one of one, several turns of all kinds of requests.
void run_requests(const std::string& two, const std::string& one) {
  const std::string small = ",max_write_bytes=7000,max_in_flight=64";
  TransferEngine from(engine_options("verbs", two + small, 2));
  TransferEngine to(engine_options("verbs", one + ",qps_per_peer=2" + small, 1));
  proxy::ProxyThread first(from, {}), second(to, {});
  test::Buffer source(from, test::pattern(500'000)), target(to, std::vector<std::byte>(500'000));
  const auto* region = from.resolve(to.descriptor(target.handle));
  std::vector<int64_t> pages(40);
  std::iota(pages.begin(), pages.end(), 0);
  Request write(engine::Write{source.handle, 0, region, 0, 200'001, 1});
  Request page_write(engine::WritePages{
      source.handle, region, 4500, {pages, 5000, 200'001}, {pages, 5000, 200'001}, 2});
  Request imm(engine::Imm{region->owner, 4});
  for (uint64_t round = 1; round <= 5; ++round) {
    for (Request* request : {&write, &page_write, &imm}) from.submit(*request);
    for (Request* request : {&write, &page_write, &imm}) {
      REQUIRE(request->wait(soon()));
      CHECK(request->status().ok());
    }
    REQUIRE(to.imm_table().wait(1, 2 * round, soon()));
    REQUIRE(to.imm_table().wait(2, 40 * round, soon()));
    REQUIRE(to.imm_table().wait(4, round, soon()));
    CHECK(std::equal(source.data.begin(), source.data.begin() + 200'001, target.data.begin()));
    for (size_t page = 0; page < 40; ++page) {
      const auto begin = static_cast<std::ptrdiff_t>(200'001 + page * 5000);
      CHECK(std::equal(source.data.begin() + begin, source.data.begin() + begin + 4500,
                       target.data.begin() + begin));
      CHECK(target.data[200'001 + page * 5000 + 4500] == std::byte{0});
    }
    std::ranges::fill(target.data, std::byte{0});
  }
}

TEST_CASE("verbs devices: every kind of request arrives, also between unequal numbers of NICs") {
  NEEDS_DEVICES();
  run_requests("devices=rxe0:rxe1", "devices=rxe1");
}

TEST_CASE("verbs: every kind of request arrives, also between unequal numbers of NICs") {
  run_requests("library=fake,devices=fake0:fake1", "library=fake,devices=fake1,receives=32");
}

// Two nodes at both ends of the wire.
struct Wire {
  explicit Wire(const std::string& settings)
      : a("verbs", "devices=rxe0," + settings),
        b("verbs", "devices=rxe1," + settings),
        source(a, kNum * kBytes),
        target(b, kNum * kBytes),
        peer(a.connect(b)) {
    for (uint32_t i = 0; i < kNum; ++i) fill(source.data.subspan(i * kBytes, kBytes), i);
  }
  void post_writes(uint32_t begin = 0, uint32_t end = kNum) {
    for (uint32_t i = begin; i < end; ++i)
      post_all(a, {&a, &b},
               with_imm(make_write(i, peer, source, i * kBytes, target, i * kBytes, kBytes), i));
  }
  static constexpr uint32_t kNum = 200, kBytes = 20'000;
  Node a, b;
  Memory source, target;
  PeerId peer;
};

TEST_CASE("verbs devices: a link that is down for a moment loses nothing") {
  NEEDS_DEVICES();
  Wire wire("timeout=18,retries=6");
  size_t num_wrong = 0;
  wire.b.on_imm = [&](uint32_t imm) {
    const auto slot = wire.target.data.subspan(imm * Wire::kBytes, Wire::kBytes);
    if (!holds(slot, imm)) ++num_wrong;
  };
  wire.post_writes(0, Wire::kNum / 2);
  CHECK(pump({&wire.a, &wire.b}, [&] { return wire.b.imms.size() >= 20; }));
  set_link("down");
  wire.post_writes(Wire::kNum / 2, Wire::kNum);
  const auto until = Clock::now() + std::chrono::milliseconds(500);
  CHECK(pump({&wire.a, &wire.b}, [&] { return Clock::now() > until; }));
  const size_t seen = wire.b.imms.size();
  CHECK(seen < Wire::kNum);
  set_link("up");
  CHECK(pump({&wire.a, &wire.b}, [&] { return wire.b.imms.size() == Wire::kNum; }));
  CHECK(pump({&wire.a, &wire.b}, [&] { return wire.a.done.size() == Wire::kNum; }));
  CHECK(wire.a.num_failed() == 0);
  CHECK(num_wrong == 0);
}

TEST_CASE("verbs devices: a link that stays down fails what is under way, and says so") {
  NEEDS_DEVICES();
  {
    Wire wire("timeout=14,retries=2");
    set_link("down");
    wire.post_writes();
    CHECK(pump({&wire.a, &wire.b}, [&] { return wire.a.done.size() == Wire::kNum; }));
    for (uint32_t i = 0; i < Wire::kNum; ++i) CHECK(wire.a.code(i) == Code::kPeerDead);
    const std::string reported = wire.a.domain->failure();
    INFO("reported: ", reported);
    CHECK(reported.find("rxe0 port 1: a write of 20000 bytes to rxe1 of ") != std::string::npos);
    CHECK(reported.find("a link is down") != std::string::npos);
    set_link("up");
  }
  Wire again("timeout=16");  // a new connection works
  again.post_writes();
  CHECK(pump({&again.a, &again.b}, [&] { return again.a.done.size() == Wire::kNum; }));
  CHECK(again.a.num_failed() == 0);
}

// The child: opens its NIC, sends address and key through the pipe, polls until it is killed.
[[noreturn]] void be_target(int out) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Node node("verbs", "devices=rxe1");
  Memory memory(node, 10'000);
  const base::Bytes address = node.domain->address();
  const auto size = static_cast<uint32_t>(address.size());
  bool sent = write(out, &size, sizeof size) == sizeof size;
  sent = sent && write(out, address.data(), size) == static_cast<ssize_t>(size);
  sent = sent && write(out, &memory.key, sizeof memory.key) == sizeof memory.key;
  while (sent) node.poll();
  _exit(1);
}

TEST_CASE("verbs devices: a process that is killed fails what it owes, soon") {
  NEEDS_DEVICES();
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) be_target(ends[1]);
  const auto get = [&](void* data, size_t bytes) {
    return read(ends[0], data, bytes) == static_cast<ssize_t>(bytes);
  };
  uint32_t size = 0;
  REQUIRE(get(&size, sizeof size));
  base::Bytes address(size);
  MemoryKey key;
  REQUIRE(get(address.data(), size));
  REQUIRE(get(&key, sizeof key));
  Node a("verbs", "devices=rxe0");
  Memory source(a, 10'000);
  const PeerId peer = a.domain->connect(address);
  uint64_t next = 0;
  const auto post_more = [&] {
    WorkRequest request{.wr_id = next,
                        .local = source.data.data(),
                        .local_key = source.key.local_key,
                        .remote_addr = key.remote_addr,
                        .remote_key = key.remote_key,
                        .bytes = 10'000,
                        .peer = peer,
                        .imm = 1,
                        .has_imm = true};
    next += a.domain->post({&request, 1});
  };
  CHECK(pump({&a}, [&] {
    if (next < a.done.size() + 50) post_more();
    return a.done.size() > 100;
  }));
  kill(child, SIGKILL);
  CHECK(pump({&a}, [&] {
    if (a.num_failed() == 0) post_more();
    return a.num_failed() > 0 && a.done.size() == next;
  }));
  for (const auto& [wr_id, status] : a.status()) {
    if (status.ok()) continue;
    CHECK(status.code == Code::kPeerDead);
    CHECK(status.detail != provider::verbs::kWcRetriesExceeded);  // the socket says so before
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  close(ends[0]);
  close(ends[1]);
}

// The child: may lock 256 KiB, and is not privileged to lock more. What registering then says.
[[noreturn]] void register_too_much(const std::string& provider, const std::string& settings,
                                    int out) {
  const rlimit limit{256 * 1024, 256 * 1024};
  __user_cap_header_struct head{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2] = {};
  std::string reported = "nothing";
  try {
    Node node(provider, settings);
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || syscall(SYS_capset, &head, none) != 0) _exit(2);
    Memory memory(node, 64 << 20);
  } catch (const base::Error& error) {
    reported = error.what();
  }
  _exit(write(out, reported.data(), reported.size()) == static_cast<ssize_t>(reported.size()) ? 0
                                                                                              : 1);
}

void check_limit_is_reported(const std::string& provider, const std::string& settings) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) register_too_much(provider, settings, ends[1]);
  close(ends[1]);
  std::string reported(2000, '\0');
  reported.resize(
      static_cast<size_t>(std::max<ssize_t>(read(ends[0], reported.data(), reported.size()), 0)));
  INFO("reported: ", reported);
  CHECK(reported.find("rxe0") != std::string::npos);
  CHECK(reported.find("registering 67108864 bytes") != std::string::npos);
  CHECK(reported.find("256 KiB") != std::string::npos);
  CHECK(reported.find("ulimit -l") != std::string::npos);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  close(ends[0]);
}

// Writes are under way when one side severs. link_down: the other side does not hear of it.
void sever_under_traffic(bool link_down) {
  constexpr uint64_t kTag = 77;
  constexpr size_t kBytes = 1 << 20;
  TransferEngine from(engine_options("verbs", "devices=rxe0,timeout=16", 1));
  TransferEngine to(engine_options("verbs", "devices=rxe1,timeout=16", 1));
  std::vector<std::byte> source(kBytes, std::byte{1}), cache(kBytes);
  const auto* own =
      from.register_memory({.data = source.data(), .bytes = kBytes, .in_order = true});
  const auto* memory =
      to.register_memory({.data = cache.data(), .bytes = kBytes, .in_order = true});
  const auto* peer = from.connect(to.address(), 1, kTag);
  const auto* region = from.resolve(to.descriptor(memory), peer);
  const auto* beside = from.resolve(to.descriptor(memory), from.connect(to.address(), 0));
  proxy::ProxyThread first(from, {}), second(to, {});
  std::vector<std::unique_ptr<Request>> requests;
  for (int i = 0; i < 300; ++i) {
    requests.push_back(
        std::make_unique<Request>(engine::Write{own, 0, region, 0, kBytes, std::nullopt}));
    from.submit(*requests.back());
  }
  REQUIRE(requests[0]->wait(soon()));
  CHECK(requests[0]->status().ok());
  const engine::MemoryHandle* const theirs[] = {memory};
  const engine::MemoryHandle* const ours[] = {own};
  if (link_down) set_link("down");
  if (link_down) from.disconnect(peer);
  link_down ? from.sever(kTag, ours, soon()) : to.sever(kTag, theirs, soon());
  std::ranges::fill(cache, std::byte{7});
  std::ranges::fill(source, std::byte{9});
  if (link_down) set_link("up");
  for (const auto& request : requests) REQUIRE(request->wait(soon()));
  CHECK_FALSE(requests.back()->status().ok());
  const auto until = Clock::now() + std::chrono::milliseconds(300);
  while (Clock::now() < until) to.run_on_poller([] {}, soon());
  // Of the sender's end: what was read before may still come, but nothing that was written later.
  CHECK(std::ranges::count(cache, link_down ? std::byte{9} : std::byte{1}) == 0);
  if (link_down) return;
  Request other(engine::Write{own, 0, beside, 0, kBytes, std::nullopt});
  from.submit(other);
  REQUIRE(other.wait(soon()));
  CHECK(other.status().ok());
  CHECK(std::ranges::count(cache, std::byte{9}) == static_cast<int64_t>(kBytes));
}

TEST_CASE("verbs devices: what was severed changes nothing any more, and others go on") {
  NEEDS_DEVICES();
  sever_under_traffic(false);
  sever_under_traffic(true);
}

TEST_CASE("verbs devices: memory beyond the limit on locked memory is refused with the limit") {
  NEEDS_DEVICES();
  check_limit_is_reported("verbs", "devices=rxe0");
  check_limit_is_reported("libfabric", "provider=verbs;ofi_rxm,interfaces=10.77.0.1");
}

}  // namespace
}  // namespace moe_p2p::provider_test
