#include "engine/memory_region.h"

#include "base/letter.h"

namespace moe_p2p::engine {

using base::Code;

namespace {

// Each message begins with its tag and the letter: bytes of another purpose or version are refused
// by name.
constexpr uint32_t kAddressTag = 0x31415045;     // "EPA1"
constexpr uint32_t kDescriptorTag = 0x31445045;  // "EPD1"

}  // namespace

base::Bytes EngineAddress::serialize() const {
  base::WireWriter out;
  base::put_letter(out, kAddressTag);
  out.put(static_cast<uint32_t>(nics.size()));
  for (const auto& nic : nics) out.put_bytes(nic);
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
  in.expect_end();
  return address;
}

base::Bytes MemoryDescriptor::serialize() const {
  base::WireWriter out;
  base::put_letter(out, kDescriptorTag);
  out.put_bytes(owner.serialize());
  out.put(bytes);
  out.put(static_cast<int32_t>(kind));
  for (const auto& rail : rails) {
    out.put(rail.remote_addr);
    out.put(rail.remote_key);
  }
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
  for (size_t i = 0; i < descriptor.owner.nics.size(); ++i) {
    const auto remote_addr = in.get<uint64_t>();
    descriptor.rails.push_back({remote_addr, in.get<uint64_t>()});
  }
  const auto shared = in.get_bytes();
  descriptor.shared.assign(shared.begin(), shared.end());
  in.expect_end();
  return descriptor;
}

}  // namespace moe_p2p::engine
