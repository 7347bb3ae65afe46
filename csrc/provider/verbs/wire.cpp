#include "provider/verbs/wire.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;
using platform::Clock;
using platform::Deadline;

namespace {

constexpr uint32_t kAddressMagic = 0x31425256;  // raised with every change of the messages
constexpr uint32_t kMaxMessageBytes = 1u << 16;
constexpr size_t kMaxHosts = 8;
// A host that vanished without a word is noticed after about a minute.
constexpr int kKeepIdleS = 30, kKeepIntervalS = 10, kKeepProbes = 3;

void put_lanes(base::WireWriter& writer, const PortAddress& port,
               const std::vector<QpAddress>& lanes) {
  writer.put(port);
  writer.put(static_cast<uint32_t>(lanes.size()));
  for (const QpAddress& lane : lanes) writer.put(lane);
}

void get_lanes(base::WireReader& reader, PortAddress& port, std::vector<QpAddress>& lanes) {
  port = reader.get<PortAddress>();
  const auto num = reader.get<uint32_t>();
  for (uint32_t i = 0; i < num; ++i) lanes.push_back(reader.get<QpAddress>());
}

int milliseconds_until(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000));
}

// False at the deadline.
bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    if (poll(&entry, 1, milliseconds_until(deadline)) > 0) return true;
    if (Clock::now() >= deadline) return false;
  }
}

void set_options(int fd) {
  const auto set = [fd](int level, int option, int value) {
    setsockopt(fd, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepIntervalS);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepProbes);
}

bool usable(const ifaddrs& entry) {
  if (!entry.ifa_addr || !(entry.ifa_flags & IFF_UP) || (entry.ifa_flags & IFF_LOOPBACK))
    return false;
  if (entry.ifa_addr->sa_family == AF_INET) return true;
  return entry.ifa_addr->sa_family == AF_INET6 &&
         !IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(entry.ifa_addr)->sin6_addr);
}

}  // namespace

Bytes NicAddress::encode() const {
  base::WireWriter writer;
  writer.put(kAddressMagic);
  writer.put(nic_id);
  writer.put_string(label);
  writer.put(tcp_port);
  writer.put(static_cast<uint32_t>(hosts.size()));
  for (const auto& host : hosts) writer.put_string(host);
  return writer.take();
}

NicAddress NicAddress::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "verbs address");
  MOE_P2P_CHECK(reader.get<uint32_t>() == kAddressMagic, Code::kInvalidArgument,
                "verbs: the address to connect to was made by another provider or version");
  NicAddress address;
  address.nic_id = reader.get<uint64_t>();
  address.label = reader.get_string();
  address.tcp_port = reader.get<uint16_t>();
  const auto num = reader.get<uint32_t>();
  for (uint32_t i = 0; i < num; ++i) address.hosts.push_back(reader.get_string());
  reader.expect_end();
  return address;
}

Bytes Hello::encode() const {
  base::WireWriter writer;
  writer.put(nic_id);
  writer.put_string(label);
  put_lanes(writer, port, lanes);
  return writer.take();
}

Hello Hello::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "verbs handshake");
  Hello hello;
  hello.nic_id = reader.get<uint64_t>();
  hello.label = reader.get_string();
  get_lanes(reader, hello.port, hello.lanes);
  reader.expect_end();
  return hello;
}

Bytes Answer::encode() const {
  base::WireWriter writer;
  writer.put_string(refusal);
  put_lanes(writer, port, lanes);
  return writer.take();
}

Answer Answer::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "answer to a verbs handshake");
  Answer answer;
  answer.refusal = reader.get_string();
  get_lanes(reader, answer.port, answer.lanes);
  reader.expect_end();
  return answer;
}

Socket::Socket(Socket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), received_(std::move(other.received_)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(received_, other.received_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Socket Socket::listen() {
  Socket listener(socket(AF_INET6, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  bool bound = false;
  if (listener) {  // IPv4 comes mapped
    const int off = 0;
    setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    bound = bind(listener.fd(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0;
  } else {  // no IPv6 on this host
    listener = Socket(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    sockaddr_in any4{};
    any4.sin_family = AF_INET;
    bound = bind(listener.fd(), reinterpret_cast<sockaddr*>(&any4), sizeof any4) == 0;
  }
  MOE_P2P_CHECK(bound && ::listen(listener.fd(), SOMAXCONN) == 0, Code::kUnavailable,
                "verbs: listening for peers on TCP: ", std::strerror(errno));
  return listener;
}

uint16_t Socket::local_port() const {
  sockaddr_in6 own{};  // the port lies at the same place for both families
  socklen_t size = sizeof own;
  getsockname(fd_, reinterpret_cast<sockaddr*>(&own), &size);
  return ntohs(own.sin6_port);
}

Socket Socket::accept() const {
  Socket peer(accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (peer) set_options(peer.fd());
  return peer;
}

Socket Socket::dial(const std::string& host, uint16_t port, Deadline deadline) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string service = std::to_string(port);
  const int unknown = getaddrinfo(host.c_str(), service.c_str(), &hints, &found);
  MOE_P2P_CHECK(unknown == 0 && found, Code::kInvalidArgument, "host ", host, ": ",
                gai_strerror(unknown));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  Socket peer(socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  MOE_P2P_CHECK(peer, Code::kResourceExhausted, "making a socket: ", std::strerror(errno));
  set_options(peer.fd());
  int error = connect(peer.fd(), found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    MOE_P2P_CHECK(wait_for(peer.fd(), POLLOUT, deadline), Code::kTimeout, host, " port ", port,
                  " does not answer");
    socklen_t size = sizeof error;
    getsockopt(peer.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  MOE_P2P_CHECK(error == 0, Code::kPeerDead, host, " port ", port, ": ", std::strerror(error));
  return peer;
}

bool Socket::send(const Bytes& message) noexcept {
  const auto bytes = static_cast<uint32_t>(message.size());
  const iovec parts[] = {{const_cast<uint32_t*>(&bytes), sizeof bytes},
                         {const_cast<std::byte*>(message.data()), message.size()}};
  msghdr whole{};
  whole.msg_iov = const_cast<iovec*>(parts);
  whole.msg_iovlen = 2;
  return sendmsg(fd_, &whole, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof bytes + bytes);
}

Socket::Got Socket::receive(Bytes& message) {
  bool ended = false;
  for (;;) {
    std::byte chunk[4096];
    const ssize_t got = recv(fd_, chunk, sizeof chunk, 0);
    if (got < 0 && errno == EINTR) continue;
    ended = got == 0 || (got < 0 && errno != EAGAIN);
    if (got <= 0) break;
    received_.insert(received_.end(), chunk, chunk + got);
  }
  uint32_t bytes = 0;
  if (received_.size() >= sizeof bytes) {
    std::memcpy(&bytes, received_.data(), sizeof bytes);
    if (bytes > kMaxMessageBytes) return Got::kEnd;  // not one of ours
    if (received_.size() >= sizeof bytes + bytes) {
      const auto begin = received_.begin() + sizeof bytes;
      message.assign(begin, begin + bytes);
      received_.erase(received_.begin(), begin + bytes);
      return Got::kMessage;
    }
  }
  return ended ? Got::kEnd : Got::kNothing;
}

Bytes Socket::wait_message(Deadline deadline) {
  Bytes message;
  for (;;) {
    const Got got = receive(message);
    if (got == Got::kMessage) return message;
    MOE_P2P_CHECK(got != Got::kEnd, Code::kPeerDead, "the connection ended");
    MOE_P2P_CHECK(wait_for(fd_, POLLIN, deadline), Code::kTimeout, "no answer in time");
  }
}

std::vector<std::string> own_hosts(const std::string& wish, const Nic& nic) {
  if (!wish.empty()) return {wish};
  std::vector<std::string> hosts;
  if (nic.ethernet && !gid_is_link_local(nic.gid.gid)) hosts.push_back(gid_text(nic.gid.gid));
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return hosts;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  for (const ifaddrs* entry = all; entry && hosts.size() < kMaxHosts; entry = entry->ifa_next) {
    if (!usable(*entry)) continue;
    char text[NI_MAXHOST] = {};
    const socklen_t size =
        entry->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(entry->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0)
      continue;
    if (std::ranges::count(hosts, text) == 0) hosts.emplace_back(text);
  }
  if (hosts.empty()) hosts.emplace_back("127.0.0.1");
  return hosts;
}

}  // namespace moe_p2p::provider::verbs
