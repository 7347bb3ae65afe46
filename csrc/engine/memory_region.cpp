#include "engine/memory_region.h"

#include "base/letter.h"

namespace moe_p2p::engine {

using base::Code;

namespace {

// Each message begins with its tag and the letter: bytes of another purpose or version are refused
// by name.
constexpr uint32_t kAddressTag = 0x31415045;     // "EPA1"
constexpr uint32_t kDescriptorTag = 0x31445045;  // "EPD1"

void put_keys(base::WireWriter& out, const std::vector<RemoteKey>& rails) {
  for (const RemoteKey& rail : rails) {
    out.put(rail.remote_addr);
    out.put(rail.remote_key);
  }
}

std::vector<RemoteKey> get_keys(base::WireReader& in, size_t num) {
  std::vector<RemoteKey> rails;
  for (size_t i = 0; i < num; ++i) {
    const auto remote_addr = in.get<uint64_t>();
    rails.push_back({remote_addr, in.get<uint64_t>()});
  }
  return rails;
}

}  // namespace

base::Bytes EngineAddress::serialize() const {
  base::WireWriter out;
  base::put_letter(out, kAddressTag);
  out.put(static_cast<uint32_t>(nics.size()));
  for (const auto& nic : nics) out.put_bytes(nic);
  out.put(inbox.num_rings);
  if (inbox.num_rings > 0) {
    out.put(inbox.num_slots);
    out.put(inbox.max_bytes);
    put_keys(out, inbox.rails);
  }
  return out.take();
}

EngineAddress EngineAddress::parse(std::span<const std::byte> bytes) {
  base::WireReader in(bytes, "engine address");
  base::expect_letter(in, kAddressTag, Code::kInvalidArgument, "engine address");
  const auto num_nics = in.get<uint32_t>();
  MOE_P2P_CHECK(num_nics >= 1 && num_nics <= kMaxNics, Code::kInvalidArgument,
                "engine address: names ", num_nics, " NICs, must be 1 to ", kMaxNics);
  EngineAddress address;
  for (uint32_t i = 0; i < num_nics; ++i) {
    const auto nic = in.get_bytes();
    address.nics.emplace_back(nic.begin(), nic.end());
  }
  InboxPlace& inbox = address.inbox;
  inbox.num_rings = in.get<uint32_t>();
  if (inbox.num_rings > 0) {
    inbox.num_slots = in.get<uint32_t>();
    inbox.max_bytes = in.get<uint32_t>();
    inbox.check("engine address");
    inbox.rails = get_keys(in, num_nics);
  }
  in.expect_end();
  return address;
}

void InboxPlace::check(const char* what) const {
  const auto check = [&](const char* name, uint32_t value, uint32_t most) {
    MOE_P2P_CHECK(value >= 1 && value <= most, Code::kInvalidArgument, what, ": ", name, " is ",
                  value, ", must be 1 to ", most);
  };
  check("number of senders", num_rings, kMaxRings);
  check("number of messages of a sender", num_slots, kMaxSlots);
  check("bytes of a message", max_bytes, kMaxBytes);
}

base::Bytes MemoryDescriptor::serialize() const {
  base::WireWriter out;
  base::put_letter(out, kDescriptorTag);
  out.put_bytes(owner.serialize());
  out.put(bytes);
  out.put(static_cast<int32_t>(kind));
  put_keys(out, rails);
  out.put_bytes(shared);
  return out.take();
}

MemoryDescriptor MemoryDescriptor::parse(std::span<const std::byte> bytes) {
  base::WireReader in(bytes, "memory descriptor");
  base::expect_letter(in, kDescriptorTag, Code::kInvalidArgument, "memory descriptor");
  MemoryDescriptor descriptor;
  descriptor.owner = EngineAddress::parse(in.get_bytes());
  descriptor.bytes = in.get<uint64_t>();
  const auto kind = in.get<int32_t>();
  MOE_P2P_CHECK(kind == static_cast<int32_t>(provider::MemoryKind::kHost) ||
                    kind == static_cast<int32_t>(provider::MemoryKind::kCuda),
                Code::kInvalidArgument, "memory descriptor: unknown kind of memory ", kind);
  descriptor.kind = static_cast<provider::MemoryKind>(kind);
  descriptor.rails = get_keys(in, descriptor.owner.nics.size());
  const auto shared = in.get_bytes();
  descriptor.shared.assign(shared.begin(), shared.end());
  in.expect_end();
  return descriptor;
}

}  // namespace moe_p2p::engine
