// How many seeds a loop over them takes: with sanitizers, which make each some ten times slower and
// look for faults that any of them shows, a quarter. MOE_P2P_ALL_SEEDS=1: all of them there too.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace moe_p2p::provider_test {

inline uint32_t num_seeds(uint32_t all) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  if (std::getenv("MOE_P2P_ALL_SEEDS") == nullptr) return (all + 3) / 4;
#endif
  return all;
}

}  // namespace moe_p2p::provider_test
