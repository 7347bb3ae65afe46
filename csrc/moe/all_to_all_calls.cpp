// The calls of an AllToAll, and the stories of what went wrong in them.
#include <algorithm>
#include <utility>

#include "moe/all_to_all_state.h"
#include "platform/interrupt.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using base::Error;

// --- failures ------------------------------------------------------------------------------------

void AllToAll::State::require_usable() const {
  MOE_P2P_CHECK(!closed, Code::kClosed, "rank ", options.rank, ": the communicator is closed");
  if (story) throw *story;
  MOE_P2P_CHECK(exchange, Code::kInvalidArgument, "rank ", options.rank,
                ": connect() has not been called");
  MOE_P2P_CHECK(has_signals || !options.device, Code::kInvalidArgument, "rank ", options.rank,
                ": use_signals() has not been called");
}

void AllToAll::State::fail(Code code, const std::string& message) const {
  throw Error(code, base::concat("rank ", options.rank, ": ", message));
}
void AllToAll::State::latch(const Error& error) {
  story = error;
  for (int l = 0; l < memory.num_local(); ++l) {
    if (masks.enabled() && l != memory.local()) continue;  // they mask this rank: see gone()
    uint64_t none = 0;
    // release: pairs with the acquire in check_abort() of the neighbours.
    std::atomic_ref(memory.head(l).abort)
        .compare_exchange_strong(none, 1 + static_cast<uint64_t>(options.rank),
                                 std::memory_order_release, std::memory_order_relaxed);
    platform::notify_all(memory.bell(l));
  }
}

std::string AllToAll::State::failure_text(const Exchange::Failure& failure) const {
  const int rank = rank_of(failure.node, memory.local());
  const std::string name = base::concat("rank ", rank, " (node ", failure.node, ")");
  const std::string step = base::concat(phase_name(failure.phase), " of step ", failure.step);
  switch (failure.kind) {
    case Exchange::Failure::Kind::kLeft: return base::concat(silent(rank), " without ", step);
    case Exchange::Failure::Kind::kProbe:
      return base::concat(name, " is gone, without ", step,
                          ": a probe failed: ", base::describe(failure.status),
                          engine.first_failure());
    case Exchange::Failure::Kind::kFlush: return engine.gpu_flush_failure();
    case Exchange::Failure::Kind::kWrite: break;
  }
  return base::concat("the write of ", step, " to ", name,
                      " failed: ", base::describe(failure.status), engine.first_failure());
}

template <typename Story>
void AllToAll::State::check_abort(Story&& waiting_for) const {
  const uint64_t word =
      std::atomic_ref(memory.head(memory.local()).abort).load(std::memory_order_acquire);
  if (word == 0) return;
  const auto failure = exchange->failure();
  if (failure.node >= 0)
    fail(failure.status.code, base::concat(failure_text(failure), waiting_for()));
  fail(Code::kAborted,
       base::concat("rank ", word - 1, " of this node gave up; see its error", waiting_for()));
}

std::string AllToAll::State::gone(int local) const {
  const auto rank = rank_of(memory.node(), local);
  if (std::atomic_ref(memory.head(local).closed).load(std::memory_order_acquire) != 0)
    return base::concat("rank ", rank, " has closed its communicator");
  if (masks.enabled() &&
      std::atomic_ref(memory.head(local).abort).load(std::memory_order_acquire) != 0)
    return base::concat("rank ", rank, " gave up; see its error");
  return memory.alive(local) ? "" : base::concat("rank ", rank, "'s process has ended");
}

std::string AllToAll::State::silent(int source) const {
  const int node = source / plan.shape.ranks_per_node;
  const int local = source % plan.shape.ranks_per_node;
  // acquire: pairs with Exchange::publish_left().
  const auto left = node == memory.node()
                        ? Left::kNo
                        : Left{memory.left(local, node).load(std::memory_order_acquire)};
  if (left == Left::kNo) return gone(local);
  return base::concat("rank ", source, " (node ", node, ") ",
                      left == Left::kInOrder
                          ? "has closed its communicator"
                          : "gave up and closed its communicator; see its error");
}

template <typename Arrived, typename Story>
void AllToAll::State::check_neighbours(Arrived&& arrived, Story&& waiting_for) const {
  for (int source = 0; source < plan.shape.world_size; ++source) {
    if (arrived(source)) continue;
    const std::string why = silent(source);
    if (why.empty()) continue;
    if (arrived(source)) continue;  // it came before the end
    if (!masks.enabled()) fail(Code::kPeerDead, base::concat(why, "; ", waiting_for()));
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", options.rank, ": rank ", source,
                " is masked: ", why);
    masks.add(source);
  }
}

// T (2 - 1/n) for n ranks that are missing, masked or not. A rank that dies may have said the same
// thing to some and not to others; those wait for it, and the rest soon wait for them and for it, or
// have masked it already. So whoever misses fewer masks first, and is heard in time by the others.
template <typename Arrived>
std::chrono::milliseconds AllToAll::State::patience(Arrived&& arrived) const {
  int missing = 0;
  for (int source = 0; source < plan.shape.world_size; ++source)
    missing += !arrived(source) || masks.has(source);
  return options.timeout + options.timeout * (std::max(missing, 1) - 1) / std::max(missing, 1);
}

template <typename Arrived>
void AllToAll::State::probe(Arrived&& arrived) const {
  for (int node = 0; node < plan.shape.num_nodes(); ++node)
    if (node != memory.node() && !arrived(rank_of(node, memory.local()))) exchange->probe(node);
}

template <typename Arrived, typename Story>
bool AllToAll::State::mask_missing(Arrived&& arrived, Story&& waiting_for) const {
  if (!masks.enabled() || !arrived(options.rank)) return false;
  bool masked = false;
  MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", options.rank, ": masks ranks after ",
              options.timeout.count(), " ms: ", waiting_for());
  for (int source = 0; source < plan.shape.world_size; ++source) {
    if (arrived(source)) continue;
    masks.add(source);
    masked = true;
  }
  return masked;
}

template <typename Arrived, typename Progress>
std::string AllToAll::State::missing(Arrived&& arrived, Progress&& progress) const {
  std::string text;
  for (int source = 0; source < plan.shape.world_size; ++source) {
    if (arrived(source)) continue;
    const int node = source / plan.shape.ranks_per_node;
    text += base::concat(" rank ", source, " (node ", node);
    if (node != memory.node() && source % plan.shape.ranks_per_node == memory.local())
      text += base::concat(", ", progress(node));
    text += ")";
  }
  return text;
}

std::string AllToAll::State::waiting_for(const Pending& pending) const {
  const auto arrived = [&](int source) {
    return kernels.arrived(pending.step, pending.phase, source);
  };
  const auto progress = [&](int node) {
    return base::concat(exchange->immediates(pending.phase, pending.step.slot, node),
                        " immediates came");
  };
  return base::concat(phase_name(pending.phase), " of step ", pending.step.index, " waits for",
                      missing(arrived, progress));
}

void AllToAll::State::check_device() const {
  const abi::Fault* fault = device->fault();
  if (fault == nullptr || fault->raised == abi::kAborted) check_abort([] { return ""; });
  if (fault == nullptr) return;
  if (fault->raised != abi::kTimedOut) throw device->error_of(*fault, "", "");
  const int node = fault->source / plan.shape.ranks_per_node;  // of whom it waited for
  const int local = fault->source % plan.shape.ranks_per_node;
  std::string progress;  // other local ranks of that node send to other gateways here
  if (node != memory.node() && local == memory.local())
    progress = base::concat(
        ", ",
        exchange->immediates(
            static_cast<Phase>(fault->phase),
            static_cast<int>(fault->step % static_cast<uint64_t>(plan.shape.steps_in_flight)),
            node),
        " immediates came");
  throw device->error_of(*fault, gone(local), progress);
}

void AllToAll::State::check_device_once() {
  try {
    check_device();
  } catch (const Error& error) {
    latch(error);
    throw;
  }
}

std::string AllToAll::broken() const {
  if (state_->story) return state_->story->what();
  try {
    if (state_->device) state_->check_device();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void AllToAll::check() {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.check_device_once();
  s.latching([&] { s.check_abort([] { return ""; }); });
}

// --- running -------------------------------------------------------------------------------------

template <typename Call>
void AllToAll::State::latching(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.code() != Code::kInvalidArgument) latch(error);
    throw;
  }
}

template <typename Ready, typename Arrived, typename Story>
void AllToAll::State::wait(Ready&& ready, Arrived&& arrived, Story&& waiting_for) {
  auto began = platform::Clock::now();
  auto deadline = began + options.timeout;
  while (!wait_until(deadline, ready, arrived, waiting_for)) {
    if (masks.enabled() && began + patience(arrived) > deadline) {
      deadline = began + patience(arrived);
    } else if (mask_missing(arrived, waiting_for)) {
      began = platform::Clock::now();
      deadline = began + options.timeout;
    } else {
      fail(Code::kTimeout,
           base::concat("timed out after ", options.timeout.count(), " ms: ", waiting_for()));
    }
  }
}

template <typename Ready, typename Arrived, typename Story>
bool AllToAll::State::wait_until(platform::Deadline deadline, Ready&& ready, Arrived&& arrived,
                                 Story&& waiting_for) {
  platform::Waiter waiter(memory.bell(memory.local()), options.wait, deadline);
  auto next_look = platform::Clock::now() + kLookAtNeighbours;
  auto next_probe = platform::Clock::now() + Exchange::kProbeInterval;
  for (;;) {
    waiter.prepare();
    if (ready()) return true;
    check_abort([&] { return "; " + waiting_for(); });
    const auto now = platform::Clock::now();
    if (now >= next_look) {
      check_neighbours(arrived, waiting_for);
      if (platform::interrupted())
        fail(Code::kAborted, base::concat("interrupted by a signal; ", waiting_for()));
      next_look = now + kLookAtNeighbours;
    }
    if (now >= next_probe) {
      probe(arrived);
      next_probe = now + Exchange::kProbeInterval;
    }
    if (!waiter.pause()) return false;
  }
}

void AllToAll::check(const Pending& pending) const {
  const State& s = *state_;
  const auto story = [&] { return s.waiting_for(pending); };
  s.check_abort([&] { return "; " + story(); });
  s.check_neighbours(
      [&](int source) { return s.kernels.arrived(pending.step, pending.phase, source); }, story);
}

template <typename Advance, typename GetPending>
void AllToAll::State::run(Advance&& advance, GetPending&& get_pending) {
  latching([&] {
    bool done = advance();
    while (!done) {
      const Pending pending = get_pending();
      const auto moved = [&] {
        done = advance();
        return done || get_pending().step.index != pending.step.index ||
               get_pending().phase != pending.phase;
      };
      wait(
          moved, [&](int source) { return kernels.arrived(pending.step, pending.phase, source); },
          [&] { return this->waiting_for(pending); });
    }
  });
}

template <typename Call>
void AllToAll::State::launch(Call&& call) {
  check_device_once();
  try {
    call();
  } catch (const Error& error) {
    if (error.code() == Code::kTransport) latch(error);  // anything else is the caller's
    throw;
  }
}

// --- calls ---------------------------------------------------------------------------------------

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

void AllToAll::dispatch(const DispatchSend& send, const DispatchRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->dispatch(&send, &recv, send.stream); });
  DispatchCall call(s.plan, s.ring, s.kernels, s.options.communicator, send);
  call.check(recv);
  s.run([&] { return call.advance_recv(recv); }, [&] { return call.pending(); });
}

void AllToAll::dispatch_send(const DispatchSend& send) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->dispatch(&send, nullptr, send.stream); });
  check_halves(s.plan, s.plan.num_chunks(send.max_tokens));
  s.dispatches.emplace_back(s.plan, s.ring, s.kernels, s.options.communicator, send);
  DispatchCall& call = s.dispatches.back();
  s.run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void AllToAll::dispatch_recv(const DispatchRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->dispatch(nullptr, &recv, recv.stream); });
  const auto call = find_call(s.dispatches, recv.handle, "dispatch");
  call->check(recv);
  s.run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  s.dispatches.erase(call);
}

void AllToAll::combine(const CombineSend& send, const CombineRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->combine(&send, &recv, send.stream); });
  CombineCall call(s.plan, s.ring, s.kernels, s.options.communicator, send);
  check_out(recv, call.meta());
  s.run([&] { return call.advance_recv(recv); }, [&] { return call.pending(); });
}

void AllToAll::combine_send(const CombineSend& send) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->combine(&send, nullptr, send.stream); });
  s.combines.emplace_back(s.plan, s.ring, s.kernels, s.options.communicator, send);
  CombineCall& call = s.combines.back();
  try {
    check_halves(s.plan, call.num_chunks());
  } catch (...) {
    s.combines.pop_back();
    throw;
  }
  s.run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void AllToAll::combine_recv(const CombineRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->combine(nullptr, &recv, recv.stream); });
  const auto call = find_call(s.combines, recv.handle, "combine");
  call->check_handle(s.options.communicator);
  check_out(recv, call->meta());
  s.run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  s.combines.erase(call);
}

void AllToAll::gather_counts(std::span<const int32_t> values, std::span<int32_t> gathered) {
  State& s = *state_;
  s.require_usable();
  MOE_P2P_CHECK(!s.masks.enabled(), Code::kInvalidArgument,
                "gather_counts is for all ranks, and this communicator goes on without those that "
                "are masked; use one without masks");
  if (s.device) s.check_device_once();
  s.latching([&] {
    s.gather.send(values);
    const auto arrived = [&s](int source) { return s.gather.arrived(source); };
    const auto story = [&] {
      const auto progress = [&s](int node) { return s.gather.progress(node); };
      return base::concat(s.gather.call(), " waits for", s.missing(arrived, progress));
    };
    const auto deadline = [&s] { return platform::Clock::now() + s.options.timeout; };
    s.wait([&] { return s.gather.complete(deadline()); }, arrived, story);
    s.gather.read(gathered, deadline());
  });
}

void AllToAll::release(Handle handle, const platform::Stream& stream) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.launch([&] { s.device->release(handle, stream); });
  const HandleView view = HandleView::open(s.plan.shape, s.options.communicator, handle);
  const uint64_t first = view.meta().first_step;
  if (view.meta().state == abi::kSent) {  // sent, not received: what comes is dropped
    const auto call = find_call(s.dispatches, handle, "dispatch");
    for (int64_t chunk = 0; chunk < call->num_chunks(); ++chunk) {
      const Step step = s.ring.step_of(first + static_cast<uint64_t>(chunk));
      s.run([&] { return s.ring.arrived(step, Phase::kDispatch); },
            [&] { return Pending{step, Phase::kDispatch}; });
      s.ring.acknowledge(step);
    }
    s.dispatches.erase(call);
  } else if (s.ring.is_open(first)) {
    s.ring.acknowledge(s.ring.step_of(first));
  } else {
    return;  // a solo dispatch, or combined already
  }
  view.meta().state = abi::kReleased;
}

}  // namespace moe_p2p::moe
