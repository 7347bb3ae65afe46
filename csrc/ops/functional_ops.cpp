// torch.ops.moe_p2p.dispatch and combine: whole calls that make their results, so that autograd and
// torch.compile see functions of tensors.
#include <array>
#include <cstring>
#include <span>
#include <tuple>
#include <vector>

#include "ops/all_to_all_object.h"

namespace moe_p2p::ops {

namespace {

// The handle of a solo dispatch names no step: it is closed already, and then equal calls give equal
// handles. Any other number would come up again.
constexpr uint64_t kNoStep = ~uint64_t{0};

Tensor make_handle(AllToAllObject& comm, int64_t num_rows, int64_t max_tokens, bool solo) {
  Tensor handle =
      make_tensor({comm.all_to_all.handle_words(num_rows, max_tokens)}, ScalarType::Int);
  if (solo && comm.device < 0)  // a kernel writes it otherwise
    std::memset(handle.mutable_data_ptr(), 0,
                static_cast<size_t>(handle.numel()) * sizeof(int32_t));
  return handle;
}

// [rows, width], or [E_local, capacity, width] when experts lie apart.
Tensor make_rows(const Layout& layout, int64_t experts, int64_t width, ScalarType dtype) {
  return layout.grouped ? make_tensor({layout.capacity, width}, dtype)
                        : make_tensor({experts, layout.capacity, width}, dtype);
}

using Dispatched =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>>;

Dispatched dispatch(int64_t comm_id, const Tensor& x, std::optional<Tensor> scales,
                    std::vector<Tensor> extras, const Tensor& topk_idx,
                    std::optional<Tensor> topk_weights, std::optional<Tensor> num_tokens,
                    int64_t num_tokens_host, int64_t max_tokens, bool quantize, bool grouped,
                    int64_t capacity, int64_t alignment, bool zero_padding, bool with_source,
                    bool solo) {
  const Caller comm(comm_id);
  const Layout layout{grouped, capacity, alignment, zero_padding};
  layout.check();
  const int64_t experts = comm->num_local_experts();
  const int64_t rows = layout.num_rows(experts);

  const int64_t num_rows = x.dim() > 0 ? x.size(0) : 0;
  const Tensor handle = make_handle(*comm, num_rows, max_tokens, solo);
  const auto send = dispatch_send_from(*comm,
                                       {x, scales, extras, topk_idx, topk_weights, num_tokens,
                                        num_tokens_host, max_tokens, quantize, solo},
                                       handle);

  const Tensor row_x = make_rows(layout, experts, comm->hidden_dim(),
                                 quantize ? ScalarType::Float8_e4m3fn : x.scalar_type());
  const bool has_scales = quantize || scales.has_value();
  const Tensor row_scales = has_scales
                                ? make_rows(layout, experts, comm->num_scales(), ScalarType::Float)
                                : make_tensor({0}, ScalarType::Float);
  std::vector<Tensor> row_extras;
  for (const Tensor& extra : extras)
    row_extras.push_back(make_rows(layout, experts, extra.size(1), extra.scalar_type()));
  const Tensor row_weights = make_tensor({rows}, ScalarType::Float);
  const Tensor counts = make_tensor({experts}, ScalarType::Int);
  const Tensor offsets = make_tensor({experts + 1}, ScalarType::Int);
  const Tensor source = make_tensor({with_source ? rows : 0, 2}, ScalarType::Int);

  const std::optional<Tensor> scales_out = has_scales ? std::optional(row_scales) : std::nullopt;
  const std::optional<Tensor> source_out = with_source ? std::optional(source) : std::nullopt;
  comm->all_to_all.dispatch(
      send, dispatch_recv_from(
                *comm, layout,
                {row_x, scales_out, row_extras, row_weights, counts, offsets, source_out}, handle));
  if (solo && comm->device < 0)
    static_cast<abi::HandleMeta*>(handle.mutable_data_ptr())->first_step = kNoStep;
  return {row_x, row_scales, row_weights, counts, offsets, source, handle, std::move(row_extras)};
}

// The schema says that combine leaves the handle alone, and so it does: a compiler may then use one
// handle for several combines. Which step is still open is known to the communicator.
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

std::tuple<Tensor, Tensor> combine(int64_t comm_id, const Tensor& y,
                                   std::optional<Tensor> row_weights,
                                   std::optional<Tensor> row_scalars, const Tensor& handle,
                                   const Tensor& topk_idx, int64_t max_tokens, ScalarType out_dtype,
                                   bool /*grouped*/, int64_t /*capacity*/, int64_t /*alignment*/) {
  const Caller comm(comm_id);
  check_tensor(topk_idx, {"topk_idx", {ScalarType::Int, ScalarType::Long}, {kAny, comm->topk()}});
  const auto send =
      combine_send_from(*comm, {y, row_weights, row_scalars, out_dtype, max_tokens}, handle);
  const int64_t num_rows = topk_idx.size(0);
  const Tensor out = make_tensor({num_rows, comm->hidden_dim()}, out_dtype);
  const Tensor out_scalars =
      make_tensor({row_scalars ? num_rows : 0, comm->topk()}, ScalarType::Float);
  const std::optional<Tensor> scalars_out = row_scalars ? std::optional(out_scalars) : std::nullopt;
  std::optional<HandleGuard> guard;  // kernels of a GPU do not write to it in combine
  if (comm->device < 0) guard.emplace(send.handle);
  comm->all_to_all.combine(send, combine_recv_from(*comm, out, scalars_out, handle));
  return {out, out_scalars};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("dispatch", TORCH_BOX(&dispatch));
  m.impl("dispatch_inference", TORCH_BOX(&dispatch));
  m.impl("combine", TORCH_BOX(&combine));
  m.impl("combine_inference", TORCH_BOX(&combine));
}

}  // namespace moe_p2p::ops
