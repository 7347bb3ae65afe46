// The control path of the verbs provider over a fake libibverbs: libraries, devices, addresses,
// memory and handshakes, and the error text when one of them is not as it has to be.
#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "platform/interrupt.h"
#include "provider/verbs/gid.h"
#include "provider/verbs/socket.h"
#include "provider/verbs/wire.h"
#include "provider_harness.h"
#include "verbs_fake.h"

namespace moe_p2p::provider_test {
namespace {

using test::FakeDriver;
using test::FakeVerbs;

Node open_fake(const std::string& settings = "", MemoryKind memory = MemoryKind::kHost) {
  return Node("verbs", "library=fake," + settings, 0, memory);
}

// What opening says; "" when it opens.
std::string refusal(const std::string& settings, Code code) {
  try {
    Node("verbs", settings);
  } catch (const base::Error& error) {
    CHECK(error.code() == code);
    return error.what();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) {
  INFO("text: ", text);
  const bool found = text.find(part) != std::string::npos;
  CHECK_MESSAGE(found, "expected: ", part);
  return found;
}

TEST_CASE("verbs: memory is kept from children where the kernel does not, before a device opens") {
  FakeVerbs& fake = FakeVerbs::install();
  const auto inits = [&] {
    return fake.locked([](FakeVerbs& f) { return f.counters.fork_inits; });
  };
  open_fake();
  CHECK(inits() == 0);
  fake.locked([](FakeVerbs& f) { f.faults.old_kernel = true; });
  {
    const Node a = open_fake(), b = open_fake();
    CHECK(inits() == 1);
  }
  FakeVerbs::install(".");  // a library that cannot say
  {
    const Node a = open_fake("gid_type=v1"), b = open_fake("gid_type=v1");
    CHECK(inits() == 1);
  }
  FakeVerbs::install();
}

TEST_CASE("verbs: a missing library says what to install") {
  const std::string text = refusal("library=libibverbs_none.so.9", Code::kUnavailable);
  has(text, "libibverbs_none.so.9");
  has(text, "libibverbs1 ibverbs-providers");
}

TEST_CASE("verbs: a device that is not there, or down, or without that port, is named") {
  FakeVerbs::install();
  has(refusal("library=fake,devices=mlx5_9", Code::kUnavailable), "fake0, fake1, fake2");
  has(refusal("library=fake,devices=fake2", Code::kUnavailable), "the link is down");
  has(refusal("library=fake,devices=fake0,port=2", Code::kUnavailable), "fake0 port 2");
  has(refusal("library=fake,port=2", Code::kUnavailable), "no RDMA device has an active port 2");
  has(refusal("library=fake,devises=fake0", Code::kInvalidArgument), "devices");
  has(refusal("library=fake,mtu=1500", Code::kInvalidArgument), "1024");
}

TEST_CASE("verbs: queue pairs that send take no locks where the library has thread domains") {
  FakeVerbs& fake = FakeVerbs::install();
  const auto counters = [&] { return fake.locked([](FakeVerbs& f) { return f.counters; }); };
  for (const bool old_library : {false, true})
    for (const bool device_has_none : {false, true}) {
      fake.locked([&](FakeVerbs& f) {
        f.faults.no_extended_ops = old_library;
        f.faults.no_thread_domains = device_has_none;
      });
      const bool has = !old_library && !device_has_none;
      const auto before = counters();
      {
        Node a = open_fake(), b = open_fake("devices=fake1");
        const Memory source(a, 100), target(b, 100);
        const PeerId peer = a.connect(b);
        fill(source.data, 7);
        const auto write = with_imm(make_write(7, peer, source, 0, target, 0, 100), 1);
        CHECK(a.domain->post(std::span(&write, 1)) == 1);
        CHECK(pump({&a, &b}, [&] { return a.done.size() == 1 && b.imms.size() == 1; }));
        CHECK(holds(target.data, 7));
        const auto now = counters();
        CHECK(now.thread_domains == (has ? 2 : 0));
        const uint64_t sending = (now.queue_pairs_made - before.queue_pairs_made) / 2;
        CHECK(sending > 0);  // the others receive
        CHECK(now.queue_pairs_without_locks - before.queue_pairs_without_locks ==
              (has ? sending : 0));
      }
      CHECK(counters().thread_domains == 0);
      CHECK(counters().busy == 0);
    }
  CHECK(counters().lock_violations == 0);
  FakeVerbs::install();
}

TEST_CASE("verbs: NICs are dealt out in order, over the devices that are up") {
  FakeVerbs::install();
  const auto device_of = [](int nic, const std::string& settings) {
    Node node("verbs", "library=fake" + settings, nic);
    return provider::verbs::NicAddress::decode(node.domain->address()).label.substr(0, 5);
  };
  CHECK(device_of(0, "") == "fake0");
  CHECK(device_of(1, "") == "fake1");
  CHECK(device_of(2, "") == "fake0");  // fake2 is down
  CHECK(device_of(0, ",devices=fake1:fake0") == "fake1");
  CHECK(device_of(3, ",devices=fake1:fake0") == "fake0");
}

TEST_CASE("verbs: a GID is chosen by kind and address, and a wrong one lists what there is") {
  FakeVerbs::install();
  const auto opens = [](const std::string& wish) { return open_fake(wish).domain != nullptr; };
  CHECK(opens("gid_index=0"));
  CHECK(opens("gid_address=127.0.0.1"));
  CHECK(opens("gid_type=v1"));
  for (const char* wish :
       {"gid_index=7", "gid_address=10.9.9.9", "gid_type=v1,gid_address=fe80::1"}) {
    const std::string text = refusal(base::concat("library=fake,", wish), Code::kUnavailable);
    has(text, "fake0 port 1");
    has(text, "0 = fe80::1 (RoCE v2), 1 = 127.0.0.1 (RoCE v1), 2 = 127.0.0.1 (RoCE v2)");
  }
}

TEST_CASE("verbs: the pure choice of a GID") {
  using namespace provider::verbs;
  const auto entry = [](uint32_t index, uint32_t type, std::initializer_list<int> head, int last) {
    GidTableEntry e{.gid = {}, .index = index, .port = 1, .type = type, .ifindex = 0};
    size_t at = 0;
    for (const int byte : head) e.gid.raw[at++] = static_cast<uint8_t>(byte);
    e.gid.raw[15] = static_cast<uint8_t>(last);
    return e;
  };
  const auto link_local = entry(0, 2, {0xfe, 0x80}, 1), global = entry(3, 2, {0x20, 0x01}, 1);
  const auto v4 = entry(5, 2, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0}, 7);
  const auto old = entry(4, 1, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0}, 7);
  const auto chosen = [](std::vector<GidTableEntry> table, const std::string& wish, bool ethernet) {
    return choose_gid(table, parse_config(wish), ethernet, "device").index;
  };
  CHECK(chosen({link_local, global, old, v4}, "", true) == 5);
  CHECK(chosen({link_local, global}, "", true) == 3);
  CHECK(chosen({link_local}, "", true) == 0);
  CHECK(chosen({link_local, old, v4}, "gid_type=v1", true) == 4);
  CHECK(chosen({link_local, global, v4}, "gid_address=2001::1", true) == 3);
  CHECK(chosen({link_local, v4}, "gid_index=0", true) == 0);
  CHECK(chosen({global, v4}, "", false) == 3);  // InfiniBand: the first is the port's
  CHECK_THROWS_AS(chosen({}, "", true), base::Error);
}

TEST_CASE("verbs: an old library's GID types are read from sysfs") {
  const auto folder =
      std::filesystem::temp_directory_path() /
      base::concat("moe_p2p_gids.", platform::Clock::now().time_since_epoch().count());
  const auto types = folder / "fake0/ports/1/gid_attrs/types";
  std::filesystem::create_directories(types);
  for (int i = 0; i < 3; ++i)
    std::ofstream(types / std::to_string(i)) << (i == 1 ? "IB/RoCE v1\n" : "RoCE v2\n");
  FakeVerbs::install(folder.string());
  {
    Node a = open_fake("devices=fake0"), b = open_fake("devices=fake0");
    Memory source(a, 100), target(b, 100);
    fill(source.data, 1);
    post_all(a, {&a, &b}, make_write(0, a.connect(b), source, 0, target, 0, 100));
    CHECK(pump({&a, &b}, [&] { return a.done.size() == 1; }));
    CHECK(holds(target.data, 1));
    has(refusal("library=fake,devices=fake0,gid_index=7", Code::kUnavailable),
        "1 = 127.0.0.1 (RoCE v1), 2 = 127.0.0.1 (RoCE v2)");
  }
  FakeVerbs::install();
  std::filesystem::remove_all(folder);
}

TEST_CASE("verbs: addresses that do not reach each other are told when connecting") {
  FakeVerbs::install();
  Node a = open_fake("gid_index=0"), b = open_fake("");
  try {
    static_cast<void>(a.connect(b));
    FAIL("connected");
  } catch (const base::Error& error) {
    CHECK(error.code() == Code::kTransport);
    has(error.what(), "fe80::1");
    has(error.what(), "127.0.0.1");
    has(error.what(), "gid_index");
  }
}

TEST_CASE(
    "verbs: InfiniBand ports that need global addresses get them, and routers their own LID") {
  FakeVerbs& fake = FakeVerbs::install();
  const auto arrives = [&](const auto& change) {
    fake.locked([&](FakeVerbs& f) {
      f.faults = {.infiniband = true};
      change(f.faults);
    });
    Node a = open_fake("devices=fake0"), b = open_fake("devices=fake1");
    const Memory at_a(a, 100), at_b(b, 100);
    post_all(a, {&a, &b}, make_write(1, a.connect(b), at_a, 0, at_b, 0, 100));
    post_all(b, {&a, &b}, make_write(1, b.connect(a), at_b, 0, at_a, 0, 100));
    CHECK(pump({&a, &b}, [&] { return a.done.size() == 1 && b.done.size() == 1; }));
    return a.code(1) == Code::kOk && b.code(1) == Code::kOk;
  };
  CHECK(arrives([](auto&) {}));
  CHECK(arrives([](auto& f) { f.needs_grh[0] = true; }));
  CHECK(arrives([](auto& f) { f.needs_grh[1] = true; }));
  CHECK(arrives([](auto& f) { f.subnet[1] = 7; }));  // a router without FLIDs
  CHECK(arrives([](auto& f) { f.subnet[1] = 7, f.flid[0] = 60, f.flid[1] = 61; }));
  CHECK(arrives([](auto& f) { f.flid[0] = 60, f.flid[1] = 61; }));  // one subnet
  FakeVerbs::install();
}

TEST_CASE("verbs: memory that cannot be registered says why") {
  FakeVerbs& fake = FakeVerbs::install();
  Node a = open_fake();
  fake.locked([](FakeVerbs& f) { f.faults.register_error = ENOMEM; });
  rlimit before{};
  getrlimit(RLIMIT_MEMLOCK, &before);
  const rlimit small{65536, before.rlim_max};
  setrlimit(RLIMIT_MEMLOCK, &small);
  std::byte bytes[64];
  std::string text;
  try {
    static_cast<void>(a.domain->register_memory({bytes, sizeof bytes}));
  } catch (const base::Error& error) {
    CHECK(error.code() == Code::kResourceExhausted);
    text = error.what();
  }
  setrlimit(RLIMIT_MEMLOCK, &before);
  FakeVerbs::install();
  has(text, "fake0 port 1: registering 64 bytes");
  has(text, "64 KiB");
  has(text, "ulimit -l");
}

TEST_CASE("verbs: queues that cannot be made say which and what to lower") {
  FakeVerbs& fake = FakeVerbs::install();
  Node b = open_fake();
  {
    Node a = open_fake();
    fake.locked([](FakeVerbs& f) { f.faults.queue_error = ENOMEM; });
    CHECK_THROWS_AS(static_cast<void>(a.connect(b)), base::Error);
    has(refusal("library=fake", Code::kResourceExhausted), "completion queue");
  }
  FakeVerbs::install();
}

TEST_CASE("verbs: GPU memory is a dma-buf, else peer memory, else an error that names both") {
  FakeVerbs& fake = FakeVerbs::install();
  Node a = open_fake("", MemoryKind::kCuda);
  const auto regions = [&] {
    return fake.locked([](FakeVerbs& f) {
      return std::pair(f.counters.dmabuf_regions, f.counters.address_regions);
    });
  };
  {
    const Memory memory(a, 5000);
  }
  CHECK(regions() == std::pair<uint64_t, uint64_t>(1, 0));
  fake.locked([](FakeVerbs& f) { f.faults.dmabuf_error = EOPNOTSUPP; });
  {
    const Memory memory(a, 5000);
  }
  CHECK(regions() == std::pair<uint64_t, uint64_t>(2, 1));
  FakeDriver::install().locked([](FakeDriver& f) { f.dmabuf_error = 801; });
  {
    const Memory memory(a, 5000);
  }
  CHECK(regions() == std::pair<uint64_t, uint64_t>(2, 2));
  fake.locked([](FakeVerbs& f) { f.faults.register_error = EFAULT; });
  std::string text;
  try {
    const Memory memory(a, 5000);
  } catch (const base::Error& error) {
    text = error.what();
  }
  has(text, "fake error (801)");
  has(text, "Bad address");
  has(text, "nvidia-peermem");
  FakeDriver::install().locked([](FakeDriver& f) { f.dmabuf_error = 0; });
  FakeVerbs::install();
}

TEST_CASE("verbs: nobody at the address is an error in time, with everything that was tried") {
  FakeVerbs::install();
  Node a = open_fake("handshake_ms=600");
  auto gone = std::make_unique<Node>(open_fake());
  const auto address = gone->domain->address();
  gone.reset();
  const auto text = [&](const base::Bytes& bytes, Code code) {
    std::string text;
    try {
      static_cast<void>(a.domain->connect(bytes));
    } catch (const base::Error& error) {
      CHECK(error.code() == code);
      text = error.what();
    }
    return text;
  };
  has(text(address, Code::kPeerDead), "Connection refused");
  // Somebody else who listens and never answers, and one who answers for another NIC.
  const auto silent = provider::verbs::Socket::listen();
  provider::verbs::NicAddress other{
      1, "nobody", silent.local_port(), {"127.0.0.1"}, provider::verbs::Secret{}};
  has(text(other.encode(), Code::kTimeout), "nobody");
  Node b = open_fake();
  auto wrong = provider::verbs::NicAddress::decode(b.domain->address());
  ++wrong.nic_id;
  CHECK(text(wrong.encode(), Code::kPeerDead) != "");
  CHECK(text(base::Bytes(3), Code::kInvalidArgument) != "");
}

TEST_CASE("verbs: a signal ends a handshake with one who does not answer, or is not there") {
  FakeVerbs::install();
  Node a = open_fake("handshake_ms=60000");
  const auto silent = provider::verbs::Socket::listen();
  const auto closed = [] { return provider::verbs::Socket::listen().local_port(); };
  for (const uint16_t port : {silent.local_port(), closed()}) {
    static int looks;
    looks = 0;
    platform::set_interrupt_check([]() noexcept { return ++looks == 2; });
    const provider::verbs::NicAddress address{
        1, "nobody", port, {"127.0.0.1"}, provider::verbs::Secret{}};
    Code code = Code::kOk;
    std::string text;
    try {
      static_cast<void>(a.domain->connect(address.encode()));
    } catch (const base::Error& error) {
      code = error.code();
      text = error.what();
    }
    platform::set_interrupt_check(nullptr);
    CHECK(code == Code::kAborted);
    has(text, "signal");
    CHECK(looks == 2);  // at once
  }
  Node b = open_fake();
  static_cast<void>(a.connect(b));  // nothing is left of it
}

TEST_CASE("verbs: what a connection took is given back when either side ends it") {
  FakeVerbs& fake = FakeVerbs::install();
  const auto alive = [&] {
    return fake.locked([](FakeVerbs& f) { return f.counters.queue_pairs; });
  };
  const uint64_t before = alive();
  Node a = open_fake("qps_per_peer=2");
  auto b = std::make_unique<Node>(open_fake());
  const PeerId first = a.connect(*b);
  static_cast<void>(a.connect(*b));
  CHECK(alive() == before + 8);
  a.domain->disconnect(first);
  CHECK(pump({&a, b.get()}, [&] { return alive() == before + 4; }));
  b.reset();
  CHECK(alive() == before + 2);
}

}  // namespace
}  // namespace moe_p2p::provider_test
