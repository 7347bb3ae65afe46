// Optimized and without ASan's checks (build.py): it looks at every byte that tests send.
#include "filled.h"

#include <algorithm>

namespace moe_p2p::provider_test {

std::byte pattern(uint64_t index, uint64_t i) {
  return static_cast<std::byte>((index * 131 + i * 7 + (i >> 8)) % 251 + 1);
}
void fill(std::span<std::byte> bytes, uint64_t index) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = pattern(index, i);
}
bool holds(std::span<const std::byte> bytes, uint64_t index) {
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != pattern(index, i)) return false;
  return true;
}
bool all_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace moe_p2p::provider_test
