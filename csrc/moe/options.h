// Options of an AllToAll. plan: equal on all ranks.
#pragma once

#include <chrono>
#include <cstdint>

#include "moe/plan/plan.h"
#include "platform/wait.h"

namespace moe_p2p::moe {

// How GPUs see what has arrived from other nodes (docs/protocol.md, section 7). kAuto: the first
// that can be.
enum class ArrivalFlags : uint8_t {
  kAuto,
  kWrite,    // NICs store a flag behind what they write
  kGdrCopy,  // the proxy stores it, into GPU memory that it maps
  kRelay,    // the proxy raises a word on the host, which a block of the kernel passes on
};

struct AllToAllOptions {
  PlanInput plan;
  int rank = 0;
  // Equal on all ranks, and of no other communicator that this rank's engine has, or whose partners
  // may still send.
  uint32_t communicator = 0;
  uint64_t tag = 0;  // of its connections, for TransferEngine::sever(); 0: none
  platform::WaitPolicy wait;
  std::chrono::milliseconds timeout{30'000};  // of every wait
  int num_threads = 1;                        // of the host kernels
  // Tensors are on a GPU; use_device() before address(), use_signals() after connect().
  bool device = false;
  // [W] words of moe/node/masks.h in host memory, which outlive the object. A rank that is late or
  // gone is then masked instead of breaking this one. null: no masks.
  int32_t* masks = nullptr;
  bool fixed_masks = false;  // only those that are set before connect(): ranks that are not there
  // Sums that lack what a lost rank had to send are NaN; else they go without it.
  bool poison = false;
  ArrivalFlags arrival_flags = ArrivalFlags::kAuto;  // equal on all ranks
};

}  // namespace moe_p2p::moe
