#include "provider/verbs/gid.h"

#include <arpa/inet.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"

namespace moe_p2p::provider::verbs {

using base::Code;

namespace {

constexpr uint8_t kIpv4Prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr const char* kTypeNames[] = {"InfiniBand", "RoCE v1", "RoCE v2"};

std::string table_text(std::span<const GidTableEntry> table) {
  std::string text;
  for (const auto& entry : table)
    text += base::concat(text.empty() ? "" : ", ", entry.index, " = ", gid_text(entry.gid), " (",
                         kTypeNames[std::min<uint32_t>(entry.type, 2)], ")");
  return text.empty() ? "none; has the port an IP address?" : text;
}

int rank_of(const GidTableEntry& entry, bool ethernet) {
  if (!ethernet) return flid_of(entry.gid) != 0 ? 0 : 1;
  if (gid_is_ipv4(entry.gid)) return 0;
  return gid_is_link_local(entry.gid) ? 2 : 1;
}

}  // namespace

bool gid_is_ipv4(const Gid& gid) noexcept { return std::memcmp(gid.raw, kIpv4Prefix, 12) == 0; }
bool gid_is_link_local(const Gid& gid) noexcept { return gid.raw[0] == 0xfe && gid.raw[1] == 0x80; }

uint64_t subnet_of(const Gid& gid) noexcept {
  Gid prefix = gid;
  prefix.raw[4] = prefix.raw[5] = 0;
  return prefix.words[0];
}
uint16_t flid_of(const Gid& gid) noexcept {
  return static_cast<uint16_t>(gid.raw[4] << 8 | gid.raw[5]);
}

std::string gid_text(const Gid& gid) {
  char text[INET6_ADDRSTRLEN] = {};
  if (gid_is_ipv4(gid)) {
    inet_ntop(AF_INET, gid.raw + 12, text, sizeof text);
  } else {
    inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  }
  return text;
}

GidTableEntry choose_gid(std::span<const GidTableEntry> table, const Config& wish, bool ethernet,
                         const std::string& device) {
  std::vector<GidTableEntry> fitting;
  const uint32_t type = wish.roce_v1 ? 1 : 2;
  std::string wanted = base::concat("a ", kTypeNames[type], " address");
  if (wish.gid_index >= 0) {
    wanted = base::concat("gid_index=", wish.gid_index);
  } else if (!wish.gid_address.empty()) {
    wanted = base::concat(wanted, " gid_address=", wish.gid_address);
  }
  for (const auto& entry : table) {
    if (wish.gid_index >= 0) {
      if (entry.index == static_cast<uint32_t>(wish.gid_index)) fitting.push_back(entry);
      continue;
    }
    if (ethernet && entry.type != type) continue;
    if (!wish.gid_address.empty() && gid_text(entry.gid) != wish.gid_address) continue;
    fitting.push_back(entry);
  }
  MOE_P2P_CHECK(!fitting.empty(), Code::kUnavailable, device, ": no GID fits ", wanted,
                "; the port has: ", table_text(table), ". Set gid_index, gid_type or gid_address");
  return *std::ranges::min_element(fitting, [&](const auto& a, const auto& b) {
    return rank_of(a, ethernet) < rank_of(b, ethernet);
  });
}

}  // namespace moe_p2p::provider::verbs
