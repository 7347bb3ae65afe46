#include "moe/calls.h"

#include "base/mutation.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;

// --- steps -------------------------------------------------------------------------------------

StepRing::StepRing(const Plan& plan, HostKernels& kernels)
    : plan_(plan), kernels_(kernels), slots_(static_cast<size_t>(plan.shape.steps_in_flight)) {}

Step StepRing::step_of(uint64_t index) const noexcept {
  return {index, static_cast<int>(index % slots_.size())};
}

bool StepRing::arrived(Step step, Phase phase) const {
  kernels_.look_at_masks();
  for (int source = 0; source < plan_.shape.world_size; ++source)
    if (!kernels_.arrived(step, phase, source)) return false;
  return true;
}

Pending StepRing::pending() const {
  return {step_of(slots_[next_ % slots_.size()].step), Phase::kCombine};
}

void StepRing::check_room(int64_t num_steps) const {
  for (uint64_t i = 0; i < slots_.size() && static_cast<int64_t>(i) < num_steps; ++i) {
    const Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (MOE_P2P_MUTATED(kReuseSlotEarly)) return;
    MOE_P2P_CHECK(slot.state == State::kClosed || slot.state == State::kAcknowledged,
                  Code::kInvalidArgument, "step ", slot.step, " is still open and this call needs ",
                  num_steps, " of steps_in_flight ", slots_.size(),
                  "; combine or release the earlier dispatch first");
  }
}

bool StepRing::can_begin() {
  Slot& slot = slots_[next_ % slots_.size()];
  if (slot.state == State::kClosed || MOE_P2P_MUTATED(kReuseSlotEarly)) return true;
  const Step step = step_of(slot.step);
  if (slot.state != State::kAcknowledged || !arrived(step, Phase::kCombine)) return false;
  kernels_.recv_empty_combine(step);
  slot.state = State::kClosed;
  return true;
}

Step StepRing::begin() {
  const Step step = step_of(next_++);
  slots_[static_cast<size_t>(step.slot)] = {State::kBusy, step.index, false};
  return step;
}

bool StepRing::is_open(uint64_t step) const noexcept {
  const Slot& slot = slots_[step % slots_.size()];
  return slot.state == State::kOpen && slot.step == step;
}

void StepRing::leave_open(Step step) noexcept {
  slots_[static_cast<size_t>(step.slot)].state = State::kOpen;
}

void StepRing::acknowledge(Step step) {
  kernels_.send_empty_combine(step);
  handed_in(step);
  slots_[static_cast<size_t>(step.slot)].state = State::kAcknowledged;
}

void StepRing::close(Step step) noexcept {
  slots_[static_cast<size_t>(step.slot)].state = State::kClosed;
}

std::vector<Step> StepRing::last_combines() const {
  std::vector<Step> steps;
  for (const Slot& slot : slots_)
    if (slot.handed_in) steps.push_back(step_of(slot.step));
  return steps;
}

// --- dispatch ------------------------------------------------------------------------------------

DispatchCall::DispatchCall(const Plan& plan, StepRing& ring, HostKernels& kernels,
                           uint32_t communicator, const DispatchSend& send)
    : plan_(plan),
      ring_(ring),
      kernels_(kernels),
      send_(send),
      num_chunks_(plan.num_chunks(send.max_tokens)),
      handle_(HandleView::create(plan.shape, send.handle, send.num_rows, num_chunks_,
                                 plan.num_slots(send.max_tokens))),
      parts_(send_parts(plan, send)) {
  MOE_P2P_CHECK(send.num_tokens >= 0 && send.num_tokens <= send.num_rows, Code::kInvalidArgument,
                "num_tokens is ", send.num_tokens, ", x has ", send.num_rows, " rows");
  MOE_P2P_CHECK(send.num_tokens <= send.max_tokens, Code::kInvalidArgument, "this rank sends ",
                send.num_tokens, " tokens, max_tokens of this call is ", send.max_tokens);
  abi::HandleMeta& meta = handle_.meta();
  meta = {};
  meta.num_chunks = static_cast<int32_t>(num_chunks_);
  meta.num_tokens = static_cast<int32_t>(send.num_tokens);
  meta.num_rows = static_cast<int32_t>(send.num_rows);
  meta.num_slots = static_cast<int32_t>(handle_.num_slots());
  routing_ = kernels_.route(send, num_chunks_, handle_);
  meta.magic = abi::HandleMeta::kMagic;
  meta.communicator = communicator;
  send_.options.solo = send.options.solo || num_chunks_ > 1;
  ring.check_room(num_chunks_);
}

void DispatchCall::check(const DispatchRecv& recv) const {
  const abi::DType sent = send_.options.quantize ? abi::DType::kFloat8E4M3 : send_.x_dtype;
  const abi::TokenParts parts = recv_parts(plan_, recv);
  bool fits = recv.x_dtype == sent && parts.num_parts == parts_.num_parts &&
              recv.options.scale_format == send_.options.scale_format;
  for (int i = 0; fits && i < parts.num_parts; ++i) fits = parts.bytes[i] == parts_.bytes[i];
  MOE_P2P_CHECK(
      fits, Code::kInvalidArgument,
      "the outputs of this dispatch do not fit its inputs: payload type, scales and extras "
      "must be those that were sent");
  MOE_P2P_CHECK(recv.options.by_rank() == send_.options.by_rank(), Code::kInvalidArgument,
                "layout by_rank goes with both halves of a dispatch, or with none");
  MOE_P2P_CHECK(recv.capacity >= 0 && recv.options.alignment >= 1, Code::kInvalidArgument,
                "capacity is ", recv.capacity, " and alignment ", recv.options.alignment,
                ", must be at least 0 and 1");
}

bool DispatchCall::advance_send() {
  while (num_sent_ < num_chunks_ && ring_.can_begin()) {
    const Step step = ring_.begin();
    if (num_sent_ == 0) handle_.meta().first_step = step.index;
    kernels_.dispatch_send(step, send_, parts_, routing_, handle_, num_sent_++);
    in_flight_.push_back(step);
  }
  handle_.meta().state = abi::kSent;
  return num_sent_ == num_chunks_;
}

bool DispatchCall::advance_recv(const DispatchRecv& recv) {
  advance_send();
  const std::span ticks(recv.wait_ticks,
                        recv.wait_ticks ? static_cast<size_t>(plan_.shape.world_size) : 0);
  const auto arrived = [&](Step step) {
    const bool all = ring_.arrived(step, Phase::kDispatch);
    waits_.look(kernels_, step, Phase::kDispatch, ticks);
    return all;
  };
  while (!in_flight_.empty() && arrived(in_flight_.front())) {
    const Step step = in_flight_.front();
    kernels_.dispatch_recv(step, recv, parts_, handle_, num_received_++, placement_);
    in_flight_.pop_front();
    if (send_.options.solo) {
      ring_.acknowledge(step);
      advance_send();
    } else {
      ring_.leave_open(step);
    }
  }
  if (num_received_ < num_chunks_) return false;
  if (handle_.meta().state == abi::kSent) handle_.meta().state = abi::kReceived;
  return true;
}

Pending DispatchCall::pending() const {
  return in_flight_.empty() ? ring_.pending() : Pending{in_flight_.front(), Phase::kDispatch};
}

// --- combine -------------------------------------------------------------------------------------

CombineCall::CombineCall(const Plan& plan, StepRing& ring, HostKernels& kernels,
                         uint32_t communicator, const CombineSend& send)
    : plan_(plan),
      ring_(ring),
      kernels_(kernels),
      send_(send),
      handle_(HandleView::open(plan.shape, communicator, send.handle)),
      num_chunks_(handle_.meta().num_chunks),
      paired_(ring.is_open(handle_.meta().first_step)) {
  MOE_P2P_CHECK(handle_.meta().state != abi::kSent, Code::kInvalidArgument,
                "combine needs a dispatch that was received; call dispatch_recv first");
  check_partial(plan, send.out_dtype, send.row_scalars != nullptr);
  handle_.check_contents(kernels.rank(), send.y_rows);
  MOE_P2P_CHECK(!send.topk_weights || send.num_rows == handle_.meta().num_rows,
                Code::kInvalidArgument, "topk_weights has ", send.num_rows,
                " rows, the dispatch had ", handle_.meta().num_rows);
  if (paired_) {
    in_flight_.push_back(ring.step_of(handle_.meta().first_step));
    num_begun_ = 1;
  } else {
    ring.check_room(num_chunks_);
  }
}

void CombineCall::check_handle(uint32_t communicator) const {
  const auto now = HandleView::open(plan_.shape, communicator, send_.handle);
  MOE_P2P_CHECK(now.meta().num_chunks == num_chunks_ && now.num_slots() == handle_.num_slots(),
                Code::kInvalidArgument, "handle has ", now.meta().num_chunks, " chunks of ",
                now.num_slots(), " slots, combine_send has found ", num_chunks_, " of ",
                handle_.num_slots(), "; it was overwritten since");
  now.check_contents(kernels_.rank(), send_.y_rows);
}

bool CombineCall::heard_from_all(Step step, int64_t chunk) const {
  if (!MOE_P2P_MUTATED(kSkipEmptyPeer)) return ring_.arrived(step, Phase::kCombine);
  const int num_local = plan_.shape.ranks_per_node;
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    const int own_first = kernels_.rank() / num_local * num_local;
    const bool own_node = source >= own_first && source < own_first + num_local;
    const int column = own_node ? source - own_first : num_local + source / num_local;
    bool used = false;
    for (int64_t t = chunk * plan_.shape.chunk_tokens; t < handle_.meta().num_tokens; ++t)
      used = used || handle_.send_slots(t)[column] >= 0;
    if (used && !kernels_.arrived(step, Phase::kCombine, source)) return false;
  }
  return true;
}

// Whether everything that the partial sums of `step` need is here.
bool CombineCall::may_sum(Step step) const {
  if (!paired_) {
    if (!ring_.arrived(step, Phase::kDispatch)) return false;
    kernels_.recv_empty_dispatch(step);
  }
  if (send_.topk_weights && !MOE_P2P_MUTATED(kSumBeforeWeights)) {
    if (!ring_.arrived(step, Phase::kWeights)) return false;
    kernels_.recv_weights(step);
  }
  return true;
}

bool CombineCall::advance_send() {
  while (num_begun_ < num_chunks_ && ring_.can_begin()) {
    const Step step = ring_.begin();
    kernels_.send_empty_dispatch(step);
    in_flight_.push_back(step);
    ++num_begun_;
  }
  for (; send_.topk_weights && num_pushed_ < num_begun_; ++num_pushed_)
    kernels_.push_weights(in_flight_[static_cast<size_t>(num_pushed_ - num_received_)], send_,
                          handle_, num_pushed_);
  while (num_sent_ < num_begun_) {
    const Step step = in_flight_[static_cast<size_t>(num_sent_ - num_received_)];
    if (!may_sum(step)) return false;
    kernels_.combine_send(step, send_, handle_, num_sent_++);
    ring_.handed_in(step);
  }
  handle_.meta().state = abi::kCombineSent;
  return num_sent_ == num_chunks_;
}

bool CombineCall::advance_recv(const CombineRecv& recv) {
  advance_send();
  const std::span ticks(recv.wait_ticks,
                        recv.wait_ticks ? static_cast<size_t>(plan_.shape.world_size) : 0);
  const auto heard = [&](Step step) {
    const bool all = heard_from_all(step, num_received_);
    waits_.look(kernels_, step, Phase::kCombine, ticks);
    return all;
  };
  while (num_received_ < num_sent_ && heard(in_flight_.front())) {
    kernels_.combine_recv(in_flight_.front(), recv, handle_, num_received_++);
    ring_.close(in_flight_.front());
    in_flight_.pop_front();
    advance_send();
  }
  if (num_received_ < num_chunks_) return false;
  handle_.meta().state = abi::kCombined;
  return true;
}

Pending CombineCall::pending() const {
  if (in_flight_.empty()) return ring_.pending();
  if (num_sent_ > num_received_) return {in_flight_.front(), Phase::kCombine};
  const bool opened = paired_ || ring_.arrived(in_flight_.front(), Phase::kDispatch);
  return {in_flight_.front(), opened ? Phase::kWeights : Phase::kDispatch};
}

}  // namespace moe_p2p::moe
