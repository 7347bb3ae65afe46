// What travels between two NICs before they can write to each other, and the TCP connections that carry
// it. A queue pair needs both ends: the one who connects sends a Hello with its ends, the target makes
// its own and answers. TCP because both sides must know: what is lost is sent again, and when either
// process ends, the other one's socket says so. Control path.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/wire.h"
#include "platform/wait.h"
#include "provider/verbs/queue_pair.h"

namespace moe_p2p::provider::verbs {

// What a Domain gives out as its address.
struct NicAddress {
  uint64_t nic_id = 0;  // random: tells the NIC from another that has its host and port by chance
  std::string label;    // "mlx5_0 of host7 (pid 1234)"
  uint16_t tcp_port = 0;
  std::vector<std::string> hosts;  // in the order to try

  base::Bytes encode() const;
  static NicAddress decode(std::span<const std::byte> bytes);  // throws Error{kInvalidArgument}
};

struct Hello {
  uint64_t nic_id = 0;  // of the target
  std::string label;    // of the sender
  PortAddress port;
  std::vector<QpAddress> lanes;  // those to connect, or to connect anew

  base::Bytes encode() const;
  static Hello decode(std::span<const std::byte> bytes);
};

struct Answer {
  std::string refusal;  // empty: agreed
  PortAddress port;
  std::vector<QpAddress> lanes;

  base::Bytes encode() const;
  static Answer decode(std::span<const std::byte> bytes);
};

// A non-blocking TCP connection that carries length-prefixed messages.
class Socket {
 public:
  explicit Socket(int fd = -1) noexcept : fd_(fd) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  // Of any address of this host; the system chooses the port.
  static Socket listen();
  uint16_t local_port() const;
  // An empty one when nobody waits.
  Socket accept() const;
  // Throws Error{kPeerDead} when refused, {kTimeout} at the deadline.
  static Socket dial(const std::string& host, uint16_t port, platform::Deadline deadline);

  // Messages are short: one that does not fit into the socket's buffer means a peer that is stuck.
  bool send(const base::Bytes& message) noexcept;
  enum class Got { kNothing, kMessage, kEnd };
  Got receive(base::Bytes& message);
  // Throws Error{kPeerDead} at the connection's end, {kTimeout} at the deadline.
  base::Bytes wait_message(platform::Deadline deadline);

 private:
  int fd_;
  base::Bytes received_;
};

// The addresses under which this process may be reached: `wish` or, without one, that of the NIC and
// then all of the host.
std::vector<std::string> own_hosts(const std::string& wish, const Nic& nic);

}  // namespace moe_p2p::provider::verbs
