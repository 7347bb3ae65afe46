// A call as a state machine over steps: advance() does all that can be done now and never waits. The
// backend (host/backend.h) sleeps between advances; the protocol simulation interleaves them.
//
//   paired dispatch   one step:  send tokens, receive tokens                  (combine closes it)
//   solo dispatch     C steps:   send tokens, receive tokens, empty combine   as acknowledgement
//   paired combine    that step: send partial sums, receive sums
//   solo combine      C steps:   empty dispatch, send partial sums, receive sums
//   release           that step: empty combine
// A combine that is given weights pushes them with the beginning of each step, and sends partial sums
// once everybody's are here.
#pragma once

#include <deque>
#include <vector>

#include "moe/host/kernels.h"
#include "moe/host/wait_clock.h"

namespace moe_p2p::moe {

// Which steps are open. Step e may begin when step e - S has seen its combine arrive, which is the
// whole of flow control (docs/protocol.md, "Why no barrier is needed").
class StepRing {
 public:
  StepRing(const Plan& plan, HostKernels& kernels);

  // Throws Error{kInvalidArgument} when the next `num_steps` steps would come to wait for one that
  // the caller himself holds open.
  void check_room(int64_t num_steps) const;
  // Closes what can be closed without waiting. False: the next step must wait for pending().
  bool can_begin();
  Step begin();             // after can_begin()
  Pending pending() const;  // when can_begin() was false

  // The paired dispatch that opened `step` left it open.
  bool is_open(uint64_t step) const noexcept;
  void leave_open(Step step) noexcept;  // paired dispatch: the caller will combine or release
  void acknowledge(Step step);          // sends the empty combine; nobody waits for its answer yet
  void close(Step step) noexcept;       // its combine has arrived
  // From everybody; looks at the masks first.
  bool arrived(Step step, abi::Phase phase) const;
  Step step_of(uint64_t index) const noexcept;
  // This rank has handed in its part of the combine.
  void handed_in(Step step) noexcept { slots_[static_cast<size_t>(step.slot)].handed_in = true; }
  // Of each slot the last step, where it was: those that neighbours may still have to hand in.
  std::vector<Step> last_combines() const;

 private:
  enum class State : uint8_t { kClosed, kBusy, kOpen, kAcknowledged };
  struct Slot {
    State state = State::kClosed;
    uint64_t step = 0;
    bool handed_in = false;
  };
  const Plan& plan_;
  HostKernels& kernels_;
  std::vector<Slot> slots_;
  uint64_t next_ = 0;
};

class DispatchCall {
 public:
  // Checks the input and routes; nothing is sent yet.
  DispatchCall(const Plan& plan, StepRing& ring, HostKernels& kernels, uint32_t communicator,
               const DispatchSend& send);
  // Throws Error{kInvalidArgument} when `recv` does not fit what was sent.
  void check(const DispatchRecv& recv) const;
  // True once everything that the send half may send has been sent.
  bool advance_send();
  // True once all is received; sends what still waits for a slot. `recv` is the same at every call.
  bool advance_recv(const DispatchRecv& recv);
  Pending pending() const;
  const abi::HandleMeta& meta() const noexcept { return handle_.meta(); }
  int64_t num_chunks() const noexcept { return num_chunks_; }

 private:
  const Plan& plan_;
  StepRing& ring_;
  HostKernels& kernels_;
  DispatchSend send_;
  int64_t num_chunks_;
  HandleView handle_;
  abi::TokenParts parts_;
  Routing routing_;
  Placement placement_;
  std::deque<Step> in_flight_;
  WaitClock waits_;
  int64_t num_sent_ = 0, num_received_ = 0;
};

class CombineCall {
 public:
  CombineCall(const Plan& plan, StepRing& ring, HostKernels& kernels, uint32_t communicator,
              const CombineSend& send);
  // Throws Error{kInvalidArgument} when the handle was overwritten since the call was made.
  void check_handle(uint32_t communicator) const;
  bool advance_send();                         // true once all partial sums are handed in
  bool advance_recv(const CombineRecv& recv);  // true once all sums are here; sends the rest
  Pending pending() const;
  const abi::HandleMeta& meta() const noexcept { return handle_.meta(); }
  int64_t num_chunks() const noexcept { return num_chunks_; }

 private:
  bool may_sum(Step step) const;
  bool heard_from_all(Step step, int64_t chunk) const;

  const Plan& plan_;
  StepRing& ring_;
  HostKernels& kernels_;
  CombineSend send_;
  HandleView handle_;
  int64_t num_chunks_;
  bool paired_;
  std::deque<Step> in_flight_;
  WaitClock waits_;
  int64_t num_begun_ = 0, num_pushed_ = 0, num_sent_ = 0, num_received_ = 0;
};

}  // namespace moe_p2p::moe
