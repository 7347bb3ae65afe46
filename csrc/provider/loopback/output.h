// The array that poll() fills.
#pragma once

#include <span>

#include "provider/provider.h"

namespace moe_p2p::provider::loopback {

struct Output {
  std::span<Completion> completions;
  size_t count = 0;

  bool full() const noexcept { return count == completions.size(); }
  void put(const Completion& completion) noexcept { completions[count++] = completion; }
  void put_imm(uint32_t imm) noexcept {
    Completion completion;
    completion.kind = Completion::Kind::kImmediate;
    completion.imm = imm;
    put(completion);
  }
};

}  // namespace moe_p2p::provider::loopback
