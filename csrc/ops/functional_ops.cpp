// torch.ops.moe_p2p.dispatch and combine: whole calls that make their results, so that autograd and
// torch.compile see functions of tensors. combine_out writes to a given tensor.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/abi/handle.h"
#include "ops/whole_dispatch.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

// The handle of a solo dispatch names no step: its step is closed already, and so equal calls give
// equal handles. Any other number would be used again.
constexpr uint64_t kNoStep = ~uint64_t{0};

void clear(const Tensor& handle) {
  std::memset(handle.mutable_data_ptr(), 0, static_cast<size_t>(handle.numel()) * sizeof(int32_t));
}

// beside: where they are made if they fit; null: nowhere.
Tensor make_scales(const Layout& layout, int64_t width, ScalarType dtype, Arena* beside) {
  const Sizes sizes = layout.of_rows(width);
  if (layout.options.column_scales) {
    const int64_t ld = layout.scale_stride();
    const int64_t strides[] = {width * ld, 1, ld};
    return make_tensor(sizes.all(), std::span(strides).last(sizes.all().size()), dtype);
  }
  const bool fits = beside && Arena::room(layout.num_rows * width, 4) <= beside->bytes_left();
  return fits ? beside->make(sizes, dtype) : make_tensor(sizes, dtype);
}

// Makes the delivered scales: as the caller gave them, or as quantize makes them.
std::optional<Tensor> make_scales(const AllToAllObject& comm, const Layout& layout,
                                  const std::optional<Tensor>& given, Arena* beside) {
  if (given) return make_scales(layout, given->size(1), dtype_of(*given), beside);
  if (!layout.options.quantize) return std::nullopt;
  if (layout.options.scale_format != abi::ScaleFormat::kUe8m0)
    return make_scales(layout, comm.num_scales(), ScalarType::Float, beside);
  return make_scales(layout, (comm.num_scales() + 3) / 4, ScalarType::Int, beside);
}

// Bytes of scales that may lie in an arena.
int64_t bytes_of_scales(const AllToAllObject& comm, const DispatchArguments& in, int64_t capacity) {
  if (in.options.column_scales || (in.scales && in.scales->dim() != 2)) return 0;
  const int64_t quantized = in.options.quantize ? comm.num_scales() : 0;
  const int64_t width = in.scales ? in.scales->size(1) : quantized;
  return Arena::room(Layout(comm, in.options, capacity).num_rows * width, 4);
}

}  // namespace

Dispatched dispatch_into_new(AllToAllObject* comm, const DispatchArguments& in, int64_t capacity,
                             Arena* beside) {
  const auto& [x, scales, extras, topk_idx, topk_weights, num_tokens, host, max_tokens, options] =
      in;
  const Layout layout(*comm, options, capacity);

  const auto make = [&](const Sizes& sizes, ScalarType dtype) {
    return beside ? beside->make(sizes, dtype) : make_tensor(sizes, dtype);
  };
  const int64_t num_rows = x.dim() > 0 ? x.size(0) : 0;
  const Tensor handle =
      make({comm->all_to_all.handle_words(num_rows, max_tokens)}, ScalarType::Int);
  if (options.solo && comm->device < 0) clear(handle);  // on a GPU a kernel writes it
  auto send = dispatch_send_from(*comm, in, handle);

  const Tensor row_x =
      make_tensor(layout.of_rows(send.x_bytes > 0 ? x.size(1) : comm->hidden_dim()),
                  options.quantize ? ScalarType::Float8_e4m3fn : dtype_of(x));
  const Tensor row_weights = make(layout.row_weights(), ScalarType::Float);
  const Tensor counts = make(layout.counts(), ScalarType::Int);
  const Tensor offsets = make(layout.offsets(), ScalarType::Int);
  std::vector<Tensor> more, row_extras;
  const auto make_more = [&](bool wanted, const Sizes& sizes, ScalarType dtype) {
    return wanted ? std::optional(more.emplace_back(make(sizes, dtype))) : std::nullopt;
  };
  const auto source = make_more(options.with_source, layout.source(), ScalarType::Int);
  const auto ranges = make_more(options.with_ranges, layout.ranges(), ScalarType::Long);
  const auto wait_ticks = make_more(options.with_wait_ticks, layout.wait_ticks(), ScalarType::Long);
  if (const auto copy =
          make_more(options.copy_topk, {send.num_rows, layout.topk}, dtype_of(topk_idx))) {
    send.topk_copy = mutable_data_of(*copy);
    if (comm->device < 0)
      std::memcpy(send.topk_copy, send.topk_idx,
                  static_cast<size_t>(topk_idx.numel()) * (send.topk_is_int64 ? 8 : 4));
  }
  const auto row_topk = make_more(options.rows().per_token, layout.row_topk(), dtype_of(topk_idx));
  for (const Tensor& extra : extras)
    row_extras.push_back(make_tensor(layout.of_rows(extra.size(1)), dtype_of(extra)));
  const auto row_scales = make_scales(*comm, layout, scales, beside);  // last: into room left

  const auto recv = dispatch_recv_from(*comm, layout,
                                       {row_x, row_scales, row_extras, row_weights, counts, offsets,
                                        source, ranges, wait_ticks, row_topk},
                                       send.handle);
  comm->all_to_all.dispatch(&send, &recv);
  if (options.solo && comm->device < 0)
    static_cast<abi::HandleMeta*>(handle.mutable_data_ptr())->first_step = kNoStep;
  more.insert(more.end(), row_extras.begin(), row_extras.end());
  return {row_x,          row_scales ? *row_scales : make({0}, ScalarType::Float),
          row_weights,    counts,
          offsets,        handle,
          std::move(more)};
}

int64_t bytes_beside_rows(AllToAllObject& comm, const DispatchArguments& in, int64_t capacity) {
  const Layout layout(comm, in.options, capacity);
  const bool per_token = in.options.rows().per_token;
  const int64_t tokens = in.x.dim() > 0 ? in.x.size(0) : 0, each = layout.num_rows * layout.topk;
  return Arena::room(comm.all_to_all.handle_words(tokens, in.max_tokens), 4) +
         Arena::room(per_token ? each : layout.num_rows, 4) +  // weights
         Arena::room(layout.experts, 4) + Arena::room(layout.ranks + layout.experts + 1, 4) +
         Arena::room(in.options.with_source ? 2 * layout.num_rows : 0, 4) +
         Arena::room(in.options.with_ranges ? layout.experts * layout.ranks : 0, 8) +
         Arena::room(in.options.with_wait_ticks ? layout.ranks : 0, 8) +
         Arena::room(in.options.copy_topk ? tokens * layout.topk : 0, 8) +
         Arena::room(per_token ? each : 0, 8);  // ids
}

int64_t most_rows(const AllToAllObject& comm, const moe::DispatchOptions& options,
                  int64_t max_tokens, int64_t alignment) {
  const int64_t tokens = comm.plan().shape.world_size * max_tokens;
  if (options.rows().per_token || options.rows().apart) return tokens;
  const int64_t experts = comm.num_local_experts();
  return tokens * std::min(comm.topk(), experts) + (alignment - 1) * experts;
}

namespace {

// Of options.py alone: no op sees it.
constexpr int64_t kMergeDuplicates = int64_t{1} << 62;

Dispatched dispatch(int64_t comm_id, int64_t options_number, int64_t max_tokens, int64_t capacity,
                    const Tensor& x, const Tensor& topk_idx, std::optional<Tensor> topk_weights,
                    std::optional<Tensor> scales, std::vector<int64_t> others,
                    std::optional<std::vector<Tensor>> extras, std::optional<Tensor> num_tokens,
                    int64_t num_tokens_host) {
  check(others);
  const Caller comm(comm_id);
  const moe::DispatchOptions options = moe::dispatch_options_from(options_number);
  const std::vector<Tensor> sent = std::move(extras).value_or(std::vector<Tensor>{});
  return dispatch_into_new(
      &*comm,
      {x, scales, sent, topk_idx, topk_weights, num_tokens, num_tokens_host, max_tokens, options},
      capacity);
}

// Up to so many bytes beside the rows share an allocation: a user who keeps one of them keeps all.
constexpr int64_t kMostSharedBytes = int64_t{1} << 20;

}  // namespace

DirectDispatch dispatch_directly(int64_t comm_id, int64_t options_number,
                                 std::optional<int64_t> most_tokens, std::optional<int64_t> rows,
                                 const Tensor& x, const Tensor& topk_idx,
                                 std::optional<Tensor> topk_weights, std::optional<Tensor> scales,
                                 std::vector<int64_t> others) {
  check(others);
  const Caller comm(comm_id);
  const moe::DispatchOptions options = moe::dispatch_options_from(options_number);
  const int64_t max_tokens = most_tokens.value_or(comm->plan().max_tokens);
  MOE_P2P_CHECK(max_tokens >= 0 && x.is_contiguous() && topk_idx.is_contiguous(),
                Code::kUnavailable, "max_tokens is ", max_tokens, ", or an input has gaps");
  const int64_t capacity = rows ? *rows : most_rows(*comm, options, max_tokens, options.alignment);
  const DispatchArguments in{x, scales, {}, topk_idx, topk_weights, {}, -1, max_tokens, options};
  std::optional<Arena> beside;
  const int64_t bytes = bytes_beside_rows(*comm, in, capacity);
  const int64_t all = bytes + bytes_of_scales(*comm, in, capacity);
  if (bytes <= kMostSharedBytes) beside.emplace(all <= kMostSharedBytes ? all : bytes);
  return {dispatch_into_new(&*comm, in, capacity, beside ? &*beside : nullptr), options, max_tokens,
          capacity, options.quantize || scales};
}

namespace {

// The schema declares that combine does not change the handle, and this restores it: so a compiler
// may use one handle for several combines. The communicator knows which step is still open.
class HandleGuard {
 public:
  explicit HandleGuard(const moe::Handle& handle) : handle_(handle) {
    if (has_meta()) std::memcpy(saved_.data(), handle_.words, sizeof(saved_));
  }
  ~HandleGuard() {
    if (has_meta()) std::memcpy(handle_.words, saved_.data(), sizeof(saved_));
  }
  HandleGuard(const HandleGuard&) = delete;
  HandleGuard& operator=(const HandleGuard&) = delete;

 private:
  bool has_meta() const { return handle_.num_words >= static_cast<int64_t>(saved_.size()); }

  const moe::Handle handle_;
  std::array<int32_t, sizeof(abi::HandleMeta) / sizeof(int32_t)> saved_{};
};

void combine_into(AllToAllObject& comm, const CombineArguments& in, const CombineOutputs& to,
                  const Tensor& handle) {
  const auto send = combine_send_from(comm, in, handle);
  std::optional<HandleGuard> guard;  // kernels of a GPU do not write to it in combine
  if (comm.device < 0) guard.emplace(send.handle);
  const auto recv = combine_recv_from(comm, to, send.handle);
  comm.all_to_all.combine(&send, &recv);
}

std::tuple<Tensor, std::vector<Tensor>> combine(
    int64_t comm_id, int64_t options, int64_t max_tokens, const Tensor& handle, const Tensor& y,
    const Tensor& topk_idx, std::optional<Tensor> row_weights, std::optional<Tensor> topk_weights,
    std::optional<Tensor> row_scalars, std::optional<std::vector<Tensor>> biases,
    std::optional<ScalarType> sum_dtype, int64_t /*capacity*/, bool with_wait_ticks) {
  const ScalarType out_dtype = sum_dtype.value_or(dtype_of(y));
  const std::vector<Tensor> bias = std::move(biases).value_or(std::vector<Tensor>{});
  const Caller comm(comm_id);
  const abi::SumOrder order = moe::sum_order_from(options);
  const abi::Partials partials = moe::partials_from(options);
  check_tensor(topk_idx, {"topk_idx", {ScalarType::Int, ScalarType::Long}, {kAny, comm->topk()}});
  const int64_t num_rows = topk_idx.size(0);
  const Tensor out = make_tensor({num_rows, comm->hidden_dim()}, out_dtype);
  std::vector<Tensor> more;
  std::optional<Tensor> scalars, wait_ticks;
  if (row_scalars)
    scalars = more.emplace_back(make_tensor({num_rows, comm->topk()}, ScalarType::Float));
  if (with_wait_ticks)
    wait_ticks = more.emplace_back(make_tensor({comm->plan().shape.world_size}, ScalarType::Long));
  combine_into(*comm,
               {y, row_weights, row_scalars, topk_weights, out_dtype, max_tokens, order, partials,
                moe::layout_from(options)},
               {out, scalars, bias, wait_ticks, order,
                order == abi::SumOrder::kRanks ? nullptr : &topk_idx, partials},
               handle);
  return {out, std::move(more)};
}

}  // namespace

namespace {

void combine_out(int64_t comm_id, const Tensor& y, std::optional<Tensor> row_weights,
                 std::optional<Tensor> row_scalars, std::optional<Tensor> topk_weights,
                 std::vector<Tensor> bias, const Tensor& handle, int64_t max_tokens,
                 const Tensor& out, std::optional<Tensor> out_scalars,
                 std::optional<Tensor> wait_ticks, int64_t partials_number) {
  const Caller comm(comm_id);
  const abi::Partials partials = moe::partials_of(partials_number);
  constexpr auto kOrder = abi::SumOrder::kRanks;
  combine_into(
      *comm,
      {y, row_weights, row_scalars, topk_weights, dtype_of(out), max_tokens, kOrder, partials},
      {out, out_scalars, bias, wait_ticks, kOrder, nullptr, partials}, handle);
}

}  // namespace

std::optional<Tensor> combine_directly(int64_t comm_id, int64_t dispatched, int64_t combined,
                                       int64_t max_tokens, const Tensor& handle, const Tensor& y,
                                       const Tensor& topk_idx, std::optional<Tensor> row_weights,
                                       std::optional<Tensor> topk_weights,
                                       std::optional<Tensor> out) {
  MOE_P2P_CHECK((!topk_weights || (dispatched & kMergeDuplicates) == 0) && y.is_contiguous(),
                Code::kUnavailable, "late weights of merged experts, or y has gaps");
  const int64_t options = (dispatched & ~kMergeDuplicates) | combined;
  if (!out)
    return std::get<0>(combine(comm_id, options, max_tokens, handle, y, topk_idx,
                               std::move(row_weights), std::move(topk_weights), {}, {}, {}, 0,
                               false));
  MOE_P2P_CHECK(moe::sum_order_from(options) == abi::SumOrder::kRanks && out->dim() == 2 &&
                    topk_idx.dim() == 2 && out->size(0) == topk_idx.size(0),
                Code::kUnavailable, "out does not fit");
  combine_out(comm_id, y, std::move(row_weights), {}, std::move(topk_weights), {}, handle,
              max_tokens, *out, {}, {}, static_cast<int64_t>(moe::partials_from(options)));
  return std::nullopt;
}

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("dispatch_inference", TORCH_BOX(&dispatch));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("combine_inference", TORCH_BOX(&combine));
  m.impl("combine_out", TORCH_BOX(&combine_out));
}

}  // namespace moe_p2p::ops
