// One step of the protocol: its number, its place, and what a wait in it is for.
#pragma once

#include <cstdint>
#include <string>

#include "base/log.h"
#include "kernels/abi/signal.h"

namespace moe_p2p::moe {

struct Step {
  uint64_t index = 0;
  int slot = 0;

  static Step of(uint64_t index, int steps_in_flight) noexcept {
    return {index, static_cast<int>(index % static_cast<uint64_t>(steps_in_flight))};
  }
  uint64_t word() const noexcept { return index + 1; }  // value of headers and doorbells
  uint64_t flag() const noexcept { return abi::come(index); }
};

// What a call waits for; used in the error text of a timeout.
struct Pending {
  Step step;
  abi::Phase phase{};
};

constexpr const char* phase_name(abi::Phase phase) {
  return phase == abi::Phase::kDispatch  ? "dispatch"
         : phase == abi::Phase::kCombine ? "combine"
                                         : "late weights";
}

// Error text of a dispatch whose max_tokens differs between two ranks.
inline std::string other_max_tokens(int source, uint64_t theirs, int rank, uint64_t own) {
  return base::concat("max_tokens of rank ", source, "'s call is ", theirs, ", of rank ", rank,
                      "'s ", own,
                      "; it must be the same on all ranks (of DeepEP's V2: "
                      "num_max_tokens_per_rank)");
}

// Error text of a combine whose rows of y were not written in time.
inline std::string unready(uint64_t counter, int64_t value) {
  return base::concat(
      "counter ", counter, " of `ready` stands at ", value,
      ", less than is awaited: the product that writes y did not raise it in time. "
      "Is it launched, on another stream, with multiprocessors left for it, and did its "
      "kernels run once before, which loads them?");
}

}  // namespace moe_p2p::moe
