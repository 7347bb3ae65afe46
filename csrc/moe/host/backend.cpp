#include "moe/host/backend.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using base::Error;

namespace {

// The halves hold no inputs between them, so all chunks must fit the slots at once.
void check_halves(const Plan& plan, int64_t num_chunks) {
  MOE_P2P_CHECK(num_chunks <= plan.shape.steps_in_flight, Code::kInvalidArgument, "this call has ",
                num_chunks, " chunks, send and receive halves take at most steps_in_flight = ",
                plan.shape.steps_in_flight, "; use the whole call or raise chunk_tokens");
}

template <typename Call>
typename std::list<Call>::iterator find_call(std::list<Call>& calls, Handle handle,
                                             const char* what) {
  for (auto call = calls.begin(); call != calls.end(); ++call)
    if (&call->meta() == reinterpret_cast<const abi::HandleMeta*>(handle.words)) return call;
  throw Error(Code::kInvalidArgument,
              base::concat(what, "_recv: this handle has no ", what,
                           "_send waiting; each send half is received once"));
}

// Sums are written by the tokens of the dispatch, whatever `out` is.
void check_out(const CombineRecv& recv, const abi::HandleMeta& meta) {
  MOE_P2P_CHECK(recv.num_rows == meta.num_rows, Code::kInvalidArgument, "out has ", recv.num_rows,
                " rows, the dispatch had ", meta.num_rows);
}

}  // namespace

HostBackend::HostBackend(const Plan& plan, const AllToAllOptions& options, NodeMemory& memory,
                         const Masks& masks, Waits& waits)
    : plan_(plan),
      communicator_(options.communicator),
      memory_(memory),
      waits_(waits),
      kernels_(plan, memory, options.num_threads, masks),
      ring_(plan, kernels_) {}

std::optional<provider::MemorySpan> HostBackend::regions() const {
  return provider::MemorySpan{.data = memory_.data().data(), .bytes = memory_.data().size()};
}

// --- waiting -------------------------------------------------------------------------------------

template <typename Advance, typename GetPending>
void HostBackend::run(Advance&& advance, GetPending&& get_pending) {
  waits_.latching([&] {
    bool done = advance();
    while (!done) {
      const Pending pending = get_pending();
      const auto moved = [&] {
        done = advance();
        return done || get_pending().step.index != pending.step.index ||
               get_pending().phase != pending.phase;
      };
      const Waits::Arrived arrived = [this, &pending](int source) {
        return kernels_.arrived(pending.step, pending.phase, source);
      };
      waits_.wait(std::ref(moved), arrived, [&] { return waits_.waiting_for(pending, arrived); });
    }
  });
}

void HostBackend::check(const Pending& pending) const {
  const Waits::Arrived arrived = [this, &pending](int source) {
    return kernels_.arrived(pending.step, pending.phase, source);
  };
  const auto text = [&] { return waits_.waiting_for(pending, arrived); };
  waits_.check_abort([&] { return "; " + text(); });
  waits_.check_neighbours(arrived, text);
}

// The last of the node to hand in rings. A neighbour that is gone, or was stopped, without having done
// so never does.
std::vector<Step> HostBackend::last_steps() const {
  const bool aborted = waits_.aborted();
  std::vector<Step> steps = ring_.last_combines();
  std::erase_if(steps, [&](Step step) {
    for (int l = 0; l < memory_.num_local(); ++l) {
      const bool stays = l == memory_.local() || (!aborted && waits_.gone(l).empty());
      const int rank = memory_.node() * memory_.num_local() + l;
      if (!stays && !kernels_.arrived(step, Phase::kCombine, rank)) return true;
    }
    return false;
  });
  return steps;
}

// --- calls ---------------------------------------------------------------------------------------

void HostBackend::dispatch(const DispatchSend* send, const DispatchRecv* recv) {
  if (!recv) return send_dispatch(*send);
  if (!send) return recv_dispatch(*recv);
  DispatchCall call(plan_, ring_, kernels_, communicator_, *send);
  call.check(*recv);
  run([&] { return call.advance_recv(*recv); }, [&] { return call.pending(); });
}

void HostBackend::send_dispatch(const DispatchSend& send) {
  check_halves(plan_, plan_.num_chunks(send.max_tokens));
  DispatchCall& call = dispatches_.emplace_back(plan_, ring_, kernels_, communicator_, send);
  run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void HostBackend::recv_dispatch(const DispatchRecv& recv) {
  const auto call = find_call(dispatches_, recv.handle, "dispatch");
  call->check(recv);
  run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  dispatches_.erase(call);
}

void HostBackend::combine(const CombineSend* send, const CombineRecv* recv) {
  if (!recv) return send_combine(*send);
  if (!send) return recv_combine(*recv);
  CombineCall call(plan_, ring_, kernels_, communicator_, *send);
  check_out(*recv, call.meta());
  run([&] { return call.advance_recv(*recv); }, [&] { return call.pending(); });
}

void HostBackend::send_combine(const CombineSend& send) {
  CombineCall& call = combines_.emplace_back(plan_, ring_, kernels_, communicator_, send);
  try {
    check_halves(plan_, call.num_chunks());
  } catch (...) {
    combines_.pop_back();
    throw;
  }
  run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void HostBackend::recv_combine(const CombineRecv& recv) {
  const auto call = find_call(combines_, recv.handle, "combine");
  call->check_handle(communicator_);
  check_out(recv, call->meta());
  run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  combines_.erase(call);
}

void HostBackend::release(Handle handle, const platform::Stream&) {
  const HandleView view = HandleView::open(plan_.shape, communicator_, handle);
  const uint64_t first = view.meta().first_step;
  if (view.meta().state == abi::kSent) {  // sent, not received: what comes is dropped
    const auto call = find_call(dispatches_, handle, "dispatch");
    for (int64_t chunk = 0; chunk < call->num_chunks(); ++chunk) {
      const Step step = ring_.step_of(first + static_cast<uint64_t>(chunk));
      run([&] { return ring_.arrived(step, Phase::kDispatch); },
          [&] { return Pending{step, Phase::kDispatch}; });
      ring_.acknowledge(step);
    }
    dispatches_.erase(call);
  } else if (ring_.is_open(first)) {
    ring_.acknowledge(ring_.step_of(first));
  } else {
    return;  // a solo dispatch, or combined already
  }
  view.meta().state = abi::kReleased;
}

}  // namespace moe_p2p::moe
