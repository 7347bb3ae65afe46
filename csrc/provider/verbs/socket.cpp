#include "provider/verbs/socket.h"

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
#include "platform/interrupt.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;
using platform::Clock;
using platform::Deadline;

namespace {

// A Hello with 16 lanes is below 1 KiB. Every connection may make us keep this much.
constexpr uint32_t kMaxMessageBytes = 4096;
constexpr size_t kMaxHosts = 8;
// A host that vanished silently is noticed after about a minute.
constexpr int kKeepIdleS = 30, kKeepIntervalS = 10, kKeepProbes = 3;
// How late a wait notices a signal.
constexpr int kSliceMs = 50;

int milliseconds_until(Deadline deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, kSliceMs));
}

// False at the deadline.
bool wait_for(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    if (poll(&entry, 1, milliseconds_until(deadline)) > 0) return true;
    if (Clock::now() >= deadline) return false;
    check_interrupt();
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

void check_interrupt() {
  MOE_P2P_CHECK(!platform::interrupted(), Code::kAborted, "a signal interrupted a handshake");
}

Socket Socket::listen(const std::string& address) {
  addrinfo hints{};
  hints.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  Socket listener;
  int error = 0;
  for (const char* host : {address.empty() ? "::" : address.c_str(), "0.0.0.0"}) {
    addrinfo* found = nullptr;
    const int unknown = getaddrinfo(host, "0", &hints, &found);
    MOE_P2P_CHECK(unknown == 0 && found, Code::kInvalidArgument, "verbs settings: bind=", address,
                  " is refused; it must be an IP address of this host");
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
    listener = Socket(socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int off = 0;  // IPv4 peers have mapped addresses
    if (found->ai_family == AF_INET6)
      setsockopt(listener.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    const bool listens = bind(listener.fd(), found->ai_addr, found->ai_addrlen) == 0 &&
                         ::listen(listener.fd(), SOMAXCONN) == 0;
    error = listens ? 0 : errno;
    if (listens || !address.empty()) break;  // else: no IPv6 on this host
  }
  MOE_P2P_CHECK(error == 0, Code::kUnavailable, "verbs: listening for peers on TCP",
                address.empty() ? "" : " with bind=" + address, ": ", std::strerror(error));
  return listener;
}

std::string Socket::peer_host() const {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  char text[NI_MAXHOST] = "?";
  if (getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&peer), &size) == 0)
    getnameinfo(reinterpret_cast<sockaddr*>(&peer), size, text, sizeof text, nullptr, 0,
                NI_NUMERICHOST);
  return text;
}

uint16_t Socket::local_port() const {
  sockaddr_in6 own{};  // the port has the same offset in both families
  socklen_t size = sizeof own;
  getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&own), &size);
  return ntohs(own.sin6_port);
}

Socket Socket::accept() const {
  Socket peer(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
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
  return sendmsg(fd_.get(), &whole, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof bytes + bytes);
}

Socket::Got Socket::receive(Bytes& message) {
  for (;;) {
    uint32_t bytes = 0;
    size_t wanted = sizeof bytes;
    if (received_.size() >= wanted) {
      std::memcpy(&bytes, received_.data(), sizeof bytes);
      if (bytes > kMaxMessageBytes) return Got::kEnd;  // not a message of ours
      wanted += bytes;
      if (received_.size() == wanted) {
        message.assign(received_.begin() + sizeof bytes, received_.end());
        received_.clear();
        return Got::kMessage;
      }
    }
    std::byte chunk[kMaxMessageBytes];
    const ssize_t got = recv(fd_.get(), chunk, wanted - received_.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return Got::kNothing;
    if (got <= 0) return Got::kEnd;
    received_.insert(received_.end(), chunk, chunk + got);
  }
}

Bytes Socket::wait_message(Deadline deadline) {
  Bytes message;
  for (;;) {
    const Got got = receive(message);
    if (got == Got::kMessage) return message;
    MOE_P2P_CHECK(got != Got::kEnd, Code::kPeerDead, "the connection ended");
    MOE_P2P_CHECK(wait_for(fd_.get(), POLLIN, deadline), Code::kTimeout, "no answer in time");
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
