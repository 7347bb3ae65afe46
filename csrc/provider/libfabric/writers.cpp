#include "provider/libfabric/writers.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

namespace moe_p2p::provider::libfabric {

namespace {

// Pairs of a peer and a memory of this NIC, at most three quarters of this. Too small: memory
// cannot be given back any more (LibfabricDomain::end_half_writes).
constexpr size_t kTableEntries = size_t{1} << 15;

}  // namespace

WriterName writer_name(const base::Bytes& name) {
  sockaddr_in address{};
  if (name.size() != sizeof(address)) return 0;
  std::memcpy(&address, name.data(), sizeof(address));
  if (address.sin_family != AF_INET) return 0;
  return uint64_t{ntohl(address.sin_addr.s_addr)} << 16 | ntohs(address.sin_port);
}

base::Bytes endpoint_name(WriterName writer) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(static_cast<uint32_t>(writer >> 16));
  address.sin_port = htons(static_cast<uint16_t>(writer));
  base::Bytes name(sizeof(address));
  std::memcpy(name.data(), &address, sizeof(address));
  return name;
}

void Writers::open() { table_.resize(kTableEntries); }

void Writers::note(uint64_t announcement) noexcept {
  constexpr uint64_t kSpread = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio
  for (size_t at = announcement * kSpread >> 32;; ++at) {
    uint64_t& entry = table_[at % kTableEntries];
    if (entry == announcement) return;
    if (entry != 0) continue;
    full_ |= used_ >= kTableEntries / 4 * 3;
    if (full_) return;
    entry = announcement;
    ++used_;
    return;
  }
}

bool Writers::knows(WriterName writer) const {
  return std::ranges::any_of(table_, [&](uint64_t entry) { return entry >> 16 == writer; });
}

std::vector<WriterName> Writers::take(uint64_t remote_key) {
  std::vector<WriterName> found;
  std::vector<uint64_t> others;
  for (const uint64_t entry : table_) {
    if (entry == 0) continue;
    if (entry == announcement(entry >> 16, remote_key))
      found.push_back(entry >> 16);
    else
      others.push_back(entry);
  }
  if (found.empty()) return found;
  table_.assign(kTableEntries, 0);
  used_ = 0;
  for (const uint64_t entry : others) note(entry);
  return found;
}

}  // namespace moe_p2p::provider::libfabric
