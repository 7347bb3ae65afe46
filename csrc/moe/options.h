// Options of an AllToAll. plan: equal on all ranks.
#pragma once

#include <chrono>
#include <cstdint>

#include "moe/plan/plan.h"
#include "platform/wait.h"

namespace moe_p2p::moe {

struct AllToAllOptions {
  PlanInput plan;
  int rank = 0;
  uint32_t communicator = 0;  // equal on all ranks, unused so far on each rank's engine
  platform::WaitPolicy wait;
  std::chrono::milliseconds timeout{30'000};  // of every wait
  int num_threads = 1;                        // of the host kernels
  // Tensors are on a GPU; use_device() before address(), use_signals() after connect().
  bool device = false;
  // [W] words of moe/node/masks.h in host memory, which outlive the object. A rank that is late or
  // gone is then masked instead of breaking this one. null: no masks.
  int32_t* masks = nullptr;
};

}  // namespace moe_p2p::moe
