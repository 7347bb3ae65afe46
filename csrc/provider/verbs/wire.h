// What two NICs tell each other before they can write. A queue pair needs both ends: the target
// greets, the one who connects sends a Hello with its ends and the proof that it knows the target's
// secret (proof.h), the target makes its own and answers. Over TCP (socket.h) because both sides
// must know: what is lost is sent again, and when either process ends, the other one's socket says
// so. Control path.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/wire.h"
#include "provider/verbs/proof.h"
#include "provider/verbs/queue_pair.h"

namespace moe_p2p::provider::verbs {

// What a Domain gives out as its address.
struct NicAddress {
  uint64_t nic_id = 0;  // random: tells the NIC from another that has its host and port by chance
  std::string label;    // "mlx5_0 of host7 (pid 1234)"
  uint16_t tcp_port = 0;
  std::vector<std::string> hosts;  // in the order to try
  std::optional<Secret> secret;    // proof.h; none: MOE_P2P_SECRET, which both ends have

  base::Bytes encode() const;
  static NicAddress decode(std::span<const std::byte> bytes);  // throws Error{kInvalidArgument}
};

// What the target says first, without a proof.
struct Greeting {
  Nonce nonce{};

  base::Bytes encode() const;
  static Greeting decode(std::span<const std::byte> bytes);
};

// The first Hello has the nonce of its sender in front.
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

}  // namespace moe_p2p::provider::verbs
