// How many seeds a loop over them takes: a quarter. MOE_P2P_ALL_SEEDS=1: all of them.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace moe_p2p::provider_test {

inline uint32_t num_seeds(uint32_t all) {
  return std::getenv("MOE_P2P_ALL_SEEDS") ? all : (all + 3) / 4;
}

}  // namespace moe_p2p::provider_test
