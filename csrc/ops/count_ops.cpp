// torch.ops.moe_p2p: counts of a routing, where its tensors are and for the host, which a kernel
// gives them as soon as they are known (kernels/count.cu). Host tensors are counted here.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/abi/count.h"
#include "ops/count_ops.h"
#include "platform/cuda.h"
#include "platform/cuda_context.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

// What the kernel does, for tensors in host memory.
template <typename Id>
void count_on_host(const abi::CountParams& p) {
  const auto clear = [](const abi::DevicePtr<int32_t>& counts, int32_t num) {
    std::fill_n(counts.get(), num, 0);
  };
  clear(p.per_rank, p.num_ranks);
  clear(p.per_node, p.num_nodes);
  clear(p.per_expert, p.num_experts);
  const int32_t of_rank = p.num_experts / p.num_ranks;
  const int32_t of_node = p.num_nodes > 0 ? p.num_ranks / p.num_nodes : p.num_ranks;
  std::vector<char> in_node(static_cast<size_t>(p.num_ranks / of_node));
  std::vector<char> of_token(static_cast<size_t>(p.num_ranks));
  const Id* ids = p.topk_idx.as<const Id>();
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    char* in_rank = p.in_rank ? p.in_rank.get() + token * p.num_ranks : of_token.data();
    std::fill_n(in_rank, p.num_ranks, 0);
    std::ranges::fill(in_node, 0);
    for (int64_t k = 0; k < p.topk; ++k) {
      const int64_t expert = ids[token * p.topk + k];
      if (expert < 0 || expert >= p.num_experts) continue;
      const int64_t rank = expert / of_rank;
      ++p.per_expert[expert];
      p.per_rank[rank] += !std::exchange(in_rank[rank], 1);
      const auto node = static_cast<size_t>(rank / of_node);
      const bool is_new = !std::exchange(in_node[node], 1);
      if (p.num_nodes > 0) p.per_node[rank / of_node] += is_new;
    }
  }
}

void give_on_host(const abi::CountParams& p) {
  int32_t* const to = p.host.get();
  if (!to) return;
  if (p.per_rank.get() != to) {
    std::copy_n(p.per_rank.get(), p.num_ranks, to);
    std::copy_n(p.per_expert.get(), p.num_experts, to + p.num_ranks);
  }
  to[p.num_ranks + p.num_experts] = p.num_tokens;
  to[p.num_ranks + p.num_experts + 1] = static_cast<int32_t>(p.call);
}

// kernel: a CUfunction; 0: for tensors in host memory.
void run(int64_t kernel, int device, const abi::CountParams& params) {
  if (kernel == 0) {
    MOE_P2P_CHECK(device < 0, Code::kInvalidArgument, "kernel is 0, must be one for a GPU");
    if (params.topk_idx)
      params.topk_is_int64 ? count_on_host<int64_t>(params) : count_on_host<int32_t>(params);
    return give_on_host(params);
  }
  const platform::ContextGuard current(platform::context_of(device));
  const int64_t words = params.num_ranks + params.num_nodes + params.num_experts;
  platform::launch_kernel({.kernel = static_cast<uint64_t>(kernel),
                           .num_blocks = 1,
                           .num_threads = abi::kCountThreads,
                           .shared_bytes = static_cast<unsigned>(4 * words),
                           .stream = current_stream(device).handle},
                          &params);
}

void set_routing(abi::CountParams& params, const Tensor& topk_idx) {
  params.topk_idx = pointer<const void>(
      input<void>(topk_idx, {"topk_idx", {ScalarType::Int, ScalarType::Long}, {kAny, kAny}}));
  params.num_tokens = static_cast<int32_t>(topk_idx.size(0));
  params.topk = static_cast<int32_t>(topk_idx.size(1));
  params.topk_is_int64 = topk_idx.scalar_type() == ScalarType::Long;
}

// host: address of count_words() in pinned memory; 0: they are not wanted there.
std::tuple<Tensor, Tensor, Tensor, Tensor> count_routing(int64_t kernel, const Tensor& topk_idx,
                                                         int64_t num_experts, int64_t num_ranks,
                                                         int64_t num_nodes, int64_t host,
                                                         int64_t call) {
  const int device = device_of(topk_idx);
  const OnDevice here(device);
  MOE_P2P_CHECK(num_ranks > 0 && num_experts > 0 && num_experts % num_ranks == 0,
                Code::kInvalidArgument, "num_experts is ", num_experts,
                ", must be a multiple of the number of ranks ", num_ranks);
  MOE_P2P_CHECK(num_nodes >= 0 && (num_nodes == 0 || (num_ranks % num_nodes == 0 &&
                                                      64 % (num_ranks / num_nodes) == 0)),
                Code::kInvalidArgument, "num_nodes is ", num_nodes, ", must divide ", num_ranks,
                " ranks into nodes of 1, 2, 4 .. 64");
  abi::CountParams params{};
  set_routing(params, topk_idx);
  const int64_t num_tokens = topk_idx.size(0);
  const Tensor per_rank = make_tensor({num_ranks}, ScalarType::Int);
  const Tensor per_node = make_tensor({num_nodes}, ScalarType::Int);
  const Tensor per_expert = make_tensor({num_experts}, ScalarType::Int);
  const Tensor in_rank = make_tensor({num_tokens, num_ranks}, ScalarType::Bool);
  params.per_rank = pointer<int32_t>(mutable_data_of(per_rank));
  params.per_node = pointer<int32_t>(mutable_data_of(per_node));
  params.per_expert = pointer<int32_t>(mutable_data_of(per_expert));
  params.in_rank = pointer<char>(mutable_data_of(in_rank));
  params.host = {static_cast<uint64_t>(host)};
  params.num_ranks = static_cast<int32_t>(num_ranks);
  params.num_nodes = static_cast<int32_t>(num_nodes);
  params.num_experts = static_cast<int32_t>(num_experts);
  params.call = static_cast<uint32_t>(call);
  run(kernel, device, params);
  return {per_rank, per_node, per_expert, in_rank};
}

// Gives counts that lie on the device to the host.
void share_counts(int64_t kernel, const Tensor& per_rank, const Tensor& per_expert,
                  int64_t num_tokens, int64_t host, int64_t call) {
  const int device = device_of(per_expert);
  const OnDevice here(device);
  abi::CountParams params{};
  const void* ranks = input<void>(per_rank, {"num_tokens_per_rank", {ScalarType::Int}, {kAny}});
  const void* experts =
      input<void>(per_expert, {"num_tokens_per_expert", {ScalarType::Int}, {kAny}});
  params.per_rank = pointer<int32_t>(ranks);
  params.per_expert = pointer<int32_t>(experts);
  params.host = {static_cast<uint64_t>(host)};
  params.num_tokens = static_cast<int32_t>(num_tokens);
  params.num_ranks = static_cast<int32_t>(per_rank.numel());
  params.num_experts = static_cast<int32_t>(per_expert.numel());
  params.call = static_cast<uint32_t>(call);
  run(kernel, device, params);
}

}  // namespace

void count_for_host(const Tensor& topk_idx, const HostCounts& to) {
  abi::CountParams params{};
  set_routing(params, topk_idx);
  params.host = {static_cast<uint64_t>(to.host)};
  params.num_ranks = static_cast<int32_t>(to.num_ranks);
  params.num_experts = static_cast<int32_t>(to.num_experts);
  params.call = static_cast<uint32_t>(to.call);
  const int device = device_of(topk_idx);
  if (device < 0) {  // a kernel counts in shared memory instead
    params.per_rank = params.host;
    params.per_expert = pointer<int32_t>(params.host.get() + to.num_ranks);
  }
  run(to.kernel, device, params);
}

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("count_routing", TORCH_BOX(&count_routing));
  m.impl("share_counts", TORCH_BOX(&share_counts));
}

}  // namespace moe_p2p::ops
