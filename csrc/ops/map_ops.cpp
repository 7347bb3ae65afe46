// torch.ops.moe_p2p.map_experts: the slots of logical experts, by a table: on the host here, on a
// GPU by kernels/map.cu. moe_p2p/moe/expert_map.py calls it.
#include <algorithm>
#include <cstdint>

#include "kernels/abi/map.h"
#include "ops/tensor_checks.h"
#include "platform/cuda.h"
#include "platform/cuda_context.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

constexpr int64_t kMostBlocks = 128;

template <typename Id>
void map_on_host(const abi::MapParams& p) {
  const Id* ids = p.topk_idx.as<const Id>();
  for (int64_t at = 0; at < p.num_ids; ++at) {
    const int64_t id = ids[at];
    MOE_P2P_CHECK(id >= -1 && id < p.num_experts, Code::kInvalidArgument, "topk_idx: token ",
                  at / p.topk, " names expert ", id, ", must be 0 to ", p.num_experts - 1,
                  ", or -1 for none");
    p.out.as<Id>()[at] =
        id < 0 ? Id{-1} : Id{p.slots.get()[abi::place_of_replica(p, at, id, p.counts.get()[id])]};
  }
}

// kernel: a CUfunction; 0: host memory. first: added to the number of a token, where its expert has
// several slots.
Tensor map_experts(int64_t kernel, const Tensor& topk_idx, const Tensor& slots,
                   const Tensor& counts, int64_t num_slots, int64_t first) {
  const int device = device_of(topk_idx);
  const OnDevice here(device);
  const auto* ids =
      input<void>(topk_idx, {"topk_idx", {ScalarType::Int, ScalarType::Long}, {kAny, kAny}});
  MOE_P2P_CHECK(first >= 0 && num_slots > 0, Code::kInvalidArgument, "map_experts: ", num_slots,
                " slots, from replica ", first, " on");
  MOE_P2P_CHECK(topk_idx.numel() <= INT32_MAX, Code::kInvalidArgument, "topk_idx has ",
                topk_idx.numel(), " ids, must have at most ", INT32_MAX);
  const Tensor out = make_tensor({topk_idx.size(0), topk_idx.size(1)}, topk_idx.scalar_type());
  const abi::MapParams params{.topk_idx = pointer<const void>(ids),
                              .out = pointer<void>(mutable_data_of(out)),
                              .slots = pointer<const int32_t>(input<int32_t>(
                                  slots, {"slots", {ScalarType::Int}, {counts.numel(), kAny}})),
                              .counts = pointer<const int32_t>(
                                  input<int32_t>(counts, {"counts", {ScalarType::Int}, {kAny}})),
                              .num_ids = topk_idx.numel(),
                              .topk = static_cast<int32_t>(topk_idx.size(1)),
                              .num_experts = static_cast<int32_t>(counts.numel()),
                              .max_replicas = static_cast<int32_t>(slots.size(1)),
                              .num_slots = static_cast<int32_t>(num_slots),
                              .first = static_cast<int32_t>(first),
                              .is_int64 = topk_idx.scalar_type() == ScalarType::Long};
  if (params.num_ids == 0) return out;
  if (kernel == 0) {
    MOE_P2P_CHECK(device < 0, Code::kInvalidArgument, "kernel is 0, must be one for a GPU");
    params.is_int64 ? map_on_host<int64_t>(params) : map_on_host<int32_t>(params);
    return out;
  }
  const int64_t blocks = (params.num_ids + abi::kMapThreads - 1) / abi::kMapThreads;
  const platform::ContextGuard current(platform::context_of(device));
  platform::launch_kernel({.kernel = static_cast<uint64_t>(kernel),
                           .num_blocks = static_cast<unsigned>(std::min(blocks, kMostBlocks)),
                           .num_threads = abi::kMapThreads,
                           .stream = current_stream(device).handle},
                          &params);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("map_experts", TORCH_BOX(&map_experts));
}

}  // namespace moe_p2p::ops
