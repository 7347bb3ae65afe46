#include "moe/plan/token_parts.h"

#include <algorithm>
#include <span>
#include <string>

#include "base/log.h"
#include "kernels/abi/block16.h"

namespace moe_p2p::moe {

using abi::DType;
using abi::SumOrder;
using base::Code;

namespace {

abi::TokenParts make_parts(const Plan& plan, uint64_t x_bytes, uint64_t scale_bytes,
                           std::span<const uint64_t> extra_bytes) {
  MOE_P2P_CHECK(extra_bytes.size() <= abi::kMaxExtras, Code::kInvalidArgument, extra_bytes.size(),
                " extras, at most ", abi::kMaxExtras, " can travel with a token");
  abi::TokenParts parts{};
  const uint64_t head = abi::slot_head_bytes(plan.shape.topk);
  uint64_t at = head;
  const auto add = [&](uint64_t bytes) {
    parts.bytes[parts.num_parts] = bytes;
    parts.offset[parts.num_parts++] = at;
    at += abi::align_up(bytes, 16);
  };
  add(x_bytes);
  add(scale_bytes);
  for (const uint64_t bytes : extra_bytes) add(bytes);
  MOE_P2P_CHECK(at - head <= plan.shape.max_token_bytes, Code::kInvalidArgument,
                "a token of this dispatch is ", at - head, " bytes, the communicator was made for ",
                plan.shape.max_token_bytes, "; widen dtype or extra_bytes of its configuration");
  parts.slot_bytes = abi::slot_bytes(plan.shape.topk, at - head);
  return parts;
}

template <typename Extras>
std::vector<uint64_t> row_bytes(const Extras& extras) {
  std::vector<uint64_t> bytes;
  for (const auto& extra : extras) bytes.push_back(extra.row_bytes);
  return bytes;
}

// Bytes of x of a token.
uint64_t payload_bytes(const Plan& plan, uint64_t x_bytes, DType dtype) {
  return x_bytes > 0 ? x_bytes : static_cast<uint64_t>(plan.hidden_dim) * abi::item_bytes(dtype);
}

// fp32 scales, as they travel.
uint64_t block_scale_bytes(const Plan& plan) {
  return 4 * ((static_cast<uint64_t>(plan.hidden_dim) + abi::kScaleBlock - 1) / abi::kScaleBlock);
}

}  // namespace

abi::TokenParts send_parts(const Plan& plan, const DispatchSend& call) {
  if (call.options.quantize)
    return make_parts(plan, payload_bytes(plan, 0, DType::kFloat8E4M3), block_scale_bytes(plan),
                      row_bytes(call.extras));
  return make_parts(plan, payload_bytes(plan, call.x_bytes, call.x_dtype),
                    call.scales ? call.scale_bytes : 0, row_bytes(call.extras));
}

abi::TokenParts recv_parts(const Plan& plan, const DispatchRecv& call) {
  uint64_t bytes = call.scales ? call.scale_bytes : 0;
  if (call.scales && call.options.scale_format == abi::ScaleFormat::kUe8m0) {
    const uint64_t packed = abi::align_up(block_scale_bytes(plan) / 4, 4);
    MOE_P2P_CHECK(bytes == packed, Code::kInvalidArgument, "scales of a row are ", bytes,
                  " bytes, must be ", packed, " in ue8m0");
    bytes = block_scale_bytes(plan);
  }
  return make_parts(plan, payload_bytes(plan, call.x_bytes, call.x_dtype), bytes,
                    row_bytes(call.extras));
}

uint64_t scalars_offset(const Plan& plan, const PartialForm& form) noexcept {
  const auto& shape = plan.shape;
  const auto rows = static_cast<uint64_t>(
      form.order == SumOrder::kRows ? std::min(shape.topk, shape.max_local_experts) : 1);
  return rows * abi::row_bytes(form.dtype, static_cast<uint64_t>(plan.hidden_dim));
}

uint64_t partial_stride(const Plan& plan, const PartialForm& form) noexcept {
  const uint64_t scalars = form.scalars ? 4 * static_cast<uint64_t>(plan.shape.topk) : 0;
  return abi::align_up(scalars_offset(plan, form) + scalars, abi::kLine);
}

void check_partial(const Plan& plan, const PartialForm& form) {
  const abi::Shape& shape = plan.shape;
  MOE_P2P_CHECK(form.order == SumOrder::kRanks || shape.num_nodes() == 1, Code::kInvalidArgument,
                "combine adds in the order of top-k among ranks of one node, these are ",
                shape.num_nodes(), " nodes, each of which adds up before it sends");
  const bool int10 = form.dtype == DType::kInt10, block16 = form.dtype == DType::kBlock16;
  const int block = int10 ? abi::kInt10Block : block16 ? abi::kBlock16 : 1;
  MOE_P2P_CHECK(plan.hidden_dim % block == 0, Code::kInvalidArgument, "partials is ",
                int10 ? "int10" : "block16", " and hidden_dim ", plan.hidden_dim,
                ", must be a multiple of ", block, ", the values that share a scale");
  const uint64_t bytes = partial_stride(plan, form);
  const bool fits = bytes <= abi::align_up(shape.max_partial_bytes, abi::kLine);
  MOE_P2P_CHECK(fits || form.dtype != DType::kInt10, Code::kInvalidArgument,
                "partials is int10: ", "a combined row of hidden_dim ", plan.hidden_dim, " is ",
                bytes, " bytes, 336 for each 256 values begun, and the communicator was made for ",
                shape.max_partial_bytes, "; leave partials out, or widen combine_dtype of its ",
                "configuration, which suffices from hidden_dim 64 on");
  MOE_P2P_CHECK(fits, Code::kInvalidArgument, "a combined row is ", bytes,
                " bytes, the communicator was made for ", shape.max_partial_bytes,
                form.order == SumOrder::kRows ? "; set combine_rows of its configuration to "
                                              : "; widen combine_dtype of its configuration",
                form.order == SumOrder::kRows
                    ? std::to_string(std::min(shape.topk, shape.max_local_experts))
                    : "");
}

}  // namespace moe_p2p::moe
