// What writes of the provider tests carry, so that a byte shows which write it is of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace moe_p2p::provider_test {

// Byte i of everything that write `index` carries. Never 0.
std::byte pattern(uint64_t index, uint64_t i);
void fill(std::span<std::byte> bytes, uint64_t index);
bool holds(std::span<const std::byte> bytes, uint64_t index);
bool all_zero(std::span<const std::byte> bytes);

}  // namespace moe_p2p::provider_test
