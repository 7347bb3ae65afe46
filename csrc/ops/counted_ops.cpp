// torch.ops.moe_p2p.dispatch_counted and all_to_all_agree: calls whose host waits for the counts of
// all ranks, to return outputs of exactly that size. All that does not depend on the counts is done
// before the host waits: a GPU has nothing to do from then until the next launch.
#include <algorithm>
#include <span>
#include <tuple>
#include <vector>

#include "ops/count_ops.h"
#include "ops/whole_dispatch.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

// Where this rank's counts are, or will be: HostCounts of row_counts.py.
struct Given {
  // Of this rank's tokens, when this op is to count them; else a kernel was launched that does.
  const std::optional<Tensor>& topk_idx;
  int64_t kernel;
  int64_t num_values;  // [W] tokens for each rank, [E] for each expert, T; [0] may be of one rank
  int64_t host;
  int64_t call;
};

void require_host_may_wait(const AllToAllObject& comm, const Given& given, int64_t alignment) {
  MOE_P2P_CHECK(alignment >= 1, Code::kInvalidArgument, "alignment is ", alignment,
                ", must be at least 1");
  MOE_P2P_CHECK(given.num_values > 0 && given.host != 0, Code::kInvalidArgument,
                "no counts are given");
  if (comm.device < 0) return;
  MOE_P2P_CHECK(platform::capture_of(current_stream(comm.device)) == 0, Code::kInvalidArgument,
                "counts for the host cannot be had while a graph is captured: pass "
                "num_worst_tokens (V1) or do_cpu_sync=False (V2), or a handle of an earlier "
                "dispatch");
}

void count(const AllToAllObject& comm, const Given& given) {
  if (!given.topk_idx) return;
  const int64_t experts = comm.plan().shape.num_experts;
  count_for_host(*given.topk_idx, {.kernel = given.kernel,
                                   .num_experts = experts,
                                   .num_ranks = given.num_values - experts - 1,
                                   .host = given.host,
                                   .call = given.call});
}

struct Agreed {
  Tensor gathered;  // [W, num_values], in host memory
  Tensor sizes;     // [E_local] rows of each expert, rounded up, in host memory
  int64_t num_rows = 0, max_tokens = 1, num_grouped = 0;
};

// Without counts for each rank and expert there are no sizes.
Agreed agree(AllToAllObject& comm, const Given& given, int64_t alignment) {
  const OnDevice on_host(-1);
  const abi::Shape& shape = comm.plan().shape;
  const int64_t world_size = shape.world_size, experts = comm.num_local_experts();
  const int64_t num_values = given.num_values;
  Arena arena(Arena::room(world_size * num_values, 4) + Arena::room(experts, 4));
  Agreed agreed{.gathered = arena.make({world_size, num_values}, ScalarType::Int),
                .sizes = arena.make({experts}, ScalarType::Int)};
  auto* const all = static_cast<int32_t*>(mutable_data_of(agreed.gathered));
  auto* const sizes = static_cast<int32_t*>(mutable_data_of(agreed.sizes));
  std::fill_n(sizes, experts, 0);
  const auto* words = reinterpret_cast<const int32_t*>(given.host);
  comm.all_to_all.await_counts(reinterpret_cast<const uint32_t&>(words[num_values]),
                               static_cast<uint32_t>(given.call));
  comm.all_to_all.gather_counts({words, static_cast<size_t>(num_values)},
                                {all, static_cast<size_t>(world_size * num_values)});
  if (num_values != world_size + shape.num_experts + 1) return agreed;
  for (int64_t source = 0; source < world_size; ++source) {
    const int32_t* const counts = all + source * num_values;
    agreed.num_rows += counts[comm.rank];
    agreed.max_tokens = std::max<int64_t>(agreed.max_tokens, counts[num_values - 1]);
    for (int64_t e = 0; e < experts; ++e) sizes[e] += counts[world_size + comm.rank * experts + e];
  }
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = (sizes[e] + alignment - 1) / alignment * alignment;
    sizes[e] = static_cast<int32_t>(rows);
    agreed.num_grouped += rows;
  }
  return agreed;
}

std::tuple<Tensor, Tensor, int64_t, int64_t, int64_t> all_to_all_agree(
    int64_t comm_id, std::optional<Tensor> topk_idx, int64_t kernel, int64_t num_values,
    int64_t host, int64_t call, int64_t alignment) {
  const Caller comm(comm_id);
  const Given given{topk_idx, kernel, num_values, host, call};
  require_host_may_wait(*comm, given, alignment);
  count(*comm, given);
  auto [gathered, sizes, num_rows, max_tokens, num_grouped] = agree(*comm, given, alignment);
  return {gathered, sizes, num_rows, max_tokens, num_grouped};
}

// Rows of up to so many bytes are made for the worst case, and cut when the counts are known: then
// the kernel does not wait for the host.
constexpr int64_t kMostRowBytes = int64_t{64} << 20;
// The same for what lies beside rows of any size, which is allocated while the host waits.
constexpr int64_t kMostBytesBeside = int64_t{16} << 20;

// The most tokens of any rank in this call. Known on each host, so it waits for no GPU.
int64_t most_tokens(AllToAllObject& comm, const Tensor& x) {
  const auto mine = static_cast<int32_t>(x.dim() > 0 ? x.size(0) : 0);
  std::vector<int32_t> all(static_cast<size_t>(comm.plan().shape.world_size));
  comm.all_to_all.gather_counts({&mine, 1}, all);
  return std::max(1, *std::max_element(all.begin(), all.end()));
}

bool fit(const Tensor& x, const moe::DispatchOptions& options, int64_t rows) {
  if (!options.rows().per_token || options.column_scales || x.dim() != 2) return false;
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  return row_bytes > 0 && rows <= kMostRowBytes / row_bytes;
}

// Cuts what has a row per (token, rank).
void cut_rows(Dispatched& dispatched, const moe::DispatchOptions& options, int64_t num_rows) {
  auto& [row_x, row_scales, row_weights, counts, offsets, handle, more] = dispatched;
  const auto cut = [&](Tensor& tensor) { tensor = first_rows(tensor, num_rows); };
  for (Tensor* tensor : {&row_x, &row_weights, &more.back()}) cut(*tensor);  // the last: row_topk
  if (row_scales.dim() > 1) cut(row_scales);
  if (options.with_source) cut(more.front());
}

}  // namespace

Counted dispatch_counted(int64_t comm_id, int64_t options_number, const Tensor& x,
                         std::optional<Tensor> scales, const Tensor& topk_idx,
                         std::optional<Tensor> topk_weights, int64_t max_tokens, int64_t alignment,
                         int64_t kernel, int64_t host, int64_t call) {
  const Caller comm(comm_id);
  const moe::DispatchOptions options = moe::dispatch_options_from(options_number);
  const abi::Shape& shape = comm->plan().shape;
  const auto uncounted = kernel < 0 ? std::nullopt : std::optional(topk_idx);
  const Given given{uncounted, kernel, shape.world_size + shape.num_experts + 1, host, call};
  require_host_may_wait(*comm, given, alignment);
  count(*comm, given);

  if (max_tokens < 0) max_tokens = most_tokens(*comm, x);
  const std::vector<Tensor> no_extras;
  const DispatchArguments in{x,  scales,     no_extras, topk_idx, topk_weights, std::nullopt,
                             -1, max_tokens, options};
  const int64_t most = most_rows(*comm, options, max_tokens, alignment);
  std::optional<Arena> beside;
  if (const int64_t bytes = bytes_beside_rows(*comm, in, most); bytes <= kMostBytesBeside)
    beside.emplace(bytes);
  const auto dispatched = [&](int64_t capacity) {
    return dispatch_into_new(&*comm, in, capacity, beside ? &*beside : nullptr);
  };
  const auto returned = [&](Dispatched made, const Agreed& agreed) {
    return std::tuple_cat(
        std::move(made),
        std::tuple(agreed.gathered, agreed.sizes, agreed.num_rows, max_tokens, agreed.num_grouped));
  };
  if (fit(x, options, most)) {
    auto made = dispatched(most);
    const Agreed agreed = agree(*comm, given, alignment);
    cut_rows(made, options, agreed.num_rows);
    return returned(std::move(made), agreed);
  }
  const Agreed agreed = agree(*comm, given, alignment);
  return returned(dispatched(options.rows().per_token ? agreed.num_rows : agreed.num_grouped),
                  agreed);
}

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("dispatch_counted", TORCH_BOX(&dispatch_counted));
  m.impl("all_to_all_agree", TORCH_BOX(&all_to_all_agree));
}

}  // namespace moe_p2p::ops
