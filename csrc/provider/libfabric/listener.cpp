#include "provider/libfabric/listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace moe_p2p::provider::libfabric {

namespace {

// Between two questions. Too small: a peer that is slow to connect has many of them to accept.
// Too large: a peer that has gone is waited for so long.
constexpr auto kPause = std::chrono::milliseconds(100);

}  // namespace

void Listener::forget() noexcept {
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
}

bool Listener::is_gone(const base::Bytes& name, platform::Clock::time_point now) noexcept {
  if (now - asked_ >= kPause) {  // an answer that nobody has looked for may be an old one
    asked_ = now;
    return ask(name);
  }
  pollfd entry{socket_, POLLOUT, 0};
  if (socket_ < 0 || ::poll(&entry, 1, 0) <= 0) return false;
  int error = 0;
  socklen_t bytes = sizeof(error);
  const bool answered = ::getsockopt(socket_, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0;
  forget();
  return answered && error == ECONNREFUSED;
}

bool Listener::ask(const base::Bytes& name) noexcept {
  forget();
  sockaddr_storage address{};
  if (name.size() > sizeof(address)) return false;
  std::memcpy(&address, name.data(), name.size());
  const bool v4 = address.ss_family == AF_INET && name.size() == sizeof(sockaddr_in);
  const bool v6 = address.ss_family == AF_INET6 && name.size() == sizeof(sockaddr_in6);
  if (!v4 && !v6) return false;
  socket_ = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (socket_ < 0) return false;
  const int result = ::connect(socket_, reinterpret_cast<const sockaddr*>(&address),
                               static_cast<socklen_t>(name.size()));
  if (result != 0 && errno == EINPROGRESS) return false;
  const bool refused = result != 0 && errno == ECONNREFUSED;
  forget();
  return refused;
}

}  // namespace moe_p2p::provider::libfabric
