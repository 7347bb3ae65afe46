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

  // Listens on one address of this host, or on all when it is empty; the system chooses the port.
  static Socket listen(const std::string& address = "");
  uint16_t local_port() const;
  std::string peer_host() const;
  // Returns an empty Socket when no connection waits, or there are no descriptors: see errno.
  Socket accept() const;
  // Throws Error{kPeerDead} when refused, {kTimeout} at the deadline, {kAborted} for a signal.
  static Socket dial(const std::string& host, uint16_t port, platform::Deadline deadline);

  // False for a message that does not fit into the socket's buffer: messages are short, so the peer
  // is stuck.
  bool send(const base::Bytes& message) noexcept;
  enum class Got { kNothing, kMessage, kEnd };
  // Reads one message at most, and no byte beyond it. kEnd also for a message that is too long.
  Got receive(base::Bytes& message);
  // Throws Error{kPeerDead} at the connection's end, {kTimeout} at the deadline, {kAborted} for a
  // signal.
  base::Bytes wait_message(platform::Deadline deadline);

 private:
  platform::OwnFd fd_;  // closed in forked children, so that peers see when this process dies
  base::Bytes received_;
};

// For waits, between two looks: throws Error{kAborted} when a signal asks the wait to end.
void check_interrupt();

// The addresses at which this process may be reached: `wish` or, without one, the NIC's and then
// all of the host's.
std::vector<std::string> own_hosts(const std::string& wish, const Nic& nic);

}  // namespace moe_p2p::provider::verbs
