// What the host passes to the kernel of torch.ops.moe_p2p.signal (kernels/signal.cu).
#pragma once

#include "kernels/abi/params.h"

namespace moe_p2p::abi {

struct SignalParams {
  DevicePtr<const u64> step;  // set on the stream before a forward pass; 0: it sends nothing
  DevicePtr<u64> word;        // of the layer, in pinned host memory: its last step, only grows
};

}  // namespace moe_p2p::abi
