// A call as a state machine over steps: advance() does all that can be done now and never waits.
// The backend (host/backend.h) sleeps between advances; the protocol simulation interleaves them.
//
//   paired dispatch   one step:  send tokens, receive tokens                  (combine closes it)
//   solo dispatch     C steps:   send tokens, receive tokens, empty combine   as acknowledgement
//   paired combine    that step: send partial sums, receive sums
//   solo combine      C steps:   empty dispatch, send partial sums, receive sums
//   release           that step: empty combine
// A combine with given weights pushes them at the beginning of each step, and sends partial sums
// once the weights of all ranks have arrived.
#pragma once

#include <deque>
#include <vector>

#include "moe/counters.h"
#include "moe/host/kernels.h"
#include "moe/host/wait_clock.h"
#include "moe/ledger.h"

namespace moe_p2p::moe {

// When steps may begin: step e begins once the combine of step e - S has arrived, which is the
// whole of flow control (docs/protocol.md, "Why no barrier is needed"). The ledger knows which
// steps the caller holds open.
class StepRing {
 public:
  StepRing(const Plan& plan, HostKernels& kernels, Counters& counters);

  // Closes what can be closed without waiting. False: step `index` must wait for pending(index).
  bool can_begin(uint64_t index);
  Step begin(uint64_t index);             // after can_begin()
  Pending pending(uint64_t index) const;  // when can_begin() was false

  void acknowledge(Step step);     // sends the empty combine; nobody waits for its answer yet
  void close(Step step) noexcept;  // its combine has arrived
  void begin_round(uint64_t round);
  // True when every rank has arrived; looks at the masks first.
  bool arrived(Step step, abi::Phase phase) const;
  Step step_of(uint64_t index) const noexcept;
  // This rank has handed in its part of the combine.
  void handed_in(Step step) noexcept { slots_[static_cast<size_t>(step.slot)].handed_in = true; }
  // The last combine of each slot, if any: neighbours may still have to hand in their parts.
  std::vector<Step> last_combines() const;

 private:
  // kCleaned: of the steps that no call has, at the beginning of a round.
  enum class State : uint8_t { kClosed, kBusy, kAcknowledged, kCleaned };
  struct Slot {
    State state = State::kClosed;
    uint64_t step = 0;
    bool handed_in = false;
  };
  const Plan& plan_;
  HostKernels& kernels_;
  Counters& counters_;
  std::vector<Slot> slots_;
};

// What the calls of one rank share.
struct HostContext {
  const Plan& plan;
  const uint32_t communicator;
  HostKernels& kernels;
  StepRing& ring;
  Ledger& ledger;

  HandleView open(Handle handle) const {
    return HandleView::open(plan.shape, communicator, handle);
  }
  // Returns the dispatch whose rows are in this handle, while its step is open.
  const OpenCall* open_dispatch(const HandleView& handle) const {
    return ledger.find_named(handle.meta().first_step, nullptr, OpenCall::Stage::kDispatched);
  }
};

class DispatchCall {
 public:
  // Checks the input and routes; nothing is sent yet.
  DispatchCall(const HostContext& context, const DispatchSend& send);
  // Makes its second half: `handle` is the first half's, or a copy.
  DispatchCall(const HostContext& context, const OpenCall& sent, Handle handle);
  // Throws Error{kInvalidArgument} when `recv` does not fit what was sent.
  void check(const DispatchRecv& recv) const;
  // True once everything that the send half may send has been sent.
  bool advance_send();
  // True once all is received; sends what still waits for a slot. Takes the same `recv` every time.
  bool advance_recv(const DispatchRecv& recv);
  Pending pending() const;
  const abi::HandleMeta& meta() const noexcept { return handle_.meta(); }

 private:
  uint64_t next_step() const;

  const HostContext& context_;
  DispatchSend send_{};  // of the first half
  OpenCall call_;
  HandleView handle_;
  Routing routing_;
  Placement placement_;
  std::deque<Step> in_flight_;
  WaitClock waits_;
  int64_t num_sent_ = 0, num_received_ = 0;
};

class CombineCall {
 public:
  CombineCall(const HostContext& context, const CombineSend& send);
  // Makes its second half. Throws Error{kInvalidArgument} when the handle was overwritten since the
  // first.
  CombineCall(const HostContext& context, const OpenCall& sent, Handle handle);
  bool advance_send();                         // true once all partial sums are handed in
  bool advance_recv(const CombineRecv& recv);  // true once all sums are here; sends the rest
  Pending pending() const;
  const abi::HandleMeta& meta() const noexcept { return handle_.meta(); }
  int64_t num_chunks() const noexcept { return call_.num_steps; }

 private:
  bool may_sum(Step step) const;
  bool all_arrived(Step step, int64_t chunk) const;
  uint64_t next_step() const;
  void record();

  const HostContext& context_;
  CombineSend send_{};  // of the first half
  HandleView handle_;
  OpenCall call_;          // not solo: its step is its dispatch's
  bool recorded_ = false;  // in the ledger
  std::deque<Step> in_flight_;
  WaitClock waits_;
  int64_t num_begun_ = 0, num_pushed_ = 0, num_sent_ = 0, num_received_ = 0;
};

}  // namespace moe_p2p::moe
