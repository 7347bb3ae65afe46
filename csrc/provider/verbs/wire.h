// The messages of two NICs before they can write. A queue pair needs both ends: the target sends a
// Greeting, the connecting NIC a Hello with its ends and the proof that it knows the target's
// secret (proof.h), the target makes its own ends and sends an Answer. Over TCP (socket.h) because
// both sides need certainty: what is lost is sent again, and when either process ends, the other
// one's socket closes. Control path.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/wire.h"
#include "provider/verbs/proof.h"
#include "provider/verbs/queue_pair.h"

namespace moe_p2p::provider::verbs {

// The address of a Domain.
struct NicAddress {
  uint64_t nic_id = 0;  // random: distinguishes NICs that have the same host and port by chance
  std::string label;    // "mlx5_0 of host7 (pid 1234)"
  uint16_t tcp_port = 0;
  std::vector<std::string> hosts;  // in the order to try
  std::optional<Secret> secret;    // proof.h; none: both ends have MOE_P2P_SECRET

  base::Bytes encode() const;
  static NicAddress decode(std::span<const std::byte> bytes);  // throws Error{kInvalidArgument}
};

// The target's first message, without a proof.
struct Greeting {
  Nonce nonce{};

  base::Bytes encode() const;
  static Greeting decode(std::span<const std::byte> bytes);
};

// Before the first Hello its sender puts its nonce.
struct Hello {
  uint64_t nic_id = 0;  // of the target
  std::string label;    // of the sender
  uint64_t tag = 0;     // of the connection, for Domain::sever(); 0: none
  PortAddress port;
  std::vector<QpAddress> lanes;  // to connect, or to connect again

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

}  // namespace moe_p2p::provider::verbs
