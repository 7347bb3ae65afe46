// How the ends of a handshake's connection prove to each other, in every message, that they know
// the secret of the target: HMAC-SHA256 over the sending side, both ends' nonces, the number of the
// message and the message. The nonces are new for each connection, so that no message can be
// replayed on another. Messages are not encrypted; nor is what the NICs write afterwards. Control
// path.
//
// Each NIC draws its secret and sends it inside its address, so that a process with the address may
// connect; with MOE_P2P_SECRET set the secret is made from that, and the address carries none.
#pragma once

#include <array>
#include <optional>

#include "base/sha256.h"
#include "base/wire.h"

namespace moe_p2p::provider::verbs {

using Nonce = std::array<std::byte, 16>;
using Secret = base::Digest;

// From MOE_P2P_SECRET; nullopt when it is not set or empty.
std::optional<Secret> environment_secret();

class Proof {
 public:
  enum class Side : uint8_t { kConnector = 1, kTarget = 2 };

  Proof(Side own, const Secret& secret, const Nonce& of_target, const Nonce& of_connector)
      : own_(own), secret_(secret), of_target_(of_target), of_connector_(of_connector) {}

  // Returns the message followed by its proof.
  base::Bytes seal(base::Bytes message);
  // Returns the message without its proof; nullopt when the proof is wrong.
  std::optional<base::Bytes> open(std::span<const std::byte> sealed);

 private:
  base::Digest of(Side side, uint64_t number, std::span<const std::byte> message) const;

  Side own_;
  Secret secret_;
  Nonce of_target_, of_connector_;
  uint64_t num_sent_ = 0, num_received_ = 0;
};

}  // namespace moe_p2p::provider::verbs
