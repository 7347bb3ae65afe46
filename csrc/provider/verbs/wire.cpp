#include "provider/verbs/wire.h"

#include <algorithm>

#include "base/letter.h"
#include "base/log.h"

namespace moe_p2p::provider::verbs {

using base::Bytes;
using base::Code;

namespace {

constexpr uint32_t kAddressTag = 0x42425256;   // "VRBB"
constexpr uint32_t kGreetingTag = 0x47425256;  // "VRBG"

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

}  // namespace

Bytes NicAddress::encode() const {
  base::WireWriter writer;
  base::put_letter(writer, kAddressTag);
  writer.put(nic_id);
  writer.put_string(label);
  writer.put(tcp_port);
  writer.put(static_cast<uint32_t>(hosts.size()));
  for (const auto& host : hosts) writer.put_string(host);
  writer.put_bytes(secret ? std::span<const std::byte>(*secret) : std::span<const std::byte>());
  return writer.take();
}

NicAddress NicAddress::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "verbs address");
  base::expect_letter(reader, kAddressTag, Code::kInvalidArgument,
                      "verbs: the address to connect to");
  NicAddress address;
  address.nic_id = reader.get<uint64_t>();
  address.label = reader.get_string();
  address.tcp_port = reader.get<uint16_t>();
  const auto num = reader.get<uint32_t>();
  for (uint32_t i = 0; i < num; ++i) address.hosts.push_back(reader.get_string());
  const auto secret = reader.get_bytes();
  MOE_P2P_CHECK(secret.empty() || secret.size() == sizeof(Secret), Code::kInvalidArgument,
                "verbs address: a secret of ", secret.size(), " bytes");
  if (!secret.empty()) std::ranges::copy(secret, address.secret.emplace().begin());
  reader.expect_end();
  return address;
}

Bytes Greeting::encode() const {
  base::WireWriter writer;
  base::put_letter(writer, kGreetingTag);
  writer.put(nonce);
  return writer.take();
}

Greeting Greeting::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "greeting of a verbs handshake");
  base::expect_letter(reader, kGreetingTag, Code::kPeerDead, "another program listens there");
  const Greeting greeting{reader.get<Nonce>()};
  reader.expect_end();
  return greeting;
}

Bytes Hello::encode() const {
  base::WireWriter writer;
  writer.put(nic_id);
  writer.put_string(label);
  writer.put(tag);
  put_lanes(writer, port, lanes);
  return writer.take();
}

Hello Hello::decode(std::span<const std::byte> bytes) {
  base::WireReader reader(bytes, "verbs handshake");
  Hello hello;
  hello.nic_id = reader.get<uint64_t>();
  hello.label = reader.get_string();
  hello.tag = reader.get<uint64_t>();
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

}  // namespace moe_p2p::provider::verbs
