// The port on which the verbs provider listens for peers, when others connect to it: silent ones,
// loud ones, ones that repeat what they have seen and ones that do not know the secret. Over a fake
// libibverbs.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <future>

#include "engine/transfer_engine.h"
#include "provider/verbs/domain.h"
#include "verbs_pair.h"

namespace moe_p2p::provider_test {
namespace {

using platform::Clock;
using provider::verbs::NicAddress;
using provider::verbs::Socket;

NicAddress address_of(const Node& node) { return NicAddress::decode(node.domain->address()); }
uint64_t num_refused(const Node& node) {
  return dynamic_cast<provider::verbs::VerbsDomain&>(*node.domain).num_refused();
}
Socket dial(const Node& node) {
  return Socket::dial("127.0.0.1", address_of(node).tcp_port, soon());
}
// Reads until the other side closes; false when it has not within a minute.
bool is_closed(const Socket& socket) {
  const auto deadline = soon();
  while (Clock::now() < deadline) {
    pollfd entry{socket.fd(), POLLIN, 0};
    if (::poll(&entry, 1, 100) <= 0) continue;
    char bytes[4096];
    const ssize_t got = recv(socket.fd(), bytes, sizeof bytes, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return true;
  }
  return false;
}
size_t num_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}
void check_works(FakePair& pair) {
  const size_t before = pair.a.done.size();
  post_all(pair.a, {&pair.a, &pair.b}, make_imm(before, pair.peer, 7));
  CHECK(pair.pump_until_done(before + 1));
  CHECK(pair.a.code(before) == Code::kOk);
}
Code refusal_of(Node& from, const NicAddress& address) {
  try {
    static_cast<void>(from.domain->connect(address.encode()));
  } catch (const base::Error& error) {
    return error.code();
  }
  return Code::kOk;
}

TEST_CASE("verbs: who floods the handshake's port is closed after one message") {
  FakePair pair;
  const uint32_t lengths[] = {4000, 60'000, ~0u};
  for (const uint32_t length : lengths) {
    const Socket stranger = dial(pair.b);
    std::vector<char> bytes(1 << 16, 'x');
    std::memcpy(bytes.data(), &length, sizeof length);
    size_t sent = 0;
    const auto deadline = soon();
    bool closed = false;
    while (!closed && sent < (size_t{64} << 20) && Clock::now() < deadline) {
      const ssize_t put = send(stranger.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (put > 0) sent += static_cast<size_t>(put);
      closed = put < 0 && errno != EAGAIN && errno != EINTR;
    }
    CHECK(closed);
  }
  CHECK(num_refused(pair.b) == 3);
  check_works(pair);
}

TEST_CASE("verbs: the counters of an engine have the connections that each NIC refused") {
  FakeVerbs::install();
  const engine::TransferEngine engine(
      {.provider = "verbs", .num_nics = 2, .settings = "library=fake"});
  const auto refused = [&](size_t nic) { return engine.counters()[nic].connections_refused; };
  CHECK(refused(0) + refused(1) == 0);
  const auto second = NicAddress::decode(engine.address().nics[1]);
  for (int i = 0; i < 3; ++i) {
    const Socket stranger = Socket::dial("127.0.0.1", second.tcp_port, soon());
    std::vector<char> bytes(5000, 'x');
    static_cast<void>(send(stranger.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
    CHECK(is_closed(stranger));
  }
  CHECK(refused(0) == 0);
  CHECK(refused(1) == 3);
}

TEST_CASE("verbs: silent connections are closed in time and keep no peer out") {
  FakePair pair("handshake_ms=2000");
  const size_t before = num_descriptors();
  {
    std::vector<Socket> silent;
    for (int i = 0; i < 350; ++i) silent.push_back(dial(pair.b));
    static_cast<void>(pair.a.connect(pair.b));  // behind all of them
    // Ours, at most 256 of theirs, and those of the new connection.
    CHECK(num_descriptors() <= before + 350 + 256 + 4);
    check_works(pair);
    for (const Socket& socket : silent) CHECK(is_closed(socket));
    CHECK(num_refused(pair.b) == 350);
  }
  CHECK(num_descriptors() <= before + 4);
  check_works(pair);
}

TEST_CASE("verbs: a peer without the secret gets nothing") {
  FakePair pair;
  const uint64_t made = pair.counters().queue_pairs_made;
  auto address = address_of(pair.b);
  REQUIRE(address.secret);
  (*address.secret)[0] ^= std::byte{1};
  CHECK(refusal_of(pair.a, address) == Code::kPeerDead);
  CHECK(num_refused(pair.b) >= 1);
  CHECK(pair.counters().queue_pairs_made == made + 1);  // its own
  check_works(pair);
}

// Passes on one connection to `target` and keeps what the connector sent.
std::vector<char> relay(const Socket& listener, const Node& target) {
  Socket from;
  const auto deadline = soon();
  while (!(from = listener.accept()) && Clock::now() < deadline) std::this_thread::yield();
  const Socket to = dial(target);
  std::vector<char> text;
  pollfd ends[] = {{from.fd(), POLLIN, 0}, {to.fd(), POLLIN, 0}};
  while (Clock::now() < deadline) {
    ::poll(ends, 2, 100);
    for (int i = 0; i < 2; ++i) {
      if (!(ends[i].revents & (POLLIN | POLLHUP))) continue;
      char bytes[4096];
      const ssize_t got = recv(ends[i].fd, bytes, sizeof bytes, 0);
      if (got <= 0) return text;
      if (i == 0) text.insert(text.end(), bytes, bytes + got);
      static_cast<void>(send(ends[1 - i].fd, bytes, static_cast<size_t>(got), MSG_NOSIGNAL));
    }
  }
  return text;
}

TEST_CASE("verbs: what a peer sent is refused when another sends it again") {
  FakePair pair;
  const Socket listener = Socket::listen();
  auto address = address_of(pair.b);
  address.tcp_port = listener.local_port();
  address.hosts = {"127.0.0.1"};
  auto recording = std::async(std::launch::async, [&] { return relay(listener, pair.b); });
  const PeerId peer = pair.a.domain->connect(address.encode());
  pair.a.domain->disconnect(peer);
  const std::vector<char> hello = recording.get();
  CHECK(hello.size() > 100);

  const uint64_t made = pair.counters().queue_pairs_made;
  const Socket again = dial(pair.b);
  REQUIRE(send(again.fd(), hello.data(), hello.size(), MSG_NOSIGNAL) ==
          static_cast<ssize_t>(hello.size()));
  CHECK(is_closed(again));
  CHECK(num_refused(pair.b) == 1);
  CHECK(pair.counters().queue_pairs_made == made);
  check_works(pair);
}

TEST_CASE("verbs: with a secret in the environment the address carries none") {
  FakeVerbs::install();
  const auto open = [] { return Node("verbs", "library=fake"); };
  Node without = open();
  setenv("MOE_P2P_SECRET", "of all ranks", 1);
  Node a = open(), b = open();
  setenv("MOE_P2P_SECRET", "of another job", 1);
  Node other = open();
  unsetenv("MOE_P2P_SECRET");
  CHECK_FALSE(address_of(b).secret);
  CHECK(refusal_of(a, address_of(b)) == Code::kOk);
  CHECK(num_refused(b) == 0);
  CHECK(refusal_of(other, address_of(b)) == Code::kPeerDead);
  CHECK(num_refused(b) >= 1);
  CHECK(refusal_of(without, address_of(b)) == Code::kInvalidArgument);
  CHECK(refusal_of(other, address_of(without)) == Code::kOk);  // who has the address may
}

TEST_CASE("verbs: bind= listens on one address and announces it") {
  FakeVerbs::install();
  Node a("verbs", "library=fake"), b("verbs", "library=fake,bind=127.0.0.2");
  const auto address = address_of(b);
  CHECK(address.hosts == std::vector<std::string>{"127.0.0.2"});
  CHECK(refusal_of(a, address) == Code::kOk);
  CHECK_THROWS_AS(dial(b), base::Error);  // 127.0.0.1
  CHECK_THROWS_AS(Node("verbs", "library=fake,bind=here"), base::Error);
}

TEST_CASE("verbs: many peers at once need one handshake each, however slow queue pairs are") {
  FakePair pair("handshake_ms=60000");
  const uint64_t made = pair.counters().queue_pairs_made;
  FakeVerbs::Faults faults;
  faults.make_queue_ms = 25;  // 64 of them: longer than an address is tried at first
  pair.set(faults);
  std::vector<std::future<PeerId>> connecting;
  for (int i = 0; i < 64; ++i)
    connecting.push_back(std::async(std::launch::async, [&] { return pair.a.connect(pair.b); }));
  for (auto& peer : connecting) static_cast<void>(peer.get());
  pair.set({});
  CHECK(pair.counters().queue_pairs_made == made + 128);
  check_works(pair);
}

}  // namespace
}  // namespace moe_p2p::provider_test
