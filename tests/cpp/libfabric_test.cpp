// The libfabric provider beyond the contract: over the fake of EFA what a device cannot be asked to
// do, and over the real library what goes wrong while a NIC is opened. The contract itself:
// provider_contract_test.cpp; engine and several processes: libfabric_engine_test.cpp and
// tests/engine/test_libfabric.py.
#include <sys/resource.h>

#include <thread>

#include "provider/libfabric/config.h"
#include "provider/libfabric/failure.h"
#include "provider_table.h"

// libfabric 1.17 leaves 376 bytes of its own allocated after the contract suite.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): LeakSanitizer's name
extern "C" const char* __lsan_default_suppressions();
const char* __lsan_default_suppressions() { return "leak:libfabric.so.1\n"; }
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace moe_p2p::provider_test {
namespace {

using test::FakeFabric;

constexpr ProviderUnderTest kEfa = {
    .name = "libfabric", .settings = "provider=efa,interfaces=efa7", .takes_unpolled = true};

std::string error_of(const std::string& settings, Code code) {
  FakeFabric::use_for(settings);
  try {
    Node("libfabric", settings);
  } catch (const base::Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

TEST_CASE("libfabric on efa: chains are rung, calls are alone, shared memory of its own is off") {
  Pair pair(kEfa, 64 * 100);
  for (uint32_t i = 0; i < 4000; i += 40) {
    std::vector<WorkRequest> batch;
    for (uint32_t k = i; k < i + 40; ++k)
      batch.push_back(with_imm(pair.write(k, k % 64 * 100, 100), k));
    size_t posted = 0;
    CHECK(pump({&pair.a, &pair.b}, [&] {
      posted += pair.a.domain->post(std::span(batch).subspan(posted));
      return posted == batch.size();
    }));
  }
  CHECK(pair.pump_until_done(4000));
  CHECK(pair.pump_until_seen(4000));
  CHECK(pair.a.num_failed() == 0);
  const auto counts = FakeFabric::counts();
  CHECK(counts.chained > 500);
  CHECK(counts.refused > 100);
  CHECK(counts.left_open == 0);
  CHECK(counts.intruders == 0);
  CHECK(counts.shm_transfers == 0);
  CHECK(counts.direct == 0);                  // although it is named first
  CHECK(num_inversions(pair.b.imms) > 1000);  // the fake is worth its name
  CHECK(num_inversions(pair.a.done) > 1000);
}

TEST_CASE("libfabric on efa: no read is posted within a chain of writes") {
  Pair pair(kEfa, 64 * 100);
  fill(pair.target.data, 1);
  for (uint64_t i = 0; i < 4000; i += 40) {
    std::vector<WorkRequest> batch;
    for (uint64_t k = i; k < i + 40; ++k)
      batch.push_back(k % 4 == 0 ? pair.read(k, k % 64 * 100, 100) : make_imm(k, pair.peer, 1));
    size_t posted = 0;
    CHECK(pump({&pair.a, &pair.b}, [&] {
      posted += pair.a.domain->post(std::span(batch).subspan(posted));
      return posted == batch.size();
    }));
  }
  CHECK(pair.pump_until_done(4000));
  CHECK(pair.a.num_failed() == 0);
  const auto counts = FakeFabric::counts();
  CHECK(counts.chained > 500);
  CHECK(counts.left_open == 0);
  for (uint64_t k = 0; k < 64; k += 4)
    CHECK(std::ranges::equal(pair.source.data.subspan(k * 100, 100),
                             pair.target.data.subspan(k * 100, 100)));
}

TEST_CASE("libfabric on efa: a peer that takes nothing is given up, and only that one") {
  const ProviderUnderTest impatient = {.name = "libfabric",
                                       .settings = "provider=efa,interfaces=efa7,timeout_ms=50"};
  Pair pair(impatient, 1000);
  FakeFabric::refuse_all(true);
  for (uint64_t i = 0; i < 30; ++i) pair.post(pair.write(i, 0, 1000));
  CHECK(pair.pump_until_done(30));
  for (uint64_t i = 0; i < 30; ++i) {
    CHECK(pair.a.code(i) == Code::kPeerDead);
    CHECK(pair.a.status().at(i).detail == ETIMEDOUT);
  }
  FakeFabric::refuse_all(false);
  pair.post(pair.write(30, 0, 1000));  // the peer is back
  CHECK(pair.pump_until_done(31));
  CHECK(pair.a.code(30) == Code::kOk);
}

TEST_CASE("libfabric on efa: numbers of the device become statuses") {
  const struct {
    int err, prov_errno;
    Code code;
  } cases[] = {{EINVAL, 7, Code::kRemoteAccess},    {EMSGSIZE, 11, Code::kRemoteAccess},
               {EINVAL, 5, Code::kTransport},       {ECONNABORTED, 13, Code::kPeerDead},
               {ENOTCONN, 9, Code::kPeerDead},      {ENOTCONN, 14, Code::kPeerDead},
               {ECONNABORTED, 8, Code::kPeerDead},  {ECONNABORTED, 4124, Code::kPeerDead},
               {EHOSTUNREACH, 15, Code::kPeerDead}, {ECANCELED, 1, Code::kPeerDead},
               {EIO, 0, Code::kTransport}};
  Pair pair(kEfa, 100);
  uint64_t wr_id = 0;
  for (const auto& one : cases) {
    CAPTURE(one.prov_errno);
    FakeFabric::fail_next(one.err, one.prov_errno);
    pair.post(pair.write(wr_id, 0, 100));
    CHECK(pair.pump_until_done(wr_id + 1));
    CHECK(pair.a.code(wr_id) == one.code);
    CHECK(pair.a.status().at(wr_id++).detail == one.err);
  }
  CHECK(has(pair.a.domain->failure(), "efa7"));
  CHECK(has(pair.a.domain->failure(), "remote"));
}

TEST_CASE("libfabric on efa: a device that dies fails what is under way, and every later write") {
  Pair pair(kEfa, 1000);
  FakeFabric::refuse_all(true);  // they wait
  for (uint64_t i = 0; i < 20; ++i) pair.post(pair.write(i, 0, 1000));
  FakeFabric::lose_devices();
  FakeFabric::refuse_all(false);
  CHECK(pump({&pair.a}, [&] { return pair.a.done.size() == 20; }));
  for (uint64_t i = 20; i < 4000; ++i)
    pair.post(pair.write(i, 0, 1000));  // more than there are slots
  CHECK(pair.pump_until_done(4000));
  CHECK(pair.a.num_failed() == 4000);
  CHECK(pair.a.code(0) == Code::kTransport);
  CHECK(pair.a.code(3999) == Code::kTransport);
  CHECK(has(pair.a.domain->failure(), "efa7"));
  CHECK(has(pair.a.domain->failure(), "Input/output error"));
}

TEST_CASE("libfabric on efa: memory that cannot be registered says how much and the limit") {
  FakeFabric::use_for(kEfa.settings);
  Node node(kEfa.name, kEfa.settings);
  const auto refusal = [&](int err) {
    FakeFabric::fail_registration(err);
    std::string reported;
    try {
      const Memory memory(node, 1000);
    } catch (const base::Error& error) {
      CHECK(error.code() == Code::kResourceExhausted);
      reported = error.what();
    }
    FakeFabric::fail_registration(0);
    return reported;
  };
  rlimit before{};
  getrlimit(RLIMIT_MEMLOCK, &before);
  const rlimit small{65536, before.rlim_max};
  setrlimit(RLIMIT_MEMLOCK, &small);
  const std::string locked = refusal(ENOMEM), other = refusal(EINVAL);
  setrlimit(RLIMIT_MEMLOCK, &before);
  CHECK(has(locked, "efa7"));
  CHECK(has(locked, "registering 1000 bytes"));
  CHECK(has(locked, "64 KiB"));
  CHECK(has(locked, "ulimit -l"));
  CHECK(has(other, "Invalid argument (22)"));
  CHECK_FALSE(has(other, "ulimit"));
  const Memory memory(node, 1000);  // the NIC goes on
}

// What libfabric finds, for the time of a scope.
struct OnMachine {
  explicit OnMachine(const FakeFabric::Machine& machine) { FakeFabric::set_machine(machine); }
  ~OnMachine() { FakeFabric::set_machine({}); }
};

// Writes from GPU memory to GPU memory, each with an immediate; the error of registering, if any.
std::string write_gpu_memory(const char* settings) {
  const ProviderUnderTest on_gpu = {
      .name = "libfabric", .settings = settings, .memory = MemoryKind::kCuda};
  try {
    const size_t num_wrong = num_early(on_gpu);
    CHECK(num_wrong == 0);
  } catch (const base::Error& error) {
    CHECK(error.code() == Code::kUnavailable);
    return error.what();
  }
  return "";
}

TEST_CASE(
    "libfabric on efa: GPU memory is written without a call of CUDA, or refused with the reason") {
  const auto dmabufs_as_host = [] {
    const auto counts = FakeFabric::counts();
    CHECK(counts.dmabufs > 0);
    return counts.as_host;
  };
  FakeFabric::use_for(kEfa.settings);
  CHECK(write_gpu_memory(kEfa.settings) == "");
  CHECK(dmabufs_as_host() == 0);
  {
    auto& driver = test::FakeDriver::install();
    driver.locked([](test::FakeDriver& f) { f.dmabuf_error = 801; });
    CHECK(write_gpu_memory(kEfa.settings) == "");  // libfabric asks the driver in its own way
    CHECK(FakeFabric::counts().as_cuda > 0);
    driver.locked([](test::FakeDriver& f) { f.dmabuf_error = 0; });
  }
  CHECK(has(write_gpu_memory("provider=efa,interfaces=efa7,hmem=off"), "hmem=off"));
  {
    const OnMachine old({.version = provider::libfabric::make_version(1, 20)});
    CHECK(write_gpu_memory(kEfa.settings) == "");
  }
  for (const FakeFabric::Machine& machine :
       {FakeFabric::Machine{.cuda = false}, FakeFabric::Machine{.gpu_direct = false}}) {
    const OnMachine without(machine);
    CHECK(write_gpu_memory(kEfa.settings) == "");
    CHECK(dmabufs_as_host() > 0);
    const char* reason = machine.cuda ? "no GPUDirect RDMA" : "libcudart.so";
    CHECK(has(write_gpu_memory("provider=efa,interfaces=efa7,hmem=on"), reason));
    auto& driver = test::FakeDriver::install();
    driver.locked([](test::FakeDriver& f) { f.dmabuf_error = 801; });
    CHECK(has(write_gpu_memory(kEfa.settings), reason));
    CHECK(has(write_gpu_memory(kEfa.settings), "exports no dma-buf"));
    driver.locked([](test::FakeDriver& f) { f.dmabuf_error = 0; });
  }
  const OnMachine emulated({.emulates_writes = true});
  CHECK(has(write_gpu_memory(kEfa.settings), "emulates writes"));
}

TEST_CASE("libfabric on efa: hosts with unlike software are refused by name, before they write") {
  FakeFabric::use_for(kEfa.settings);
  FakeFabric::set_machine({});
  Node here(kEfa.name, kEfa.settings);
  const auto refusal = [&](const FakeFabric::Machine& machine) {
    const OnMachine other(machine);
    Node there(kEfa.name, "provider=efa,interfaces=efa8");
    const std::string text = text_of_error([&] { here.connect(there); });
    CHECK(text_of_error([&] { there.connect(here); }).empty() == text.empty());
    return text;
  };
  CHECK(refusal({}) == "");
  const std::string old = refusal({.version = provider::libfabric::make_version(1, 21)});
  CHECK(has(old, "efa7"));
  CHECK(has(old, "is libfabric 2.1, driver "));
  CHECK(has(old, " libfabric 1.21, driver "));
  CHECK(has(old, "unsolicited writes off: libfabric may emulate writes"));
  CHECK(has(old, "Install one EFA driver"));
  CHECK(has(refusal({.emulates_writes = true}), "no RDMA writes: libfabric may"));
  for (const char* word : {"0", "False", "off"}) {
    ::setenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV", word, 1);
    CHECK(has(refusal({}), "unsolicited writes off: libfabric may"));
  }
  ::setenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV", "1", 1);
  CHECK(refusal({}) == "");
  ::unsetenv("FI_EFA_USE_UNSOLICITED_WRITE_RECV");
}

TEST_CASE("libfabric on efa: a library that is too old is refused by its version") {
  const OnMachine old({.version = provider::libfabric::make_version(1, 17)});
  CHECK(has(error_of(kEfa.settings, Code::kUnavailable), "libfabric 1.17 is too old"));
}

// A node that writes to two others: `a` on efa7, the targets on efa8 and efa9.
struct Fan {
  explicit Fan(const std::string& more = "") : settings(more) {}
  Node open(const char* nic) const {
    const std::string all = base::concat("provider=efa,interfaces=", nic, settings);
    FakeFabric::use_for(all);
    return Node("libfabric", all);
  }
  void post(uint64_t wr_id, PeerId peer, const Memory& to) {
    post_all(a, {&a, &b, &c}, with_imm(make_write(wr_id, peer, source, 0, to, 0, 100), 7));
  }

  const std::string settings;
  Node a = open("efa7"), b = open("efa8"), c = open("efa9");
  Memory source{a, 100}, at_b{b, 100}, at_c{c, 100};
  PeerId to_b = a.connect(b), to_c = a.connect(c);
};

TEST_CASE("libfabric on efa: a full queue is not blamed on the peers that wait for it") {
  Fan fan(",timeout_ms=50");
  for (const PeerId peer : {fan.to_b, fan.to_c})  // hands are shaken
    fan.post(peer, peer, peer == fan.to_b ? fan.at_b : fan.at_c);
  CHECK(pump({&fan.a, &fan.b, &fan.c}, [&] { return fan.a.done.size() == 2; }));
  FakeFabric::silence("efa8");
  constexpr uint64_t kHeld = 300, kWaiting = 20;  // the queue has 96 places
  for (uint64_t i = 0; i < kHeld; ++i) fan.post(1000 + i, fan.to_b, fan.at_b);
  for (uint64_t i = 0; i < kWaiting; ++i) fan.post(2000 + i, fan.to_c, fan.at_c);
  // Whoever holds the queue is given up first.
  CHECK(pump({&fan.a, &fan.c}, [&] { return fan.a.status().count(1000) == 1; }));
  CHECK(fan.a.code(1000) == Code::kPeerDead);
  FakeFabric::silence("");
  CHECK(pump({&fan.a, &fan.b, &fan.c}, [&] { return fan.a.done.size() == 2 + kHeld + kWaiting; }));
  for (uint64_t i = 0; i < kWaiting; ++i) CHECK(fan.a.code(2000 + i) == Code::kOk);
  CHECK(fan.c.imms.size() == 1 + kWaiting);
}

TEST_CASE("libfabric on efa: a chain goes on to the next peer, unless hands are to be shaken") {
  const auto post_both = [](Fan& fan, uint64_t first, bool c_first) {
    WorkRequest both[] = {make_write(first, fan.to_b, fan.source, 0, fan.at_b, 0, 100),
                          make_write(first + 1, fan.to_c, fan.source, 0, fan.at_c, 0, 100)};
    if (c_first) std::swap(both[0], both[1]);
    size_t posted = 0;
    CHECK(pump({&fan.a, &fan.b, &fan.c}, [&] {
      posted += fan.a.domain->post(std::span(both).subspan(posted));
      return posted == 2;
    }));
  };
  // The write to `c` is kept back: it must not hold up the one to `b`, and leave by itself once `c`
  // answers. Several times, for the fake refuses at random.
  for (uint64_t turn = 0; turn < 16; ++turn) {
    CAPTURE(turn);
    Fan fan;
    for (uint64_t i = 0; i <= turn / 2; ++i) fan.post(i, fan.to_b, fan.at_b);
    const size_t num_shaken = turn / 2 + 1;
    REQUIRE(pump({&fan.a, &fan.b}, [&] { return fan.a.done.size() == num_shaken; }));
    FakeFabric::silence("efa9");
    post_both(fan, 100, turn % 2 == 0);
    REQUIRE(pump({&fan.a, &fan.b}, [&] { return fan.a.status().count(100) == 1; }));
    CHECK(fan.a.status().count(101) == 0);
    FakeFabric::silence("");
    REQUIRE(pump({&fan.a, &fan.b, &fan.c}, [&] { return fan.a.status().count(101) == 1; }));
    CHECK(fan.a.num_failed() == 0);
    CHECK(FakeFabric::counts().across_peers == 0);
  }
  Fan fan;
  for (uint64_t i = 0; i < 100; ++i) {
    post_both(fan, 2 * i, false);
    if (i == 0) CHECK(pump({&fan.a, &fan.b, &fan.c}, [&] { return fan.a.done.size() == 2; }));
  }
  CHECK(pump({&fan.a, &fan.b, &fan.c}, [&] { return fan.a.done.size() == 200; }));
  CHECK(fan.a.num_failed() == 0);
  CHECK(FakeFabric::counts().across_peers > 20);
  CHECK(FakeFabric::counts().left_open == 0);
}

TEST_CASE("libfabric on efa: registering memory holds up no writes") {
  Pair pair(kEfa, 64 * 100);
  FakeFabric::hold_registrations(true);
  std::vector<std::byte> large(1 << 20);
  MemoryKey key;
  std::thread thread([&] { key = pair.a.domain->register_memory({large.data(), large.size()}); });
  CHECK(pump({&pair.a}, [] { return FakeFabric::num_registering() == 1; }));
  for (uint32_t i = 0; i < 200; ++i) pair.post(with_imm(pair.write(i, i % 64 * 100, 100), i));
  CHECK(pair.pump_until_done(200));
  CHECK(pair.pump_until_seen(200));
  CHECK(FakeFabric::num_registering() == 1);
  FakeFabric::hold_registrations(false);
  thread.join();
  pair.a.domain->unregister_memory(key);
  CHECK(FakeFabric::counts().intruders == 0);
}

TEST_CASE("libfabric on efa: a node that was given a waker is never idle") {
  FakeFabric::use_for(kEfa.settings);
  platform::EventCount waker{};
  DomainOptions options;
  options.settings = kEfa.settings;
  options.waker = &waker;
  CHECK_FALSE(provider::open_domain("libfabric", options)->idle());
}

TEST_CASE("libfabric: what cannot be opened says why and what there is") {
  CHECK(has(error_of("provider=ethernet", Code::kInvalidArgument), "verbs;ofi_rxm"));
  CHECK(has(error_of("interfaces=efa1", Code::kUnavailable), "EFA"));
  CHECK(has(error_of("provider=efa,interfaces=ens5", Code::kUnavailable), "efa0, efa1"));
  const std::string no_interface = error_of("provider=tcp,interfaces=nic77", Code::kUnavailable);
  CHECK((has(no_interface, "lo 127.0.0.1") || has(no_interface, "cannot be opened")));
}

TEST_CASE("libfabric: addresses of another provider or transport are refused") {
  FakeFabric::use_for(kEfa.settings);
  Node efa(kEfa.name, kEfa.settings);
  base::Bytes wrong = efa.domain->address();
  wrong[16] = std::byte{'x'};  // the provider's name begins behind tag, letter and length
  CHECK_THROWS_WITH_AS(efa.domain->connect(wrong), doctest::Contains("provider"), base::Error);
  wrong[0] = std::byte{0};
  CHECK_THROWS_WITH_AS(efa.domain->connect(wrong), doctest::Contains("another provider"),
                       base::Error);
}

TEST_CASE("libfabric: NICs by interface and by address") {
  const ProviderUnderTest by_address = {.name = "libfabric",
                                        .settings = "provider=tcp,interfaces=127.0.0.1:lo"};
  const std::string reason = why_unavailable(by_address);
  if (!reason.empty()) {
    MESSAGE("skipped: ", reason);
    return;
  }
  Node first = open(by_address, 0), second = open(by_address, 1);
  Memory source(first, 500), target(second, 500);
  fill(source.data, 1);
  const PeerId peer = first.connect(second);
  post_all(first, {&first, &second}, make_write(0, peer, source, 0, target, 0, 500));
  CHECK(pump({&first, &second}, [&] { return first.done.size() == 1; }));
  CHECK(holds(target.data, 1));
}

}  // namespace
}  // namespace moe_p2p::provider_test
