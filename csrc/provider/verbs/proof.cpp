#include "provider/verbs/proof.h"

#include <cstdlib>
#include <string_view>

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Digest;

std::optional<Secret> environment_secret() {
  const char* const value = std::getenv("MOE_P2P_SECRET");
  if (!value || !*value) return std::nullopt;
  const std::string_view purpose = "moe_p2p verbs handshake", text = value;
  return base::hmac_sha256(std::as_bytes(std::span(text)), std::as_bytes(std::span(purpose)));
}

Digest Proof::of(Side side, uint64_t number, std::span<const std::byte> message) const {
  base::WireWriter writer;
  writer.put(side);
  writer.put(of_target_);
  writer.put(of_connector_);
  writer.put(number);
  writer.put_bytes(message);
  return base::hmac_sha256(secret_, writer.take());
}

Bytes Proof::seal(Bytes message) {
  const Digest proof = of(own_, num_sent_++, message);
  message.insert(message.end(), proof.begin(), proof.end());
  return message;
}

std::optional<Bytes> Proof::open(std::span<const std::byte> sealed) {
  if (sealed.size() < sizeof(Digest)) return std::nullopt;
  const auto message = sealed.first(sealed.size() - sizeof(Digest));
  const Side peer = own_ == Side::kTarget ? Side::kConnector : Side::kTarget;
  const bool right =
      base::same_digest(of(peer, num_received_++, message), sealed.subspan(message.size()));
  if (!right) return std::nullopt;
  return Bytes(message.begin(), message.end());
}

}  // namespace moe_p2p::provider::verbs
