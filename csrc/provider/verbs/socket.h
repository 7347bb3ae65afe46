// TCP connections that carry the messages of wire.h. Control path.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/wire.h"
#include "platform/process.h"
#include "platform/wait.h"
#include "provider/verbs/nic.h"

namespace moe_p2p::provider::verbs {

// A non-blocking TCP connection that carries length-prefixed messages.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

  // On one address of this host, or when that is empty on all; the system chooses the port.
  static Socket listen(const std::string& address = "");
  uint16_t local_port() const;
  std::string peer_host() const;
  // An empty one when nobody waits, or there is no room for another: errno says which.
  Socket accept() const;
  // Throws Error{kPeerDead} when refused, {kTimeout} at the deadline, {kAborted} for a signal.
  static Socket dial(const std::string& host, uint16_t port, platform::Deadline deadline);

  // Messages are short: one that does not fit into the socket's buffer means a peer that is stuck.
  bool send(const base::Bytes& message) noexcept;
  enum class Got { kNothing, kMessage, kEnd };
  // One message at most, and not a byte more than it has. kEnd also for one that is too long.
  Got receive(base::Bytes& message);
  // Throws Error{kPeerDead} at the connection's end, {kTimeout} at the deadline, {kAborted} for a signal.
  base::Bytes wait_message(platform::Deadline deadline);

 private:
  platform::OwnFd fd_;  // a forked child would keep peers from seeing that this process died
  base::Bytes received_;
};

// Between two looks of a wait: throws Error{kAborted} when a signal wants it to end.
void check_interrupt();

// The addresses under which this process may be reached: `wish` or, without one, that of the NIC and
// then all of the host.
std::vector<std::string> own_hosts(const std::string& wish, const Nic& nic);

}  // namespace moe_p2p::provider::verbs
