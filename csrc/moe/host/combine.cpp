// Combine on the host: partial sums at the expert's rank, sums per node, the sum at the source.
// Additions have a fixed order (docs/protocol.md), so results do not depend on arrival.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "moe/host/kernels.h"
#include "moe/host/rows.h"

namespace moe_p2p::moe {

using abi::DType;
using abi::Phase;
using abi::RegionHeader;
using abi::SumOrder;

namespace {

std::byte* partial_at(RegionHeader& region, int64_t slot, uint64_t stride) noexcept {
  return region_bytes(region, abi::combine_slots_offset()) + static_cast<uint64_t>(slot) * stride;
}

float* weights_at(RegionHeader& region, int64_t slot, int topk) noexcept {
  return abi::behind_header<float>(region_bytes(region)) + slot * topk;
}

// Bytes of a slot's weights, which a header of weights gives as slot bytes.
uint64_t slot_weights_bytes(const abi::Shape& shape) noexcept {
  return sizeof(float) * static_cast<uint64_t>(shape.topk);
}

// The rows of y that a slot needs, and their weights.
struct SlotRows {
  std::array<Addend, abi::kMaxTopk> addends;
  size_t num_addends = 0;

  // late: [K] weights of the slot that came with combine; null: the rows' weights, or none.
  SlotRows(const CombineSend& call, const int32_t* rows, const float* late, int topk,
           uint64_t row_bytes) noexcept {
    for (int k = 0; k < topk; ++k) {
      if (rows[k] < 0) continue;
      const auto row = static_cast<uint64_t>(rows[k]);
      const float weight = late ? late[k] : call.row_weights ? call.row_weights[row] : 1.0f;
      addends[num_addends++] = {static_cast<const std::byte*>(call.y) + row * row_bytes, weight,
                                call.y_dtype};
    }
  }
};

// Copies the scalars that return with a slot: one of each row, or by rank all K of its only row.
void copy_scalars(float* out, const CombineSend& call, const int32_t* rows, int topk) noexcept {
  if (call.topk_scalars) {
    const int64_t row = *std::max_element(rows, rows + topk);
    std::memcpy(out, call.row_scalars + row * topk, sizeof(float) * static_cast<size_t>(topk));
  } else {
    for (int k = 0; k < topk; ++k) out[k] = rows[k] < 0 ? 0.0f : call.row_scalars[rows[k]];
  }
}

// sums[k] = the K scalars at `offset` of each row, added up.
void sum_scalars(float* sums, std::span<const Addend> rows, uint64_t offset, int topk) noexcept {
  std::fill_n(sums, topk, 0.0f);
  for (const Addend& row : rows) {
    const auto* scalars = abi::values_at<float>(row.row, offset);
    for (int k = 0; k < topk; ++k) sums[k] += scalars[k];
  }
}

}  // namespace

// What a token's sum adds, in order, and the scalars that the ranks sent back for it: each has one
// of K experts.
struct HostKernels::Addends {
  std::array<Addend, std::size(CombineRecv{}.bias) + abi::kMaxTopk> rows;
  std::array<Addend, abi::kMaxTopk> partials;
  size_t num_rows = 0, num_partials = 0;
};

// --- weights that come with combine ---

RegionHeader& HostKernels::weights_region(Step step, int source) const noexcept {
  const int node = source / shape_.ranks_per_node, local = source % shape_.ranks_per_node;
  return node == memory_.node() ? memory_.weights_inbox(memory_.local(), step.slot, local)
                                : memory_.weights_landing(local, step.slot, node);
}

void HostKernels::push_weights(Step step, const CombineSend& call, const HandleView& handle,
                               int64_t chunk) {
  const int num_local = shape_.ranks_per_node, topk = shape_.topk;
  const int64_t begin = chunk * shape_.chunk_tokens;
  const int64_t end = std::min<int64_t>(begin + shape_.chunk_tokens, handle.meta().num_tokens);
  for (int c = 0; c < num_local + shape_.num_nodes(); ++c) {  // columns of send_slots
    const int node = c - num_local;
    if (node == memory_.node() || skips(rank_of_column(c))) continue;
    RegionHeader& region = c < num_local ? memory_.weights_inbox(c, step.slot, memory_.local())
                                         : memory_.weights_outbox(memory_.local(), step.slot, node);
    int num_slots = 0;
    for (int64_t t = begin; t < end; ++t) {
      const int32_t slot = handle.send_slots(t)[c];
      if (slot < 0) continue;
      std::copy_n(call.topk_weights + t * topk, topk, weights_at(region, slot, topk));
      ++num_slots;
    }
    fill_header(region, step, static_cast<uint32_t>(num_slots), abi::dtype_flags(DType::kFloat32),
                slot_weights_bytes(shape_));
    if (c < num_local) {
      raise_flag(step, Phase::kWeights, c);
    } else {
      ring(step, Phase::kWeights, memory_.local(), node, abi::weights_bytes(shape_, num_slots), 0,
           0);
    }
  }
}

void HostKernels::recv_weights(Step step) const {
  for (int s = 0; s < shape_.world_size; ++s)
    check_header(weights_region(step, s), step, abi::dtype_flags(DType::kFloat32),
                 slot_weights_bytes(shape_), s, "late weights");
}

// --- sending ---

void HostKernels::combine_send(Step step, const CombineSend& call, const HandleView& handle,
                               int64_t chunk) {
  const auto recorded = span(step, Phase::kCombine, base::Event::kSends);
  const bool scalars = call.row_scalars != nullptr;
  const PartialForm form = near_form(call, scalars);
  const uint64_t stride = partial_stride(plan_, form);
  const uint32_t flags = abi::combine_flags(form.dtype, scalars);
  const auto hidden = static_cast<uint64_t>(plan_.hidden_dim);
  const bool weighted = call.row_weights || call.topk_weights;
  const uint64_t y_bytes = hidden * abi::item_bytes(call.y_dtype);
  const uint64_t out_bytes = abi::row_bytes(form.dtype, hidden);
  for (int s = 0; s < shape_.world_size; ++s) {
    if (skips(s)) continue;
    const int node = s / shape_.ranks_per_node, local = s % shape_.ranks_per_node;
    RegionHeader& region = node == memory_.node()
                               ? memory_.partial_inbox(local, step.slot, memory_.local())
                               : memory_.gather(local, step.slot, node, memory_.local());
    const int32_t count = handle.slot_count(chunk, s);
    fill_header(region, step, static_cast<uint32_t>(count), flags, stride);
    pool_.parallel_for(static_cast<size_t>(count), [&](size_t i) {
      const auto slot = static_cast<int64_t>(i);
      const int32_t* rows = handle.slot_rows(chunk, s, slot);
      const float* late =
          call.topk_weights ? weights_at(weights_region(step, s), slot, shape_.topk) : nullptr;
      const SlotRows mine(call, rows, late, shape_.topk, y_bytes);
      const bool is_mine = handle.slot_ranks(chunk, s, slot) >> memory_.local() & 1;
      if (!is_mine) return;  // a token of this node, but not of this rank
      std::byte* partial = partial_at(region, slot, stride);
      const size_t each = call.order == SumOrder::kRows ? 1 : mine.num_addends;
      for (size_t r = 0; r < std::max<size_t>(mine.num_addends, 1); r += std::max<size_t>(each, 1))
        sum_rows(partial + r * out_bytes, form.dtype, mine.addends.data() + r, each, weighted,
                 hidden);
      if (scalars)
        copy_scalars(abi::values_at<float>(partial, scalars_offset(plan_, form)), call, rows,
                     shape_.topk);
    });
  }
  hand_in(step, &call, &handle, chunk);
}

void HostKernels::send_empty_combine(Step step) {
  for (int s = 0; s < shape_.world_size; ++s) {
    if (skips(s)) continue;
    const int node = s / shape_.ranks_per_node, local = s % shape_.ranks_per_node;
    fill_header(node == memory_.node() ? memory_.partial_inbox(local, step.slot, memory_.local())
                                       : memory_.gather(local, step.slot, node, memory_.local()),
                step, 0, abi::kEmpty, 0);
  }
  hand_in(step, nullptr, nullptr, 0);
}

void HostKernels::hand_in(Step step, const CombineSend* call, const HandleView* handle,
                          int64_t chunk) {
  const auto uses = step.index / static_cast<uint64_t>(shape_.steps_in_flight) + 1;
  const auto full = uses * static_cast<uint64_t>(shape_.ranks_per_node);
  for (int gateway = 0; gateway < shape_.ranks_per_node; ++gateway) {
    for (int i = 0; i < shape_.num_other_nodes(); ++i) {
      const int node = abi::other_node(i, memory_.node());
      if (skips(rank_of(node, gateway))) continue;
      // acq_rel: releases this rank's partial sums; the last rank acquires all others' sums.
      const uint64_t before =
          memory_.gather_count(gateway, step.slot, node).fetch_add(1, std::memory_order_acq_rel);
      if (before + 1 == full) add_up(step, call, handle, chunk, gateway, node);
    }
  }
  for (int l = 0; l < shape_.ranks_per_node; ++l) raise_flag(step, Phase::kCombine, l);
}

// Called by the last rank of the node to hand in; reads and writes the gateway's memory.
void HostKernels::add_up(Step step, const CombineSend* call, const HandleView* handle,
                         int64_t chunk, int gateway, int node) {
  const bool scalars = call && call->row_scalars;
  const PartialForm near = call ? near_form(*call, scalars) : PartialForm{};
  const PartialForm far = call ? far_form(*call, scalars) : PartialForm{};
  const uint64_t stride = call ? partial_stride(plan_, near) : 0;
  const uint64_t far_stride = call ? partial_stride(plan_, far) : 0;
  const auto flags_of = [&](const PartialForm& form) {
    return call ? abi::combine_flags(form.dtype, scalars) : uint32_t{abi::kEmpty};
  };
  for (int j = 0; j < shape_.ranks_per_node; ++j)
    check_header(memory_.gather(gateway, step.slot, node, j), step, flags_of(near), stride,
                 memory_.node() * shape_.ranks_per_node + j, "combine");
  RegionHeader& out = memory_.combine_outbox(gateway, step.slot, node);
  const int source = node * shape_.ranks_per_node + gateway;
  const int32_t count = call ? handle->slot_count(chunk, source) : 0;
  fill_header(out, step, static_cast<uint32_t>(count), flags_of(far), far_stride);
  if (call) {
    const auto hidden = static_cast<uint64_t>(plan_.hidden_dim);
    pool_.parallel_for(static_cast<size_t>(count), [&](size_t i) {
      const auto slot = static_cast<int64_t>(i);
      std::array<Addend, abi::kMaxRanksPerNode> addends;
      size_t num_addends = 0;
      for (uint64_t ranks = handle->slot_ranks(chunk, source, slot); ranks; ranks &= ranks - 1) {
        RegionHeader& partial = memory_.gather(gateway, step.slot, node, std::countr_zero(ranks));
        addends[num_addends++] = {partial_at(partial, slot, stride), 1.0f, near.dtype};
      }
      std::byte* sum = partial_at(out, slot, far_stride);
      if (near.dtype == DType::kInt10 && num_addends == 1) {  // more rounding would be for nothing
        std::memcpy(sum, addends[0].row, scalars_offset(plan_, near));
      } else {
        sum_rows(sum, far.dtype, addends.data(), num_addends, false, hidden);
      }
      if (scalars)
        sum_scalars(abi::values_at<float>(sum, scalars_offset(plan_, far)),
                    {addends.data(), num_addends}, scalars_offset(plan_, near), shape_.topk);
    });
  }
  ring(step, Phase::kCombine, gateway, node, abi::combine_slots_offset(), far_stride, count);
}

RegionHeader& HostKernels::combine_region(Step step, int source) const noexcept {
  const int node = source / shape_.ranks_per_node;
  return node == memory_.node()
             ? memory_.partial_inbox(memory_.local(), step.slot, source % shape_.ranks_per_node)
             : memory_.combine_landing(memory_.local(), step.slot, node);
}

void HostKernels::check_combine(Step step, const CombineRecv* call) const {
  const bool scalars = call && call->out_scalars;
  for (int s = 0; s < shape_.world_size; ++s) {
    const bool speaks =
        s / shape_.ranks_per_node == memory_.node() || s % shape_.ranks_per_node == memory_.local();
    if (!speaks) continue;
    uint32_t flags = abi::kEmpty;
    uint64_t stride = 0;
    if (call) {
      const bool near = s / shape_.ranks_per_node == memory_.node();
      const PartialForm form = near ? near_form(*call, scalars) : far_form(*call, scalars);
      flags = abi::combine_flags(form.dtype, scalars);
      stride = partial_stride(plan_, form);
    }
    check_header(combine_region(step, s), step, flags, stride, s, "combine");
  }
}

void HostKernels::recv_empty_combine(Step step) const { check_combine(step, nullptr); }

void HostKernels::combine_recv(Step step, const CombineRecv& call, const HandleView& handle,
                               int64_t chunk) {
  const auto recorded = span(step, Phase::kCombine, base::Event::kReceives);
  const bool scalars = call.out_scalars != nullptr;
  check_combine(step, &call);
  const auto hidden = static_cast<uint64_t>(plan_.hidden_dim);
  const uint64_t row_bytes = hidden * abi::item_bytes(call.out_dtype);
  const int64_t begin = chunk * shape_.chunk_tokens;
  const bool last = chunk + 1 == handle.meta().num_chunks;
  const int64_t end = last ? handle.meta().num_rows
                           : std::min<int64_t>(begin + shape_.chunk_tokens, handle.meta().num_rows);
  pool_.parallel_for(static_cast<size_t>(std::max<int64_t>(0, end - begin)), [&](size_t i) {
    const int64_t token = begin + static_cast<int64_t>(i);
    Addends found;
    for (const void* bias : call.bias)
      if (bias)
        found.rows[found.num_rows++] = {
            static_cast<const std::byte*>(bias) + static_cast<uint64_t>(token) * row_bytes, 1.0f,
            call.out_dtype};
    if (call.order == SumOrder::kRanks) {
      find_in_rank_order(step, call, handle.send_slots(token), found);
    } else {
      find_in_topk_order(step, call, token, handle.send_slots(token), found);
    }
    std::byte* out = static_cast<std::byte*>(call.out) + static_cast<uint64_t>(token) * row_bytes;
    sum_rows(out, call.out_dtype, found.rows.data(), found.num_rows, false, hidden);
    float* const sums = scalars ? call.out_scalars + token * shape_.topk : nullptr;
    if (scalars) sum_scalars(sums, {found.partials.data(), found.num_partials}, 0, shape_.topk);
    const int lost = any_silent_ ? lost_of(handle.send_slots(token)) : -1;
    if (lost < 0) return;
    lost_.num_tokens.fetch_add(1, std::memory_order_relaxed);
    lost_.step.store(step.index, std::memory_order_relaxed);
    lost_.rank.store(lost, std::memory_order_relaxed);
    if (!poisons_) return;
    std::memset(out, 0xff, row_bytes);  // NaN in each type
    if (scalars) std::memset(sums, 0xff, sizeof(float) * static_cast<size_t>(shape_.topk));
  });
}

// No token was given to ranks that were masked when it was dispatched (route()).
int HostKernels::lost_of(const int32_t* slots) const noexcept {
  for (int c = 0; c < shape_.ranks_per_node + shape_.num_nodes(); ++c) {
    if (c == shape_.ranks_per_node + memory_.node() || slots[c] < 0) continue;
    if (const int rank = rank_of_column(c); silent(rank)) return rank;
  }
  return -1;
}

// Nodes ascending; of the own one each rank.
void HostKernels::find_in_rank_order(Step step, const CombineRecv& call, const int32_t* slots,
                                     Addends& found) const noexcept {
  const int num_local = shape_.ranks_per_node;
  const auto adder = [&](const PartialForm& form) {
    const uint64_t stride = partial_stride(plan_, form), behind = scalars_offset(plan_, form);
    return [&found, stride, behind, dtype = form.dtype](RegionHeader& region, int32_t slot) {
      const std::byte* row = partial_at(region, slot, stride);
      found.rows[found.num_rows++] = {row, 1.0f, dtype};
      found.partials[found.num_partials++] = {row + behind, 1.0f, DType::kFloat32};
    };
  };
  const bool scalars = call.out_scalars != nullptr;
  const auto add_near = adder(near_form(call, scalars)), add_far = adder(far_form(call, scalars));
  for (int n = 0; n < shape_.num_nodes(); ++n) {
    if (n != memory_.node()) {
      if (slots[num_local + n] >= 0 && !silent(rank_of(n, memory_.local())))
        add_far(memory_.combine_landing(memory_.local(), step.slot, n), slots[num_local + n]);
      continue;
    }
    for (int l = 0; l < num_local; ++l)
      if (slots[l] >= 0 && !silent(rank_of(n, l)))
        add_near(memory_.partial_inbox(memory_.local(), step.slot, l), slots[l]);
  }
}

// k ascending, on one node: the sum of a rank at the last k of its experts, or each of its rows.
void HostKernels::find_in_topk_order(Step step, const CombineRecv& call, int64_t token,
                                     const int32_t* slots, Addends& found) const noexcept {
  const int topk = shape_.topk;
  const PartialForm form = near_form(call, call.out_scalars != nullptr);
  const uint64_t stride = partial_stride(plan_, form), behind = scalars_offset(plan_, form);
  const uint64_t row_bytes =
      static_cast<uint64_t>(plan_.hidden_dim) * abi::item_bytes(call.out_dtype);
  std::array<int, abi::kMaxTopk> rank;
  for (int k = 0; k < topk; ++k) {
    const int64_t at = token * topk + k;
    const int64_t expert = call.topk_is_int64 ? static_cast<const int64_t*>(call.topk_idx)[at]
                                              : static_cast<const int32_t*>(call.topk_idx)[at];
    const bool known = expert >= 0 && expert < shape_.num_experts;
    const int owner = known ? plan_.expert_rank[static_cast<size_t>(expert)] : -1;
    rank[static_cast<size_t>(k)] = known && slots[owner] >= 0 && !silent(owner) ? owner : -1;
  }
  const auto end = rank.begin() + topk;
  for (auto at = rank.begin(); at != end; ++at) {
    if (*at < 0) continue;
    const bool last = std::find(at + 1, end, *at) == end;
    const std::byte* partial =
        partial_at(memory_.partial_inbox(memory_.local(), step.slot, *at), slots[*at], stride);
    const auto before = static_cast<uint64_t>(std::count(rank.begin(), at, *at));
    if (call.order == SumOrder::kRows) {
      found.rows[found.num_rows++] = {partial + before * row_bytes, 1.0f, form.dtype};
    } else if (last) {
      found.rows[found.num_rows++] = {partial, 1.0f, form.dtype};
    }
    if (last) found.partials[found.num_partials++] = {partial + behind, 1.0f, DType::kFloat32};
  }
}

}  // namespace moe_p2p::moe
