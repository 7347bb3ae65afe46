// torch.ops.moe_p2p: making communicators, and dispatch and combine in halves.
#include <cstddef>
#include <utility>

#include "kernels/abi/handle.h"
#include "kernels/abi/params.h"
#include "moe/plan/handle.h"
#include "ops/all_to_all_object.h"
#include "ops/communicator_settings.h"
#include "ops/device_settings.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

void check_ranks_per_node(int64_t ranks) { moe::check_ranks_per_node(ranks); }

// One line "name bytes" per region.
std::string plan(const std::string& settings) {
  std::string text;
  for (const auto& [name, bytes] : moe::make_plan(plan_input_from(settings)).table())
    text += base::concat(name, " ", bytes, "\n");
  return text;
}

// One line "name number" per field of abi::Shape.
std::string shape(const std::string& settings) {
  const abi::Shape s = moe::make_plan(plan_input_from(settings)).shape;
  return base::concat("world_size ", s.world_size, "\nranks_per_node ", s.ranks_per_node,
                      "\nnum_experts ", s.num_experts, "\nmax_local_experts ", s.max_local_experts,
                      "\ntopk ", s.topk, "\nchunk_tokens ", s.chunk_tokens, "\nsteps_in_flight ",
                      s.steps_in_flight, "\npart_bytes ", s.part_bytes, "\nmax_token_bytes ",
                      s.max_token_bytes, "\nmax_partial_bytes ", s.max_partial_bytes, "\n");
}

// One line "name number" for each number of kernels/abi that Python needs (moe_p2p/moe/shape.py,
// Layout).
std::string layout(int64_t topk) {
  MOE_P2P_CHECK(topk >= 1 && topk <= abi::kMaxTopk, Code::kInvalidArgument, "topk is ", topk,
                ", must be from 1 to ", abi::kMaxTopk);
  return base::concat(
      "slot_head_bytes ", abi::slot_head_bytes(static_cast<int32_t>(topk)), "\nscale_block ",
      abi::kScaleBlock, "\nhandle_meta_words ", sizeof(abi::HandleMeta) / sizeof(int32_t),
      "\nhandle_num_tokens ", offsetof(abi::HandleMeta, num_tokens) / sizeof(int32_t),
      "\nfault_bytes ", sizeof(abi::Fault), "\ntable_bytes ", sizeof(abi::EpochTable),
      "\nmasks_word ", offsetof(abi::DeviceState, masks) / sizeof(uint64_t), "\nlaunches_word ",
      offsetof(abi::DeviceState, launches) / sizeof(uint64_t), "\nlaunch_blocks ", abi::kLaunch,
      "\nnext_step_word ", offsetof(abi::DeviceState, next_step) / sizeof(uint64_t),
      "\nstamps_word ", offsetof(abi::DeviceState, stamps) / sizeof(uint64_t), "\nstamped_steps ",
      abi::kStampedSteps, "\nnum_stamps ", abi::kStamps, "\narrival_rows ", abi::kArrivalRows,
      "\narrival_want ", abi::kArrivalWant, "\n");
}

int64_t all_to_all_create(int64_t engine, const std::string& settings,
                          std::optional<Tensor> masks) {
  moe::AllToAllOptions options = communicator_options_from(settings);
  const OnDevice host(-1);
  const Expected expected{"masks", {ScalarType::Int}, {options.plan.world_size}};
  if (masks) options.masks = output<int32_t>(*masks, expected);
  return communicators().add(
      std::make_shared<AllToAllObject>(engines().get(engine), options, std::move(masks), settings));
}

// memory: device_settings.h; the caller keeps it.
void all_to_all_use_device(int64_t comm, const std::string& memory) {
  const moe::DeviceMemory device = device_memory_from(memory);
  const Caller caller(comm);
  caller->all_to_all.use_device(device);
  caller->device = device.ordinal;
}

// [L] host addresses of the node's signal memory, then its bytes.
std::vector<int64_t> all_to_all_signals(int64_t comm) {
  const Caller caller(comm);
  std::vector<int64_t> numbers;
  const auto spans = caller->all_to_all.signals();
  for (const auto& span : spans) numbers.push_back(reinterpret_cast<int64_t>(span.data()));
  numbers.push_back(static_cast<int64_t>(spans.front().size()));
  return numbers;
}

// Of dispatch, then of combine: when the last doorbell was taken, when its last arrival was
// published, in nanoseconds; noted from the first call on.
std::vector<int64_t> all_to_all_times(int64_t comm) {
  const auto times = Caller(comm)->all_to_all.exchange_times();
  return {times.begin(), times.end()};
}

// Its settings, flags [3, S, W], and NICs by node: what a replay must know. Beside calls.
std::tuple<std::string, Tensor, std::vector<int64_t>> all_to_all_snapshot(int64_t comm) {
  const auto object = communicators().get(comm);
  const auto snapshot = object->all_to_all.snapshot();
  Tensor flags = make_tensor(
      {abi::kNumPhases, object->plan().shape.steps_in_flight, object->plan().shape.world_size},
      ScalarType::Long);
  std::ranges::copy(snapshot.flags, static_cast<int64_t*>(flags.mutable_data_ptr()));
  return {object->settings, flags, snapshot.nics};
}

// Spans of its calls, as engine_record has events, and its number in those.
std::tuple<Tensor, int64_t, int64_t> all_to_all_record(int64_t comm, int64_t num_events) {
  const size_t size = checked_events(num_events);
  const Caller caller(comm);
  auto [events, overwritten] = events_from(caller->all_to_all.record(size));
  return {std::move(events), overwritten, int64_t{caller->communicator}};
}

void all_to_all_use_signals(int64_t comm, std::vector<int64_t> device_addresses) {
  const Caller caller(comm);
  caller->all_to_all.use_signals({device_addresses.begin(), device_addresses.end()});
}

void all_to_all_set_dispatch_kernel(int64_t comm, ScalarType x_dtype, int64_t options_number,
                                    const std::string& kernel, int64_t x_bytes, bool plain,
                                    bool ready) {
  const moe::DeviceKernel made = device_kernel_from(kernel);
  const Caller caller(comm);
  const moe::DispatchOptions options = moe::dispatch_options_from(options_number);
  const moe::DispatchVariant variant{
      .x_dtype = x_bytes > 0 ? abi::DType::kFloat8E4M3 : payload_type(x_dtype, "x_dtype"),
      .quantize = options.quantize,
      .scale_format = options.scale_format,
      .layout = options.rows().kernel,
      .x_bytes = static_cast<uint64_t>(x_bytes),
      .plain = plain,
      .ready = ready};
  caller->all_to_all.device().set_dispatch(variant, made);
}

void all_to_all_set_combine_kernel(int64_t comm, ScalarType y_dtype, ScalarType out_dtype,
                                   const std::string& kernel, bool by_topk, int64_t partials,
                                   bool plain, bool ready) {
  const moe::DeviceKernel made = device_kernel_from(kernel);
  const Caller caller(comm);
  caller->all_to_all.device().set_combine(
      {payload_type(y_dtype, "y_dtype"), payload_type(out_dtype, "out_dtype"), by_topk,
       moe::partials_of(partials), plain, ready},
      made);
}

Tensor all_to_all_address(int64_t comm) {
  return bytes_tensor(communicators().get(comm)->all_to_all.address());
}

void all_to_all_connect(int64_t comm, std::vector<Tensor> addresses) {
  std::vector<base::Bytes> bytes;
  for (const Tensor& address : addresses) {
    const auto span = bytes_of(address, "an address");
    bytes.emplace_back(span.begin(), span.end());
  }
  const Caller caller(comm);
  caller->all_to_all.connect(bytes);
}

// From here on `comm` names the communicator that was made and connected as `epoch`, and that names
// the one before, to be closed. Between two calls. The same number twice: its first epoch.
void all_to_all_enter(int64_t comm, int64_t epoch) {
  if (comm == epoch) {
    const Caller first(comm);
    first->all_to_all.enter(nullptr, current_stream(first->device));
    return;
  }
  const Caller before(comm), next(epoch);
  next->all_to_all.enter(&before->all_to_all, current_stream(next->device));
  if (before->releases_oldest) {
    next->all_to_all.release_oldest();
    next->releases_oldest = true;
  }
  communicators().swap(comm, epoch);
}

// Tokens of this rank whose sums have lacked something, of all steps.
int64_t all_to_all_lost(int64_t comm) {
  return static_cast<int64_t>(communicators().get(comm)->all_to_all.lost().num_tokens);
}

// Of all epochs: steps, dispatches, combines, releases, tokens sent, rows received, deadlines, lost
// tokens; then two of each rank: nanoseconds that were waited for it, and how often it was named.
// Beside calls: takes no lock that one holds while it runs.
std::vector<int64_t> all_to_all_counters(int64_t comm) {
  const auto object = communicators().get(comm);
  const moe::Counters& counters = object->all_to_all.counters();
  const uint64_t lost = object->all_to_all.lost().num_tokens;
  std::vector<int64_t> values;
  const auto put = [&values](const moe::Counters::Count& count, uint64_t more = 0) {
    values.push_back(static_cast<int64_t>(moe::Counters::read(count) + more));
  };
  for (const auto* each :
       {&counters.steps, &counters.dispatches, &counters.combines, &counters.releases,
        &counters.tokens_sent, &counters.rows_received, &counters.deadlines})
    put(*each);
  put(counters.lost_tokens, lost);
  for (const auto& source : counters.sources) {
    put(source.wait_ns);
    put(source.straggles);
  }
  return values;
}

// Beside calls, as all_to_all_ended.
std::vector<int64_t> all_to_all_watch(int64_t comm, int64_t count, bool preparing, int64_t step,
                                      int64_t waited_ms, const std::vector<int64_t>& masked) {
  const moe::Progress progress{static_cast<uint64_t>(count), preparing};
  const auto ranks = communicators().get(comm)->all_to_all.watch(
      progress, static_cast<uint64_t>(step), std::chrono::milliseconds(waited_ms), masked);
  return {ranks.begin(), ranks.end()};
}

// Throws where a rank was lost or came between two dispatches of one routing, so that the rows of
// the second are not those of the first. On hosts.
void all_to_all_check_again(int64_t comm, const Tensor& first, const Tensor& second) {
  const Caller caller(comm);
  if (caller->device >= 0) return;
  const moe::Plan& plan = caller->plan();
  const auto open = [&](const Tensor& handle) {
    return moe::HandleView::open(plan.shape, caller->communicator, handle_from(handle));
  };
  const moe::HandleView before = open(first), now = open(second);
  for (int64_t chunk = 0; chunk < before.meta().num_chunks; ++chunk)
    for (int source = 0; source < plan.shape.world_size; ++source)
      MOE_P2P_CHECK(before.slot_count(chunk, source) == now.slot_count(chunk, source),
                    Code::kPeerDead, "rank ", caller->rank, ": rank ", source,
                    " was lost or came back between a combine and its backward pass, whose rows "
                    "would be those of other tokens; make the step anew");
}

// Ranks of this node that will not come back. Beside calls; not beside all_to_all_close.
std::vector<int64_t> all_to_all_ended(int64_t comm) {
  const std::vector<int> ranks = communicators().get(comm)->all_to_all.ended();
  return {ranks.begin(), ranks.end()};
}

// Waits for a running call: at most its deadline. Where a signal's handler closes it in a wait of
// its own call, the end of that call does.
void all_to_all_close(int64_t comm) {
  const auto object = communicators().take(comm);
  if (object == nullptr) return;
  if (object->caller.load(std::memory_order_relaxed) == std::this_thread::get_id()) return;
  const std::lock_guard lock(object->in_use);
  object->all_to_all.close();
}

// Empty while a call of another thread runs: its outcome is not known yet.
std::string all_to_all_broken(int64_t comm) {
  const auto object = communicators().get(comm);
  const std::unique_lock lock(object->in_use, std::try_to_lock);
  return lock.owns_lock() ? object->all_to_all.broken() : std::string();
}

std::string all_to_all_arrival_flags(int64_t comm) {
  return communicators().get(comm)->all_to_all.arrival_flags();
}

void all_to_all_check(std::vector<int64_t> comms) { check(comms); }

void all_to_all_release_oldest(int64_t comm) {
  const Caller caller(comm);
  caller->all_to_all.release_oldest();
  caller->releases_oldest = true;
}

void all_to_all_set_clean_kernel(int64_t comm, const std::string& kernel) {
  const moe::DeviceKernel made = device_kernel_from(kernel);
  const Caller caller(comm);
  caller->all_to_all.device().set_clean(made);
}

void all_to_all_set_enter_kernel(int64_t comm, const std::string& kernel) {
  const moe::DeviceKernel made = device_kernel_from(kernel);
  const Caller caller(comm);
  caller->all_to_all.device().set_enter(made);
}

void all_to_all_clean_masks(int64_t comm) {
  const Caller caller(comm);
  caller->all_to_all.clean_masks(current_stream(caller->device));
}

// Returns each rank's values, [W, n], in host memory, whatever the communicator's device is.
Tensor all_to_all_gather_counts(int64_t comm, const Tensor& values) {
  const Caller caller(comm);
  const OnDevice host(-1);
  const Expected expected{"values", {ScalarType::Int}, {kAny}};
  const auto count = static_cast<size_t>(values.numel());
  const std::span given(input<int32_t>(values, expected), count);
  const int64_t world_size = caller->plan().shape.world_size;
  const Tensor gathered = make_tensor({world_size, values.numel()}, ScalarType::Int);
  const size_t total = count * static_cast<size_t>(world_size);
  caller->all_to_all.gather_counts(given,
                                   {static_cast<int32_t*>(mutable_data_of(gathered)), total});
  return gathered;
}

// One line "name number" per field of abi::HandleLayout, and the most slots of a source in a chunk.
std::string handle_layout(int64_t comm, int64_t num_rows, int64_t max_tokens) {
  const auto object = communicators().get(comm);
  const abi::HandleLayout at = object->plan().handle_layout(num_rows, max_tokens);
  return base::concat("slot_counts ", at.slot_counts, "\nslot_rows ", at.slot_rows, "\nslot_ranks ",
                      at.slot_ranks, "\nsend_slots ", at.send_slots, "\ntotal ", at.total,
                      "\nnum_slots ", object->plan().num_slots(max_tokens), "\n");
}

void dispatch_send(int64_t comm, int64_t options_number, const Tensor& x,
                   std::optional<Tensor> scales, std::vector<Tensor> extras, const Tensor& topk_idx,
                   std::optional<Tensor> topk_weights, std::optional<Tensor> num_tokens,
                   int64_t num_tokens_host, int64_t max_tokens, const Tensor& handle) {
  const Caller caller(comm);
  const moe::DispatchOptions options = moe::dispatch_options_from(options_number);
  const auto send = dispatch_send_from(
      *caller,
      {x, scales, extras, topk_idx, topk_weights, num_tokens, num_tokens_host, max_tokens, options},
      handle);
  caller->all_to_all.dispatch(&send, nullptr);
}

void dispatch_recv(int64_t comm, int64_t options, const Tensor& handle, const Tensor& x,
                   std::optional<Tensor> scales, std::vector<Tensor> extras,
                   const Tensor& row_weights, const Tensor& counts, const Tensor& offsets,
                   std::optional<Tensor> source, std::optional<Tensor> ranges,
                   std::optional<Tensor> wait_ticks, std::optional<Tensor> row_topk,
                   int64_t capacity, std::optional<Tensor> ready, int64_t num_sms) {
  const Caller caller(comm);
  const Layout layout(*caller, moe::dispatch_options_from(options), capacity);
  const moe::Handle words = handle_from(handle);
  const DispatchOutputs to{x,       scales, extras, row_weights, counts,
                           offsets, source, ranges, wait_ticks,  row_topk};
  check_outputs(*caller, layout, to);
  auto recv = dispatch_recv_from(*caller, layout, to, words);
  if (ready) fill_ready(*caller, layout, *ready, num_sms, recv);
  caller->all_to_all.dispatch(nullptr, &recv);
}

void combine_send(int64_t comm, const Tensor& handle, const Tensor& y,
                  std::optional<Tensor> row_weights, std::optional<Tensor> row_scalars,
                  std::optional<Tensor> topk_weights, ScalarType out_dtype, int64_t max_tokens,
                  int64_t partials, std::optional<Tensor> ready, std::optional<Tensor> ready_base,
                  int64_t ready_rows, int64_t ready_want, int64_t num_sms) {
  const Caller caller(comm);
  const auto send = combine_send_from(*caller,
                                      {y,
                                       row_weights,
                                       row_scalars,
                                       topk_weights,
                                       out_dtype,
                                       max_tokens,
                                       abi::SumOrder::kRanks,
                                       moe::partials_of(partials),
                                       {},
                                       ready,
                                       ready_base,
                                       ready_rows,
                                       ready_want,
                                       num_sms},
                                      handle);
  caller->all_to_all.combine(&send, nullptr);
}

void combine_recv(int64_t comm, const Tensor& handle, const Tensor& out,
                  std::optional<Tensor> out_scalars, std::vector<Tensor> bias,
                  std::optional<Tensor> wait_ticks, int64_t partials) {
  const Caller caller(comm);
  const auto recv = combine_recv_from(*caller,
                                      {out, out_scalars, bias, wait_ticks, abi::SumOrder::kRanks,
                                       nullptr, moe::partials_of(partials)},
                                      handle_from(handle));
  caller->all_to_all.combine(nullptr, &recv);
}

void release(int64_t comm, const Tensor& handle) {
  const Caller caller(comm);
  caller->all_to_all.release(handle_from(handle), current_stream(caller->device));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("shape", TORCH_BOX(&shape));
  m.impl("layout", TORCH_BOX(&layout));
  m.impl("check_ranks_per_node", TORCH_BOX(&check_ranks_per_node));
  m.impl("all_to_all_create", TORCH_BOX(&all_to_all_create));
  m.impl("all_to_all_use_device", TORCH_BOX(&all_to_all_use_device));
  m.impl("all_to_all_signals", TORCH_BOX(&all_to_all_signals));
  m.impl("all_to_all_times", TORCH_BOX(&all_to_all_times));
  m.impl("all_to_all_snapshot", TORCH_BOX(&all_to_all_snapshot));
  m.impl("all_to_all_record", TORCH_BOX(&all_to_all_record));
  m.impl("all_to_all_use_signals", TORCH_BOX(&all_to_all_use_signals));
  m.impl("all_to_all_set_dispatch_kernel", TORCH_BOX(&all_to_all_set_dispatch_kernel));
  m.impl("all_to_all_set_combine_kernel", TORCH_BOX(&all_to_all_set_combine_kernel));
  m.impl("all_to_all_address", TORCH_BOX(&all_to_all_address));
  m.impl("all_to_all_connect", TORCH_BOX(&all_to_all_connect));
  m.impl("all_to_all_enter", TORCH_BOX(&all_to_all_enter));
  m.impl("all_to_all_lost", TORCH_BOX(&all_to_all_lost));
  m.impl("all_to_all_counters", TORCH_BOX(&all_to_all_counters));
  m.impl("all_to_all_watch", TORCH_BOX(&all_to_all_watch));
  m.impl("all_to_all_check_again", TORCH_BOX(&all_to_all_check_again));
  m.impl("all_to_all_ended", TORCH_BOX(&all_to_all_ended));
  m.impl("all_to_all_close", TORCH_BOX(&all_to_all_close));
  m.impl("all_to_all_broken", TORCH_BOX(&all_to_all_broken));
  m.impl("all_to_all_arrival_flags", TORCH_BOX(&all_to_all_arrival_flags));
  m.impl("all_to_all_check", TORCH_BOX(&all_to_all_check));
  m.impl("all_to_all_release_oldest", TORCH_BOX(&all_to_all_release_oldest));
  m.impl("all_to_all_clean_masks", TORCH_BOX(&all_to_all_clean_masks));
  m.impl("all_to_all_set_clean_kernel", TORCH_BOX(&all_to_all_set_clean_kernel));
  m.impl("all_to_all_set_enter_kernel", TORCH_BOX(&all_to_all_set_enter_kernel));
  m.impl("all_to_all_gather_counts", TORCH_BOX(&all_to_all_gather_counts));
  m.impl("handle_layout", TORCH_BOX(&handle_layout));
  m.impl("dispatch_send", TORCH_BOX(&dispatch_send));
  m.impl("dispatch_recv", TORCH_BOX(&dispatch_recv));
  m.impl("combine_send", TORCH_BOX(&combine_send));
  m.impl("combine_recv", TORCH_BOX(&combine_recv));
  m.impl("release", TORCH_BOX(&release));
}

}  // namespace moe_p2p::ops
