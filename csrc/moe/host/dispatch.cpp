// Dispatch on the host: tokens into slots at the source, slots into expert-major rows at the
// experts.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "moe/host/kernels.h"
#include "moe/host/rows.h"
#include "moe/host/scale_rows.h"

namespace moe_p2p::moe {

using abi::DType;
using abi::Phase;
using abi::RegionHeader;
using base::Code;

namespace {

void store_id(const DispatchRecv& call, uint64_t at, int32_t id) noexcept {
  if (call.topk_is_int64) {
    static_cast<int64_t*>(call.row_topk)[at] = id;
  } else {
    static_cast<int32_t*>(call.row_topk)[at] = id;
  }
}

// Pairs with the acquire of another thread of the caller, which then reads what was written before.
void raise(uint32_t& counter, uint32_t by) noexcept {
  std::atomic_ref(counter).fetch_add(by, std::memory_order_release);
}

}  // namespace

// --- sending ---

void HostKernels::build_slot(std::byte* slot, Step step, const DispatchSend& call,
                             const abi::TokenParts& parts, const Routing& routing,
                             int64_t token) const noexcept {
  const auto t = static_cast<uint64_t>(token);
  const auto topk = static_cast<size_t>(shape_.topk);
  const int32_t* experts = &routing.experts[t * topk];
  *abi::slot_head(slot) = {static_cast<uint32_t>(step.word()), static_cast<uint32_t>(token)};
  std::copy_n(&routing.positions[t * topk], topk, abi::slot_positions(slot, shape_.topk));
  auto* ids = abi::slot_expert_ids(slot);
  auto* weights = abi::slot_weights(slot, shape_.topk);
  for (size_t k = 0; k < topk; ++k) {
    ids[k] = experts[k] < 0 ? abi::kNoExpert : static_cast<uint16_t>(experts[k]);
    weights[k] = call.topk_weights ? call.topk_weights[t * topk + k] : 1.0f;
  }
  const auto hidden = static_cast<uint64_t>(plan_.hidden_dim);
  const auto* x = static_cast<const std::byte*>(call.x) +
                  t * (call.x_bytes > 0 ? call.x_bytes : hidden * abi::item_bytes(call.x_dtype));
  auto* scales = abi::values_at<float>(slot, parts.offset[1]);
  if (call.options.quantize) {
    quantize_row(x, call.x_dtype, call.options.scale_format != abi::ScaleFormat::kFloat32,
                 slot + parts.offset[0], scales, hidden);
  } else {
    std::memcpy(slot + parts.offset[0], x, parts.bytes[0]);
    if (call.scales)
      std::memcpy(scales, static_cast<const std::byte*>(call.scales) + t * parts.bytes[1],
                  parts.bytes[1]);
  }
  for (size_t i = 0; i < call.extras.size(); ++i) {
    const uint64_t bytes = parts.bytes[2 + i];
    std::memcpy(slot + parts.offset[2 + i],
                static_cast<const std::byte*>(call.extras[i].data) + t * bytes, bytes);
  }
}

void HostKernels::dispatch_send(Step step, const DispatchSend& call, const abi::TokenParts& parts,
                                const Routing& routing, const HandleView& handle, int64_t chunk) {
  const auto recorded = span(step, Phase::kDispatch, base::Event::kSends);
  const int num_local = shape_.ranks_per_node;
  const int num_columns = num_local + shape_.num_nodes();
  const int32_t* num_slots =
      &routing.num_slots[static_cast<size_t>(chunk) * static_cast<size_t>(num_columns)];
  const uint32_t flags =
      abi::dispatch_flags(call.options.quantize ? DType::kFloat8E4M3 : call.x_dtype,
                          call.options.layout, static_cast<int32_t>(call.max_tokens));
  // Column c < L is the inbox of own-node rank c, column L + n the outbox for node n.
  std::vector<std::byte*> slots(static_cast<size_t>(num_columns), nullptr);
  for (int c = 0; c < num_columns; ++c) {
    if (c == num_local + memory_.node() || skips(rank_of_column(c))) continue;
    const bool own_node = c < num_local;
    RegionHeader& region = own_node ? memory_.inbox(c, step.slot, memory_.local())
                                    : memory_.outbox(memory_.local(), step.slot, c - num_local);
    fill_header(region, step, static_cast<uint32_t>(num_slots[c]), flags, parts.slot_bytes);
    if (own_node) {
      write_counts(region, routing, memory_.node() * num_local + c, 1);
    } else {
      write_counts(region, routing, (c - num_local) * num_local, num_local);
    }
    slots[static_cast<size_t>(c)] = region_bytes(
        region, own_node ? abi::inbox_slots_offset(shape_) : abi::outbox_slots_offset(shape_));
  }
  const int64_t begin = chunk * shape_.chunk_tokens;
  const int64_t end = std::min<int64_t>(begin + shape_.chunk_tokens, call.num_tokens);
  pool_.parallel_for(static_cast<size_t>(std::max<int64_t>(0, end - begin)), [&](size_t i) {
    const int64_t token = begin + static_cast<int64_t>(i);
    const int32_t* columns = handle.send_slots(token);
    const std::byte* built = nullptr;  // the same bytes go everywhere
    for (int c = num_columns - 1; c >= 0; --c) {
      if (columns[c] < 0 || !slots[static_cast<size_t>(c)]) continue;
      std::byte* slot =
          slots[static_cast<size_t>(c)] + static_cast<uint64_t>(columns[c]) * parts.slot_bytes;
      if (built) {
        std::memcpy(slot, built, parts.slot_bytes);
      } else {
        build_slot(slot, step, call, parts, routing, token);
        built = slot;
      }
    }
  });
  for (int i = 0; i < shape_.num_other_nodes(); ++i) {
    const int node = abi::other_node(i, memory_.node());
    ring(step, Phase::kDispatch, memory_.local(), node, abi::outbox_slots_offset(shape_),
         parts.slot_bytes, num_slots[num_local + node]);
  }
  for (int l = 0; l < num_local; ++l) raise_flag(step, Phase::kDispatch, l);
}

void HostKernels::send_empty_dispatch(Step step) {
  for (int i = 0; i < shape_.num_other_nodes(); ++i) {
    const int node = abi::other_node(i, memory_.node());
    if (skips(rank_of(node, memory_.local()))) continue;
    fill_header(memory_.outbox(memory_.local(), step.slot, node), step, 0, abi::kEmpty, 0);
    ring(step, Phase::kDispatch, memory_.local(), node, sizeof(RegionHeader), 0, 0);
  }
  for (int l = 0; l < shape_.ranks_per_node; ++l) {
    if (skips(rank_of(memory_.node(), l))) continue;
    fill_header(memory_.inbox(l, step.slot, memory_.local()), step, 0, abi::kEmpty, 0);
    raise_flag(step, Phase::kDispatch, l);
  }
}

// --- receiving ---

RegionHeader& HostKernels::dispatch_region(Step step, int source) const noexcept {
  // Callers only read the returned header, also a peer's.
  if (silent(source)) return *reinterpret_cast<RegionHeader*>(const_cast<uint64_t*>(empty_.data()));
  const int node = source / shape_.ranks_per_node;
  const int local = source % shape_.ranks_per_node;
  return node == memory_.node() ? memory_.inbox(memory_.local(), step.slot, local)
                                : memory_.landing(local, step.slot, node);
}

void HostKernels::recv_empty_dispatch(Step step) const {
  for (int s = 0; s < shape_.world_size; ++s)
    check_header(dispatch_region(step, s), step, abi::kEmpty, 0, s, "dispatch");
}

// Returns [max_local_experts + 1] counts for this rank.
const int32_t* HostKernels::counts_from(Step step, int source) const noexcept {
  const bool own_node = source / shape_.ranks_per_node == memory_.node();
  const auto* counts = abi::behind_header<int32_t>(region_bytes(dispatch_region(step, source)));
  return counts + (own_node ? 0 : memory_.local() * abi::counts_per_rank(shape_.max_local_experts));
}

void HostKernels::place(Step step, const DispatchRecv& call, Placement& placement) const {
  const int num_experts = plan_.num_local_experts(memory_.rank());
  const auto sources = static_cast<size_t>(shape_.world_size);
  placement.first_row.resize(static_cast<size_t>(num_experts) * sources);
  placement.num_rows.resize(placement.first_row.size());
  const bool grouped = call.options.rows().packs_experts();
  const int64_t alignment = call.options.alignment;
  int64_t row = 0;
  for (int e = 0; e < num_experts; ++e) {
    const int64_t first = grouped ? row : e * call.capacity;
    int64_t at = first;
    for (int s = 0; s < shape_.world_size; ++s) {
      const int32_t count = counts_from(step, s)[e];
      const size_t i = static_cast<size_t>(e) * sources + static_cast<size_t>(s);
      MOE_P2P_CHECK(count >= 0 && count <= plan_.max_tokens, Code::kProtocol, "rank ",
                    memory_.rank(), ": rank ", s, " announced ", count, " tokens for local expert ",
                    e);
      placement.first_row[i] = static_cast<int32_t>(at);
      placement.num_rows[i] = count;
      if (call.ranges) call.ranges[i] = (at - first) << 32 | count;
      at += count;
    }
    const auto within = [&](int64_t r) {
      return call.options.drop ? std::min(r, call.capacity) : r;
    };
    call.counts[e] = static_cast<int32_t>(within(at) - within(first));
    call.offsets[e] = static_cast<int32_t>(within(first));
    row = grouped ? (at + alignment - 1) / alignment * alignment : 0;
    MOE_P2P_CHECK(call.options.drop || (grouped ? at : at - first) <= call.capacity,
                  Code::kResourceExhausted, "rank ", memory_.rank(), ": local expert ", e,
                  " ends at row ", grouped ? at : at - first, ", capacity is ", call.capacity,
                  grouped ? " rows for all experts" : " rows per expert");
  }
  call.offsets[num_experts] =
      static_cast<int32_t>(!grouped            ? num_experts * call.capacity
                           : call.options.drop ? row
                                               : std::min(row, call.capacity));
}

void HostKernels::place_tokens(Step step, const DispatchRecv& call, Placement& placement) const {
  const int num_experts = plan_.num_local_experts(memory_.rank());
  placement.first_row.resize(static_cast<size_t>(shape_.world_size));
  placement.num_rows.resize(placement.first_row.size());
  std::fill_n(call.counts, num_experts, 0);
  int64_t row = 0;
  for (int s = 0; s < shape_.world_size; ++s) {
    const int32_t* counts = counts_from(step, s);
    for (int e = 0; e < num_experts; ++e) call.counts[e] += counts[e];
    const int32_t count = counts[shape_.max_local_experts];
    MOE_P2P_CHECK(count >= 0 && count <= plan_.max_tokens, Code::kProtocol, "rank ", memory_.rank(),
                  ": rank ", s, " announced ", count, " tokens");
    placement.first_row[static_cast<size_t>(s)] = static_cast<int32_t>(row);
    placement.num_rows[static_cast<size_t>(s)] = count;
    call.offsets[s] = static_cast<int32_t>(row);
    row += count;
  }
  MOE_P2P_CHECK(row <= call.capacity, Code::kResourceExhausted, "rank ", memory_.rank(),
                ": the rows of all ranks are ", row, ", capacity is ", call.capacity);
  call.offsets[shape_.world_size] = static_cast<int32_t>(row);
}

void HostKernels::read_heads(Step step, const DispatchRecv& call, const abi::TokenParts& parts,
                             const HandleView& handle, int64_t chunk, Placement& placement) const {
  const bool per_token = call.options.rows().per_token;
  const int num_local = shape_.ranks_per_node;
  const auto topk = static_cast<size_t>(shape_.topk);
  placement.items.clear();
  for (int s = 0; s < shape_.world_size; ++s) {
    RegionHeader& region = dispatch_region(step, s);
    const bool own_node = s / num_local == memory_.node();
    const std::byte* slot = region_bytes(
        region, own_node ? abi::inbox_slots_offset(shape_) : abi::outbox_slots_offset(shape_));
    handle.slot_count(chunk, s) = static_cast<int32_t>(region.num_tokens);
    for (uint32_t i = 0; i < region.num_tokens; ++i, slot += parts.slot_bytes) {
      const abi::SlotHead& head = *abi::slot_head(slot);
      MOE_P2P_CHECK(head.step == static_cast<uint32_t>(step.word()), Code::kProtocol, "rank ",
                    memory_.rank(), ": slot ", i, " from rank ", s, " holds word ", head.step,
                    ", expected ", step.word());
      const auto* ids = abi::slot_expert_ids(slot);
      const auto* positions = abi::slot_positions(slot, shape_.topk);
      int32_t* rows = handle.slot_rows(chunk, s, i);
      uint64_t ranks = 0;
      bool mine = false;
      for (size_t k = 0; k < topk; ++k) {
        rows[k] = -1;
        if (ids[k] == abi::kNoExpert) continue;
        MOE_P2P_CHECK(ids[k] < shape_.num_experts, Code::kProtocol, "rank ", memory_.rank(),
                      ": slot ", i, " from rank ", s, " names expert ", ids[k]);
        const int rank = plan_.expert_rank[ids[k]];
        if (rank / num_local != memory_.node()) continue;
        ranks |= uint64_t{1} << (rank % num_local);
        if (rank != memory_.rank() || (per_token && mine)) continue;
        const size_t place = static_cast<size_t>(per_token ? 0 : plan_.expert_local[ids[k]]) *
                                 static_cast<size_t>(shape_.world_size) +
                             static_cast<size_t>(s);
        MOE_P2P_CHECK(positions[k] >= 0 && positions[k] < placement.num_rows[place],
                      Code::kProtocol, "rank ", memory_.rank(), ": rank ", s, " sent token ",
                      positions[k], " for expert ", ids[k], " and announced ",
                      placement.num_rows[place]);
        mine = true;
        const int32_t row = placement.first_row[place] + positions[k];
        if (!call.options.drop || row < call.capacity) rows[k] = row;
      }
      handle.set_slot_ranks(chunk, s, i, ranks);
      if (mine) placement.items.push_back({s, static_cast<int32_t>(i)});
    }
  }
}

void HostKernels::copy_rows(Step step, const DispatchRecv& call, const abi::TokenParts& parts,
                            const HandleView& handle, int64_t chunk, const Placement& placement) {
  const ScaleRows scales(call);
  pool_.parallel_for(placement.items.size(), [&](size_t n) {
    const auto [source, index] = placement.items[n];
    const bool own_node = source / shape_.ranks_per_node == memory_.node();
    const std::byte* slot =
        region_bytes(dispatch_region(step, source), own_node ? abi::inbox_slots_offset(shape_)
                                                             : abi::outbox_slots_offset(shape_)) +
        static_cast<uint64_t>(index) * parts.slot_bytes;
    const auto* weights = abi::slot_weights(slot, shape_.topk);
    const int32_t* rows = handle.slot_rows(chunk, source, index);
    const auto copy = [&](void* base, int part, uint64_t row) {
      std::memcpy(static_cast<std::byte*>(base) + row * parts.bytes[part],
                  slot + parts.offset[part], parts.bytes[part]);
    };
    for (int k = 0; k < shape_.topk; ++k) {
      if (rows[k] < 0) continue;
      const auto row = static_cast<uint64_t>(rows[k]);
      copy(call.x, 0, row);
      if (call.scales) scales.store(row, slot + parts.offset[1], parts.bytes[1]);
      for (size_t i = 0; i < call.extras.size(); ++i)
        copy(call.extras[i].data, 2 + static_cast<int>(i), row);
      if (call.options.rows().per_token) {
        fill_topk(call, slot, row);
      } else {
        call.row_weights[row] = weights[k];
      }
      if (call.source) {
        call.source[2 * row] = source;
        call.source[2 * row + 1] = static_cast<int32_t>(abi::slot_head(slot)->token);
      }
      if (call.ready) {
        const int64_t at = rows[k] % call.capacity / abi::kArrivalRows;
        raise(call.ready[rows[k] / call.capacity * abi::arrival_counters(call.capacity) + at], 1);
      }
    }
  });
}

// Writes this rank's experts of a row per token, and their weights.
void HostKernels::fill_topk(const DispatchRecv& call, const std::byte* slot,
                            uint64_t row) const noexcept {
  const auto topk = static_cast<size_t>(shape_.topk);
  const auto* ids = abi::slot_expert_ids(slot);
  const auto* weights = abi::slot_weights(slot, shape_.topk);
  for (size_t k = 0; k < topk; ++k) {
    const bool mine = ids[k] != abi::kNoExpert && plan_.expert_rank[ids[k]] == memory_.rank();
    store_id(call, row * topk + k, mine ? plan_.expert_local[ids[k]] : -1);
    call.row_weights[row * topk + k] = mine ? weights[k] : 0.0f;
  }
}

// Once the counts of all experts are written.
void HostKernels::raise_counts(const DispatchRecv& call) const noexcept {
  const int32_t each = abi::arrival_counters(call.capacity);
  for (int e = 0; e < plan_.num_local_experts(memory_.rank()); ++e)
    for (int32_t i = 0; i < each; ++i)
      raise(call.ready[e * each + i], abi::arrival_rest(call.counts[e], i));
}

// Clears rows without a token: weight 0, source and experts -1 always, zero values when asked for.
void HostKernels::clear_padding(const DispatchRecv& call) const noexcept {
  const bool per_token = call.options.rows().per_token;
  const auto per_row = static_cast<uint64_t>(per_token ? shape_.topk : 1);
  const ScaleRows scales(call);
  const auto clear = [&](int64_t from, int64_t to) {
    if (from >= to) return;
    const auto first = static_cast<uint64_t>(from), rows = static_cast<uint64_t>(to - from);
    std::fill_n(call.row_weights + first * per_row, rows * per_row, 0.0f);
    for (uint64_t i = first * per_row; per_token && i < (first + rows) * per_row; ++i)
      store_id(call, i, -1);
    if (call.source) std::fill_n(call.source + 2 * first, 2 * rows, -1);
    if (!call.options.zero_padding) return;
    const auto zero = [&](void* base, uint64_t row_bytes) {
      std::memset(static_cast<std::byte*>(base) + first * row_bytes, 0, rows * row_bytes);
    };
    zero(call.x, recv_parts(plan_, call).bytes[0]);
    for (uint64_t row = first; call.scales && row < first + rows; ++row) scales.clear(row);
    for (const auto& extra : call.extras) zero(extra.data, extra.row_bytes);
  };
  if (per_token) return clear(call.offsets[shape_.world_size], call.capacity);
  const int num_experts = plan_.num_local_experts(memory_.rank());
  for (int e = 0; e < num_experts; ++e)
    clear(call.offsets[e] + call.counts[e],
          std::min<int64_t>(call.offsets[e + 1],
                            call.options.rows().apart ? call.offsets[e + 1] : call.capacity));
  if (!call.options.rows().apart) clear(call.offsets[num_experts], call.capacity);
}

void HostKernels::dispatch_recv(Step step, const DispatchRecv& call, const OpenCall& sent,
                                const HandleView& handle, int64_t chunk, Placement& placement) {
  const auto recorded = span(step, Phase::kDispatch, base::Event::kReceives);
  const abi::TokenParts& parts = sent.parts;
  const uint32_t flags = abi::dispatch_flags(call.x_dtype, call.options.layout, sent.max_tokens);
  for (int s = 0; s < shape_.world_size; ++s)
    check_header(dispatch_region(step, s), step, flags, parts.slot_bytes, s, "dispatch",
                 sent.num_slots);
  if (chunk == 0) {
    call.options.rows().per_token ? place_tokens(step, call, placement)
                                  : place(step, call, placement);
    clear_padding(call);
    if (call.ready) raise_counts(call);
  }
  read_heads(step, call, parts, handle, chunk, placement);
  copy_rows(step, call, parts, handle, chunk, placement);
}

}  // namespace moe_p2p::moe
