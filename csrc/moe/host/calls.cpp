#include "moe/host/calls.h"

#include <algorithm>
#include <utility>

#include "base/mutation.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using Stage = OpenCall::Stage;

namespace {

void check_unchanged(const HandleView& handle, const OpenCall& call) {
  const abi::HandleMeta& meta = handle.meta();
  MOE_P2P_CHECK(meta.num_chunks == call.num_steps && meta.num_slots == call.num_slots &&
                    meta.num_rows == call.num_rows,
                Code::kInvalidArgument, "handle has ", meta.num_chunks, " chunks of ",
                meta.num_slots, " slots and ", meta.num_rows, " rows, the call before had ",
                call.num_steps, " of ", call.num_slots, " and ", call.num_rows,
                "; it was overwritten since");
}

std::deque<Step> steps_of(const StepRing& ring, const OpenCall& call) {
  std::deque<Step> steps;
  for (int64_t i = 0; i < call.num_steps; ++i)
    steps.push_back(ring.step_of(call.first_step + static_cast<uint64_t>(i)));
  return steps;
}

}  // namespace

// --- steps -------------------------------------------------------------------------------------

StepRing::StepRing(const Plan& plan, HostKernels& kernels, Counters& counters)
    : plan_(plan),
      kernels_(kernels),
      counters_(counters),
      slots_(static_cast<size_t>(plan.shape.steps_in_flight)) {}

Step StepRing::step_of(uint64_t index) const noexcept {
  return {index, static_cast<int>(index % slots_.size())};
}

bool StepRing::arrived(Step step, Phase phase) const {
  kernels_.look_at_masks();
  for (int source = 0; source < plan_.shape.world_size; ++source)
    if (!kernels_.arrived(step, phase, source)) return false;
  return true;
}

Pending StepRing::pending(uint64_t index) const {
  return {step_of(slots_[index % slots_.size()].step), Phase::kCombine};
}

bool StepRing::can_begin(uint64_t index) {
  Slot& slot = slots_[index % slots_.size()];
  if (slot.state == State::kClosed || MOE_P2P_MUTATED(kReuseSlotEarly)) return true;
  const Step step = step_of(slot.step);
  if (slot.state == State::kBusy || !arrived(step, Phase::kCombine)) return false;
  if (slot.state == State::kAcknowledged) kernels_.recv_empty_combine(step);
  slot.state = State::kClosed;
  return true;
}

Step StepRing::begin(uint64_t index) {
  const Step step = step_of(index);
  Counters::add(counters_.steps, 1);
  slots_[static_cast<size_t>(step.slot)] = {State::kBusy, step.index, false};
  return step;
}

void StepRing::acknowledge(Step step) {
  kernels_.send_empty_combine(step);
  handed_in(step);
  slots_[static_cast<size_t>(step.slot)].state = State::kAcknowledged;
}

void StepRing::close(Step step) noexcept {
  slots_[static_cast<size_t>(step.slot)].state = State::kClosed;
}

void StepRing::begin_round(uint64_t round) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Step step = step_of((round << abi::kRoundBit) + i);
    slots_[static_cast<size_t>(step.slot)] = {
        MOE_P2P_MUTATED(kCleanWithoutWait) ? State::kClosed : State::kCleaned, step.index, false};
  }
  kernels_.begin_round(round);
}

std::vector<Step> StepRing::last_combines() const {
  std::vector<Step> steps;
  for (const Slot& slot : slots_)
    if (slot.handed_in) steps.push_back(step_of(slot.step));
  return steps;
}

// --- dispatch ------------------------------------------------------------------------------------

DispatchCall::DispatchCall(const HostContext& context, const DispatchSend& send)
    : context_(context),
      send_(send),
      call_{.handle = send.handle.words,
            .num_steps = context.plan.num_chunks(send.max_tokens),
            .num_slots = static_cast<int32_t>(context.plan.num_slots(send.max_tokens)),
            .max_tokens = static_cast<int32_t>(send.max_tokens),
            .solo = send.options.solo,
            .stage = Stage::kDispatchSent,
            .variant = {.x_dtype = send.x_dtype,
                        .quantize = send.options.quantize,
                        .scale_format = send.options.scale_format,
                        .layout = send.options.rows().kernel,
                        .x_bytes = send.x_bytes},
            .num_rows = static_cast<int32_t>(send.num_rows)},
      handle_(HandleView::create(context.plan.shape, send.handle, send.num_rows, call_.num_steps,
                                 call_.num_slots)) {
  call_.parts = send_parts(context.plan, send);
  call_.solo = send.options.solo || call_.num_steps > 1;
  MOE_P2P_CHECK(send.num_tokens >= 0 && send.num_tokens <= send.num_rows, Code::kInvalidArgument,
                "num_tokens is ", send.num_tokens, ", x has ", send.num_rows, " rows");
  MOE_P2P_CHECK(send.num_tokens <= send.max_tokens, Code::kInvalidArgument, "this rank sends ",
                send.num_tokens, " tokens, max_tokens of this call is ", send.max_tokens);
  abi::HandleMeta& meta = handle_.meta();
  meta = {};
  meta.num_chunks = static_cast<int32_t>(call_.num_steps);
  meta.num_tokens = static_cast<int32_t>(send.num_tokens);
  meta.num_rows = static_cast<int32_t>(send.num_rows);
  meta.num_slots = call_.num_slots;
  routing_ = context.kernels.route(send, call_.num_steps, handle_);
  meta.magic = abi::HandleMeta::kMagic;
  meta.communicator = context.communicator;
  context.ledger.check_room(call_.num_steps);
}

DispatchCall::DispatchCall(const HostContext& context, const OpenCall& sent, Handle handle)
    : context_(context), call_(sent), handle_(context.open(handle)), num_sent_(sent.num_steps) {
  check_unchanged(handle_, sent);
  in_flight_ = steps_of(context.ring, sent);
}

void DispatchCall::check(const DispatchRecv& recv) const {
  const abi::TokenParts sent = call_.parts, parts = recv_parts(context_.plan, recv);
  const abi::DType x_dtype =
      call_.variant.quantize ? abi::DType::kFloat8E4M3 : call_.variant.x_dtype;
  bool fits = recv.x_dtype == x_dtype && parts.num_parts == sent.num_parts &&
              recv.options.scale_format == call_.variant.scale_format;
  for (int i = 0; fits && i < parts.num_parts; ++i) fits = parts.bytes[i] == sent.bytes[i];
  MOE_P2P_CHECK(
      fits, Code::kInvalidArgument,
      "the outputs of this dispatch do not fit its inputs: payload type, scales and extras "
      "must be those that were sent");
  const abi::RowLayout layout = recv.options.rows().kernel, given = call_.variant.layout;
  MOE_P2P_CHECK(layout == given, Code::kInvalidArgument, "layout ",
                abi::facts_of(std::max(layout, given)).name,
                " goes with both halves of a dispatch, or with none");
  MOE_P2P_CHECK(recv.capacity >= 0 && recv.options.alignment >= 1, Code::kInvalidArgument,
                "capacity is ", recv.capacity, " and alignment ", recv.options.alignment,
                ", must be at least 0 and 1");
}

// The next step; only this call opens steps while it runs.
uint64_t DispatchCall::next_step() const {
  return num_sent_ == 0 ? context_.ledger.next_step()
                        : call_.first_step + static_cast<uint64_t>(num_sent_);
}

bool DispatchCall::advance_send() {
  while (num_sent_ < call_.num_steps && context_.ring.can_begin(next_step())) {
    const Step step = context_.ring.begin(next_step());
    if (num_sent_ == 0) {
      call_.first_step = call_.named_step = handle_.meta().first_step = step.index;
      context_.ledger.record(nullptr, call_, 0, true, true);
    }
    context_.kernels.dispatch_send(step, send_, call_.parts, routing_, handle_, num_sent_++);
    in_flight_.push_back(step);
  }
  handle_.meta().state = abi::kSent;
  return num_sent_ == call_.num_steps;
}

bool DispatchCall::advance_recv(const DispatchRecv& recv) {
  advance_send();
  const auto world_size = static_cast<size_t>(context_.plan.shape.world_size);
  const std::span ticks(recv.wait_ticks, recv.wait_ticks ? world_size : 0);
  const auto arrived = [&](Step step) {
    const bool all = context_.ring.arrived(step, Phase::kDispatch);
    waits_.look(context_.kernels, step, Phase::kDispatch, ticks);
    return all;
  };
  while (!in_flight_.empty() && arrived(in_flight_.front())) {
    const Step step = in_flight_.front();
    context_.kernels.dispatch_recv(step, recv, call_, handle_, num_received_++, placement_);
    in_flight_.pop_front();
    if (!call_.solo) continue;  // the caller will combine or release
    context_.ring.acknowledge(step);
    advance_send();
  }
  if (num_received_ < call_.num_steps) return false;
  handle_.meta().state = abi::kReceived;
  const OpenCall* sent =
      context_.ledger.find_named(call_.named_step, call_.handle, Stage::kDispatchSent);
  call_.stage = Stage::kDispatched;
  context_.ledger.record(sent, call_, 0, false, !call_.solo);
  return true;
}

Pending DispatchCall::pending() const {
  return in_flight_.empty() ? context_.ring.pending(next_step())
                            : Pending{in_flight_.front(), Phase::kDispatch};
}

// --- combine -------------------------------------------------------------------------------------

CombineCall::CombineCall(const HostContext& context, const CombineSend& send)
    : context_(context),
      send_(send),
      handle_(context.open(send.handle)),
      call_{.handle = send.handle.words,
            .num_steps = handle_.meta().num_chunks,
            .num_slots = handle_.meta().num_slots,
            .solo = true,
            .stage = Stage::kCombineSent,
            .num_rows = handle_.meta().num_rows,
            .y_rows = send.y_rows,
            .named_step = handle_.meta().first_step} {
  MOE_P2P_CHECK(handle_.meta().state != abi::kSent, Code::kInvalidArgument,
                "combine needs a dispatch that was received; call dispatch_recv first");
  check_partial(context.plan, near_form(send, send.row_scalars != nullptr));
  check_partial(context.plan, far_form(send, send.row_scalars != nullptr));
  handle_.check_contents(context.kernels.rank(), send.y_rows);
  MOE_P2P_CHECK(!send.topk_weights || send.num_rows == handle_.meta().num_rows,
                Code::kInvalidArgument, "topk_weights has ", send.num_rows,
                " rows, the dispatch had ", handle_.meta().num_rows);
  if (const OpenCall* dispatch = context.open_dispatch(handle_)) {
    check_unchanged(handle_, *dispatch);
    call_.solo = false;
    call_.first_step = dispatch->first_step;
    in_flight_ = steps_of(context.ring, call_);
    num_begun_ = 1;
  } else {
    context.ledger.check_room(call_.num_steps);
  }
}

CombineCall::CombineCall(const HostContext& context, const OpenCall& sent, Handle handle)
    : context_(context),
      handle_(context.open(handle)),
      call_(sent),
      recorded_(true),
      num_begun_(sent.num_steps),
      num_pushed_(sent.num_steps),
      num_sent_(sent.num_steps) {
  check_unchanged(handle_, sent);
  handle_.check_contents(context.kernels.rank(), sent.y_rows);
  in_flight_ = steps_of(context.ring, sent);
}

bool CombineCall::all_arrived(Step step, int64_t chunk) const {
  if (!MOE_P2P_MUTATED(kSkipEmptyPeer)) return context_.ring.arrived(step, Phase::kCombine);
  const int num_local = context_.plan.shape.ranks_per_node;
  for (int source = 0; source < context_.plan.shape.world_size; ++source) {
    const int own_first = context_.kernels.rank() / num_local * num_local;
    const bool own_node = source >= own_first && source < own_first + num_local;
    const int column = own_node ? source - own_first : num_local + source / num_local;
    bool used = false;
    for (int64_t t = chunk * context_.plan.shape.chunk_tokens; t < handle_.meta().num_tokens; ++t)
      used = used || handle_.send_slots(t)[column] >= 0;
    if (used && !context_.kernels.arrived(step, Phase::kCombine, source)) return false;
  }
  return true;
}

// Whether everything that the partial sums of `step` need has arrived.
bool CombineCall::may_sum(Step step) const {
  if (call_.solo) {
    if (!context_.ring.arrived(step, Phase::kDispatch)) return false;
    context_.kernels.recv_empty_dispatch(step);
  }
  if (send_.topk_weights && !MOE_P2P_MUTATED(kSumBeforeWeights)) {
    if (!context_.ring.arrived(step, Phase::kWeights)) return false;
    context_.kernels.recv_weights(step);
  }
  return true;
}

uint64_t CombineCall::next_step() const {
  return num_begun_ == 0 ? context_.ledger.next_step()
                         : call_.first_step + static_cast<uint64_t>(num_begun_);
}

// Called once its steps are open, or once it has taken over the step of its dispatch.
void CombineCall::record() {
  if (std::exchange(recorded_, true)) return;
  const OpenCall* dispatch = call_.solo ? nullptr : context_.open_dispatch(handle_);
  context_.ledger.record(dispatch, call_, 0, call_.solo, true);
}

bool CombineCall::advance_send() {
  while (num_begun_ < call_.num_steps && context_.ring.can_begin(next_step())) {
    const Step step = context_.ring.begin(next_step());
    if (num_begun_ == 0) call_.first_step = step.index;
    record();
    context_.kernels.send_empty_dispatch(step);
    in_flight_.push_back(step);
    ++num_begun_;
  }
  if (num_begun_ > 0) record();
  for (; send_.topk_weights && num_pushed_ < num_begun_; ++num_pushed_)
    context_.kernels.push_weights(in_flight_[static_cast<size_t>(num_pushed_ - num_received_)],
                                  send_, handle_, num_pushed_);
  while (num_sent_ < num_begun_) {
    const Step step = in_flight_[static_cast<size_t>(num_sent_ - num_received_)];
    if (!may_sum(step)) return false;
    context_.kernels.combine_send(step, send_, handle_, num_sent_++);
    context_.ring.handed_in(step);
  }
  handle_.meta().state = abi::kCombineSent;
  return num_sent_ == call_.num_steps;
}

bool CombineCall::advance_recv(const CombineRecv& recv) {
  advance_send();
  const auto world_size = static_cast<size_t>(context_.plan.shape.world_size);
  const std::span ticks(recv.wait_ticks, recv.wait_ticks ? world_size : 0);
  const auto has_arrived = [&](Step step) {
    const bool all = all_arrived(step, num_received_);
    waits_.look(context_.kernels, step, Phase::kCombine, ticks);
    return all;
  };
  while (num_received_ < num_sent_ && has_arrived(in_flight_.front())) {
    context_.kernels.combine_recv(in_flight_.front(), recv, handle_, num_received_++);
    context_.ring.close(in_flight_.front());
    in_flight_.pop_front();
    advance_send();
  }
  if (num_received_ < call_.num_steps) return false;
  handle_.meta().state = abi::kCombined;
  const OpenCall* sent =
      context_.ledger.find_named(call_.named_step, call_.handle, Stage::kCombineSent);
  context_.ledger.record(sent, call_, 0, false, false);
  return true;
}

Pending CombineCall::pending() const {
  if (in_flight_.empty()) return context_.ring.pending(next_step());
  if (num_sent_ > num_received_) return {in_flight_.front(), Phase::kCombine};
  const bool opened = !call_.solo || context_.ring.arrived(in_flight_.front(), Phase::kDispatch);
  return {in_flight_.front(), opened ? Phase::kWeights : Phase::kDispatch};
}

}  // namespace moe_p2p::moe
