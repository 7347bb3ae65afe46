#include "moe/device/backend.h"

#include <algorithm>
#include <cstddef>

#include "base/log.h"
#include "engine/imm_counter.h"
#include "kernels/abi/handle.h"
#include "moe/device/plain.h"
#include "moe/plan/token_parts.h"
#include "platform/cuda.h"

namespace moe_p2p::moe {

using abi::DType;
using abi::SumOrder;
using base::Code;

namespace {

// The most workers that share a token or a row (kernels/device/worker.cuh, Part).
constexpr int64_t kMostShares = 8;

uint64_t address(const void* p) noexcept { return reinterpret_cast<uint64_t>(p); }

template <typename T>
abi::DevicePtr<T> on_device(T* p) noexcept {
  return {address(p)};
}

abi::ScalePlace scale_place(const DispatchRecv& recv) noexcept {
  const auto words = static_cast<int64_t>(recv.scale_bytes / 4);
  if (!recv.options.column_scales) return {.row = words, .expert = 0, .word = 1};
  const bool apart = recv.options.rows().apart;
  return {.row = 1,
          .expert = apart ? words * recv.scale_stride - recv.capacity : 0,
          .word = recv.scale_stride};
}

// Rows that are all there is of a sum are copied as they are (rows_stay, combine/bulk_send.cuh).
bool copies_rows(const CombineSend& send) noexcept {
  return send.y_dtype == send.out_dtype && !send.row_weights && !send.topk_weights &&
         !send.row_scalars && near_type(send.out_dtype, send.partials) == send.out_dtype;
}

}  // namespace

// --- set-up --------------------------------------------------------------------------------------

DeviceBackend::DeviceBackend(const Plan& plan, const AllToAllOptions& options,
                             const DeviceMemory& memory, Waits& waits)
    : plan_(plan),
      local_(options.rank % plan.shape.ranks_per_node),
      waits_(waits),
      in_order_(options.arrival_flags == ArrivalFlags::kWrite ||
                (options.arrival_flags == ArrivalFlags::kAuto && waits.orders_writes())),
      memory_(memory),
      context_(memory.ordinal),
      ledger_(plan.shape.steps_in_flight),
      order_(memory.ordinal, memory.world, context_, memory.num_sms == 0) {
  MOE_P2P_CHECK(memory.data.size() == static_cast<size_t>(plan.shape.ranks_per_node) &&
                    memory.data.size() <= abi::kMaxDomainRanks,
                Code::kInvalidArgument, memory.data.size(), " ranks' memory for ",
                plan.shape.ranks_per_node, " ranks of a node");
  MOE_P2P_CHECK(memory.peer_data.size() == static_cast<size_t>(plan.shape.num_nodes()),
                Code::kInvalidArgument, memory.peer_data.size(), " addresses of peers for ",
                plan.shape.num_nodes(), " nodes");
  uint64_t* const data = memory.table != 0 ? table_.data : comm_.data;
  std::copy(memory.data.begin(), memory.data.end(), data);
  if (memory.in_place) {
    const auto others = static_cast<size_t>(plan.shape.num_other_nodes());
    MOE_P2P_CHECK(memory.data.size() + others <= abi::kMaxDomainRanks, Code::kInvalidArgument,
                  "a NIC that writes in place serves at most ", abi::kMaxDomainRanks,
                  " ranks of the own node and other nodes together; there are ", memory.data.size(),
                  " and ", others);
    for (int node = 0; node < plan.shape.num_nodes(); ++node)
      if (const int own = options.rank / plan.shape.ranks_per_node; node != own)
        data[memory.data.size() + static_cast<size_t>(abi::other_index(node, own))] =
            memory.peer_data[static_cast<size_t>(node)];
  }
  if (memory.table != 0) {
    comm_.data[0] = memory.table;
    table_.communicator = options.communicator;
    static_assert(engine::ImmKey::kMaxSources <= abi::kMaxRanks);
  }
  comm_.state = memory.state;
  comm_.fault = {memory.fault_device};
  comm_.expert_rank = {memory.expert_rank};
  comm_.expert_local = {memory.expert_local};
  comm_.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(options.timeout).count());
  comm_.places = abi::Places::make(plan.shape);
  comm_.rank = options.rank;
  comm_.num_local_experts = plan.num_local_experts(options.rank);
  comm_.communicator = options.communicator;
}

void DeviceBackend::set_signals(const std::vector<uint64_t>& addresses) {
  MOE_P2P_CHECK(addresses.size() == memory_.data.size(), Code::kInvalidArgument, addresses.size(),
                " addresses of signal memory for ", memory_.data.size(), " ranks of a node");
  std::copy(addresses.begin(), addresses.end(),
            memory_.table != 0 ? table_.signals : comm_.signals);
}

void DeviceBackend::set_dispatch(DispatchVariant variant, const DeviceKernel& kernel) {
  variant.is_short = kernel.max_tokens > 0;
  dispatch_kernels_[variant] = kernel;
}

void DeviceBackend::set_combine(CombineVariant variant, const DeviceKernel& kernel) {
  variant.is_short = kernel.max_tokens > 0;
  combine_kernels_[variant] = kernel;
}

provider::MemorySpan DeviceBackend::span_at(uint64_t address) const {
  return {.data = reinterpret_cast<std::byte*>(address),
          .bytes = plan_.regions.total_bytes,
          .kind = provider::MemoryKind::kCuda,
          .device = memory_.ordinal,
          .read_by_neighbours = plan_.shape.ranks_per_node > 1,
          .in_order = in_order_};
}

// NICs do not use the regions within a node.
std::optional<provider::MemorySpan> DeviceBackend::regions() const {
  if (plan_.shape.num_nodes() == 1) return std::nullopt;
  return span_at(memory_.data[static_cast<size_t>(local_)]);
}

std::optional<provider::MemorySpan> DeviceBackend::mapped_regions(int node) const {
  const uint64_t address = memory_.peer_data[static_cast<size_t>(node)];
  if (address == 0) return std::nullopt;
  return span_at(address);
}

// --- launching -----------------------------------------------------------------------------------

void DeviceBackend::check_half(int64_t num_steps) const {
  MOE_P2P_CHECK(num_steps <= plan_.shape.steps_in_flight, Code::kInvalidArgument, "this call has ",
                num_steps, " chunks, send and receive halves take at most steps_in_flight = ",
                plan_.shape.steps_in_flight, "; use the whole call or raise chunk_tokens");
}

template <typename Call>
void DeviceBackend::launching(Call&& call) {
  waits_.latching([this] { check(); }, Waits::always);
  waits_.latching(call, [](Code code) { return code == Code::kTransport; });
}

void DeviceBackend::dispatch(const DispatchSend* send, const DispatchRecv* recv) {
  launching([&] { launch_dispatch(send, recv, send ? send->stream : recv->stream); });
}

void DeviceBackend::combine(const CombineSend* send, const CombineRecv* recv) {
  launching([&] { launch_combine(send, recv, send ? send->stream : recv->stream); });
}

void DeviceBackend::release(Handle handle, const platform::Stream& stream) {
  launching([&] { launch_release(handle.words, Place(stream)); });
}

void DeviceBackend::clean_masks(uint64_t round, const platform::Stream& stream) {
  const Place place(stream);
  MOE_P2P_CHECK(place.capture == 0, Code::kInvalidArgument,
                "clean_masks cannot be captured in a CUDA graph; call it between replays");
  MOE_P2P_CHECK(memory_.table == 0, Code::kUnavailable,
                "clean_masks is for fixed worlds; in one that changes update_members takes masked "
                "ranks back, on all ranks");
  MOE_P2P_CHECK(clean_kernel_, Code::kUnavailable, "no clean kernel is compiled");
  abi::CleanParams p{.comm = comm_, .round = round, .gone = 0};
  for (int l = 0; l < plan_.shape.ranks_per_node; ++l)
    if (l != local_ && !waits_.gone(l).empty()) p.gone |= uint64_t{1} << l;
  launching([&] {
    launch(*clean_kernel_, &p, 1, place, false);
    ledger_.restart(ledger_.next_step());
  });
}

void DeviceBackend::enter(DeviceBackend* before, const std::vector<uint8_t>& absent,
                          const platform::Stream& stream) {
  const Place place(stream);
  MOE_P2P_CHECK(
      place.capture == 0, Code::kInvalidArgument,
      "members cannot be committed while a CUDA graph is captured; do it between replays");
  DeviceBackend& from = before ? *before : *this;
  MOE_P2P_CHECK(from.enter_kernel_, Code::kUnavailable, "no enter kernel is compiled");
  MOE_P2P_CHECK(comm_.flag_words == from.comm_.flag_words, Code::kUnavailable, "parts have ",
                comm_.flag_words, " arrival flags with the ranks that come, and ",
                from.comm_.flag_words, " before, which captured graphs know");
  abi::EnterParams p{.comm = comm_, .table = table_, .absent = {}};
  for (size_t rank = 0; rank < absent.size(); ++rank)
    if (absent[rank]) p.absent[rank / 64] |= uint64_t{1} << rank % 64;
  if (before) {
    const platform::ContextGuard current(context_);
    (void)before->order_.follow(place.stream, 0);
  }
  waits_.latching([&] { launch(*from.enter_kernel_, &p, 1, place, false); },
                  [](Code code) { return code == Code::kTransport; });
  if (before) {
    before->failed_ = before->failed();
    dispatch_kernels_ = std::move(before->dispatch_kernels_);
    combine_kernels_ = std::move(before->combine_kernels_);
    enter_kernel_ = before->enter_kernel_;
    ledger_ = std::move(before->ledger_);
    ledger_.restart(0);
  }
}

abi::Grid DeviceBackend::grid_of(const DeviceKernel& kernel, GridInput input) const {
  input.relay_blocks = relay_blocks(input.weights);
  if (input.num_sms == 0) input.num_sms = memory_.num_sms;
  return choose_grid(kernel, input);
}

template <typename Params>
void DeviceBackend::launch(const DeviceKernel& kernel, const Params& params, const Place& place) {
  const int num_blocks =
      params.grid.num_relay_blocks + params.grid.num_send_blocks + params.grid.num_recv_blocks;
  launch(kernel, &params, num_blocks, place, true);
}

void DeviceBackend::launch(const DeviceKernel& kernel, const void* params, int num_blocks,
                           const Place& place, bool overlaps) {
  const platform::ContextGuard current(context_);
  const auto turn = order_.follow(place.stream, place.capture);
  platform::launch_kernel({.kernel = kernel.handle,
                           .num_blocks = static_cast<unsigned>(num_blocks),
                           .num_threads = kernel.num_threads,
                           .shared_bytes = kernel.shared_bytes,
                           .stream = place.stream.handle,
                           .overlap_previous = overlaps && turn.in_stream},
                          params);
  order_.launched(turn, place.stream, place.capture);
}

// --- dispatch ------------------------------------------------------------------------------------

OpenCall DeviceBackend::begin_dispatch(const DispatchSend& send) const {
  const int64_t num_chunks = plan_.num_chunks(send.max_tokens);
  MOE_P2P_CHECK(send.num_tokens >= 0 && send.num_tokens <= send.num_rows, Code::kInvalidArgument,
                "num_tokens is ", send.num_tokens, ", x has ", send.num_rows, " rows");
  // The device checks a count that lies there, against the rows of x and the chunks of the call.
  MOE_P2P_CHECK(send.device_num_tokens || send.num_tokens <= send.max_tokens,
                Code::kInvalidArgument, "this rank sends ", send.num_tokens,
                " tokens, max_tokens of this call is ", send.max_tokens);
  const int64_t num_slots = plan_.num_slots(send.max_tokens);
  const auto layout = abi::HandleLayout::make(plan_.shape, send.num_rows, num_chunks, num_slots);
  MOE_P2P_CHECK(static_cast<uint64_t>(send.handle.num_words) >= layout.total,
                Code::kInvalidArgument, "handle has ", send.handle.num_words,
                " words, this dispatch needs ", layout.total, " (handle_words)");
  return {.handle = send.handle.words,
          .num_steps = num_chunks,
          .num_slots = static_cast<int32_t>(num_slots),
          .max_tokens = static_cast<int32_t>(send.max_tokens),
          .solo = send.options.solo || num_chunks > 1,
          .stage = Stage::kDispatchSent,
          .variant = {.x_dtype = send.x_dtype,
                      .quantize = send.options.quantize,
                      .scale_format = send.options.scale_format,
                      .layout = send.options.rows().kernel,
                      .x_bytes = send.x_bytes},
          .parts = send_parts(plan_, send),
          .opaque = send.opaque_scales || !send.extras.empty() || send.x_bytes > 0,
          .num_extras = static_cast<int32_t>(send.extras.size()),
          .num_rows = static_cast<int32_t>(send.num_rows),
          .owner = send.handle_owner};
}

void DeviceBackend::fill(abi::DispatchParams& p, const DispatchSend& send) const {
  p.x = on_device(send.x);
  p.scales = on_device(send.scales);
  p.topk_idx = on_device(send.topk_idx);
  p.topk_copy = on_device(send.topk_copy);
  p.topk_weights = on_device(send.topk_weights);
  p.num_tokens = on_device(send.device_num_tokens);
  p.num_tokens_host = static_cast<int32_t>(send.num_tokens);
  p.topk_is_int64 = send.topk_is_int64;
  p.num_tokens_is_int64 = send.num_tokens_is_int64;
  for (size_t i = 0; i < send.extras.size(); ++i)
    p.extras[i] = {{address(send.extras[i].data)}, send.extras[i].row_bytes};
}

void DeviceBackend::fill(abi::DispatchParams& p, const DispatchRecv& recv) const {
  const abi::TokenParts parts = recv_parts(plan_, recv);
  bool fits = parts.num_parts == p.parts.num_parts;
  for (int i = 0; fits && i < parts.num_parts; ++i) fits = parts.bytes[i] == p.parts.bytes[i];
  MOE_P2P_CHECK(
      fits, Code::kInvalidArgument,
      "the outputs of this dispatch do not fit its inputs: payload type, scales and extras "
      "must be those that were sent");
  p.out_x = on_device(recv.x);
  p.out_scales = on_device(recv.scales);
  p.scale_place = scale_place(recv);
  for (size_t i = 0; i < recv.extras.size(); ++i)
    p.out_extras[i] = {{address(recv.extras[i].data)}, recv.extras[i].row_bytes};
  p.row_weights = on_device(recv.row_weights);
  p.counts = on_device(recv.counts);
  p.offsets = on_device(recv.offsets);
  p.row_topk = on_device(recv.row_topk);
  if (recv.row_topk) p.topk_is_int64 = recv.topk_is_int64;
  p.source = on_device(recv.source);
  p.ranges = on_device(recv.ranges);
  p.wait_ticks = on_device(recv.wait_ticks);
  p.grouped = !recv.options.rows().apart;
  p.zero_padding = recv.options.zero_padding;
  p.capacity = recv.capacity;
  p.alignment = recv.options.alignment;
  p.drop = recv.options.drop;
  p.ready = on_device(recv.ready);
}

abi::DispatchParams DeviceBackend::params_of(const OpenCall& call) const {
  abi::DispatchParams p{};
  p.comm = comm_;
  p.num_rows = call.num_rows;
  p.num_chunks = static_cast<int32_t>(call.num_steps);
  p.num_slots = call.num_slots;
  p.max_tokens = call.max_tokens;
  p.solo = call.solo;
  p.parts = call.parts;
  p.num_extras = call.num_extras;
  p.opaque = call.opaque;
  p.handle = address(call.handle);
  return p;
}

void DeviceBackend::launch_dispatch(const DispatchSend* send, const DispatchRecv* recv,
                                    const platform::Stream& stream) {
  const Place place(stream);
  const OpenCall* before =
      send ? nullptr : ledger_.find(recv->handle.words, Stage::kDispatchSent, place.capture);
  MOE_P2P_CHECK(send || before, Code::kInvalidArgument,
                "dispatch_recv: this handle has no dispatch_send waiting; each send half is "
                "received once");
  OpenCall call = send ? begin_dispatch(*send) : *before;
  if (!recv) check_half(call.num_steps);
  const abi::RowLayout layout = recv ? recv->options.rows().kernel : call.variant.layout;
  MOE_P2P_CHECK(layout == call.variant.layout, Code::kInvalidArgument, "layout is ",
                abi::facts_of(std::max(layout, call.variant.layout)).name,
                " for one half and not for the other; give both the same");
  MOE_P2P_CHECK(!recv || !recv->scales || recv->options.scale_format == call.variant.scale_format,
                Code::kInvalidArgument,
                "scale_format differs from dispatch_send's; give dispatch_recv the same");
  abi::DispatchParams p = params_of(call);
  if (send) fill(p, *send);
  if (recv) fill(p, *recv);
  auto wanted = call.variant;
  wanted.ready = recv && recv->ready;
  const DeviceKernel& kernel =
      find_kernel(dispatch_kernels_, wanted, is_plain(p), call.num_slots, "dispatch");
  MOE_P2P_CHECK(call.parts.slot_bytes <= kernel.max_slot_bytes, Code::kInvalidArgument,
                "a token of this call takes ", call.parts.slot_bytes,
                " bytes with its scales and extras, a kernel of so few multiprocessors holds ",
                kernel.max_slot_bytes, "; raise extra_bytes of the configuration");
  const int64_t chunk = tokens_of(kernel, call);
  p.grid = grid_of(
      kernel,
      {.send_items = send ? std::min<int64_t>(call.num_rows, chunk) * kMostShares + 1  // headers
                          : 0,
       .recv_items = recv ? chunk * plan_.shape.world_size : 0,
       .num_sms = recv ? recv->num_sms : 0});
  // A product that waits may hold all other multiprocessors (docs/protocol.md, section 9).
  MOE_P2P_CHECK(!wanted.ready || p.grid.num_relay_blocks + p.grid.num_recv_blocks <= recv->num_sms,
                Code::kInvalidArgument, "num_sms is ", recv->num_sms,
                ", must be at least 2: one block relays what arrives from other nodes");
  if (send) make_room(call.num_steps, place);
  launch(kernel, p, place);
  if (recv) call.stage = Stage::kDispatched;
  ledger_.record(before, call, place.capture, send != nullptr, !recv || !call.solo);
}

// --- combine -------------------------------------------------------------------------------------

OpenCall DeviceBackend::begin_combine(const CombineSend& send) const {
  return {.handle = send.handle.words,
          .num_steps = plan_.num_chunks(send.max_tokens),
          .solo = true,
          .stage = Stage::kCombineSent};
}

void DeviceBackend::fill(abi::CombineParams& p, const CombineSend& send) {
  p.y = on_device(send.y);
  p.row_weights = on_device(send.row_weights);
  p.row_scalars = on_device(send.row_scalars);
  p.topk_scalars = send.topk_scalars;
  p.rows_apart = send.order == SumOrder::kRows;
  p.topk_weights = on_device(send.topk_weights);
  p.num_rows = static_cast<int32_t>(send.num_rows);
  const ReadyRows& ready = send.ready;
  if (!ready.counters) return;
  p.ready = {.counters = on_device(ready.counters),
             .base = on_device(ready.base),
             .want = ready.want,
             .rows = ready.rows,
             .per_expert = ready.per_expert,
             .capacity = static_cast<int32_t>(send.capacity)};
}

void DeviceBackend::fill(abi::CombineParams& p, const CombineRecv& recv) {
  MOE_P2P_CHECK(!p.topk_weights || p.num_rows == recv.num_rows, Code::kInvalidArgument,
                "topk_weights has ", p.num_rows, " rows, the dispatch had ", recv.num_rows);
  p.num_rows = static_cast<int32_t>(recv.num_rows);
  p.out = on_device(recv.out);
  p.out_scalars = on_device(recv.out_scalars);
  std::ranges::transform(recv.bias, p.bias, on_device<const void>);
  p.topk_idx = on_device(recv.topk_idx);
  p.topk_is_int64 = recv.topk_is_int64;
  p.wait_ticks = on_device(recv.wait_ticks);
}

void DeviceBackend::launch_combine(const CombineSend* send, const CombineRecv* recv,
                                   const platform::Stream& stream) {
  const Place place(stream);
  const Handle handle = send ? send->handle : recv->handle;
  MOE_P2P_CHECK(!send || !ledger_.waits_to_be_received(handle.words), Code::kInvalidArgument,
                "combine needs a dispatch that was received; call dispatch_recv first");
  const OpenCall* before =
      ledger_.find(handle.words, send ? Stage::kDispatched : Stage::kCombineSent, place.capture);
  MOE_P2P_CHECK(send || before, Code::kInvalidArgument,
                "combine_recv: this handle has no combine_send waiting; each send half is received "
                "once");
  OpenCall call = before ? *before : begin_combine(*send);
  // Whether the call opens steps, as far as the host knows.
  const bool opens = send && (call.solo || (ledger_.releases() && !call.holds));
  if (send) {
    call.stage = Stage::kCombineSent;
    call.num_steps = plan_.num_chunks(send->max_tokens);
    call.num_slots = static_cast<int32_t>(plan_.num_slots(send->max_tokens));
    const auto layout = abi::HandleLayout::make(plan_.shape, 0, call.num_steps, call.num_slots);
    MOE_P2P_CHECK(static_cast<uint64_t>(handle.num_words) >= layout.total, Code::kInvalidArgument,
                  "handle has ", handle.num_words, " words, too few for a dispatch of max_tokens ",
                  send->max_tokens, "; pass it whole, and max_tokens of its dispatch");
    call.sum = {send->y_dtype, send->out_dtype, send->order != SumOrder::kRanks, send->partials};
    call.order = send->order;
    call.with_scalars = send->row_scalars != nullptr;
  }
  const auto out_dtype = call.sum.out_dtype;
  const auto partials = call.sum.partials;
  const PartialForm form{near_type(out_dtype, partials), call.with_scalars, call.order};
  check_partial(plan_, form);
  check_partial(plan_, {far_type(out_dtype, partials), call.with_scalars, call.order});
  if (!recv) check_half(call.num_steps);
  MOE_P2P_CHECK(
      !recv || (recv->out_dtype == out_dtype && recv->partials == partials &&
                recv->order == form.order && (call.with_scalars || recv->out_scalars == nullptr)),
      Code::kInvalidArgument,
      "out must be of the out_dtype and partials that combine_send was given, and "
      "scalars come back only where row_scalars were sent");
  abi::CombineParams p{};
  p.comm = comm_;
  p.handle = address(handle.words);
  p.stride = partial_stride(plan_, form);
  p.num_chunks = static_cast<int32_t>(call.num_steps);
  p.num_slots = call.num_slots;
  p.with_scalars = call.with_scalars;
  if (send) fill(p, *send);
  if (recv) fill(p, *recv);
  auto wanted = call.sum;
  wanted.ready = send && send->ready.counters;
  const DeviceKernel& kernel =
      find_kernel(combine_kernels_, wanted, is_plain(p), call.num_slots, "combine");
  const int64_t chunk = tokens_of(kernel, call);
  p.grid = grid_of(kernel, {.send_items = send ? chunk * plan_.shape.world_size * kMostShares : 0,
                            .recv_items = recv ? chunk * kMostShares : 0,
                            .num_sms = send ? send->ready.num_sms : 0,
                            .copies = send && copies_rows(*send),
                            .own_stay = recv && send && abi::facts_of(send->layout).per_token,
                            .weights = p.topk_weights.address != 0});
  // `before` stays valid: a call that opens steps has none, or a captured one.
  if (opens) make_room(call.num_steps, place);
  launch(kernel, p, place);
  ledger_.record(before, call, place.capture, opens, !recv);
}

// Receives a dispatch without outputs: self-flagging slots must be read.
void DeviceBackend::discard(const OpenCall& call, const Place& place) {
  const DeviceKernel& kernel =
      find_kernel(dispatch_kernels_, call.variant, false, call.num_slots, "dispatch");
  abi::DispatchParams p = params_of(call);
  p.grouped = 1;
  p.alignment = 1;
  p.grid = grid_of(kernel, {.recv_items = tokens_of(kernel, call) * plan_.shape.world_size});
  launch(kernel, p, place);
}

// A handle that holds no step, of a solo dispatch or combined already, needs nothing; for a
// captured handle only the device knows.
void DeviceBackend::launch_release(const int32_t* handle, const Place& place) {
  const OpenCall* open = ledger_.find(handle, Stage::kDispatched, place.capture);
  if (!open) {
    open = ledger_.find(handle, Stage::kDispatchSent, place.capture);
    if (!open) return;
    discard(*open, place);
    if (open->solo)  // the receiving half has reported that all is read
      return ledger_.record(open, *open, place.capture, false, false);
  }
  if (open->solo) return;
  MOE_P2P_CHECK(!combine_kernels_.empty(), Code::kUnavailable,
                "no combine kernel is compiled for this communicator");
  abi::CombineParams p{};
  p.comm = comm_;
  p.handle = address(handle);
  p.num_chunks = static_cast<int32_t>(open->num_steps);
  p.num_slots = open->num_slots;
  p.empty = 1;
  p.grid = {1, 1, relay_blocks(false)};
  launch(combine_kernels_.begin()->second, p, place);  // general: these come before plain ones
  ledger_.record(open, *open, place.capture, false, false);
}

void DeviceBackend::make_room(int64_t num_steps, const Place& place) {
  for (const OpenCall& call : ledger_.to_release(num_steps, place.capture))
    launch_release(call.handle, place);
  ledger_.check_room(num_steps, place.capture);
}

}  // namespace moe_p2p::moe
