// Counts of a routing for the host alone, as part of an op that waits for them.
#pragma once

#include <cstdint>

#include "ops/tensor_checks.h"

namespace moe_p2p::ops {

// Where counts go: abi::count_words() of memory that the host and the GPU see, which hold the
// call's number last.
struct HostCounts {
  int64_t kernel;  // CUfunction of kernels/count.cu; 0: for tensors in host memory
  int64_t num_experts, num_ranks;
  int64_t host;  // address
  int64_t call;
};

// Counts topk_idx [T, K] where it lies, in the current stream; makes no tensors.
void count_for_host(const Tensor& topk_idx, const HostCounts& to);

}  // namespace moe_p2p::ops
