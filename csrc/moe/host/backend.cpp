#include "moe/host/backend.h"

#include <atomic>
#include <set>

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using Stage = OpenCall::Stage;

namespace {

// Inputs are not kept between the halves, so all chunks must fit the slots at once.
void check_halves(const Plan& plan, int64_t num_chunks) {
  MOE_P2P_CHECK(num_chunks <= plan.shape.steps_in_flight, Code::kInvalidArgument, "this call has ",
                num_chunks, " chunks, send and receive halves take at most steps_in_flight = ",
                plan.shape.steps_in_flight, "; use the whole call or raise chunk_tokens");
}

// Combine writes sums for the tokens of the dispatch, whatever the size of `out`.
void check_out(const CombineRecv& recv, const abi::HandleMeta& meta) {
  MOE_P2P_CHECK(recv.num_rows == meta.num_rows, Code::kInvalidArgument, "out has ", recv.num_rows,
                " rows, must have ", meta.num_rows, ", as the dispatched x");
}

}  // namespace

HostBackend::HostBackend(const Plan& plan, const AllToAllOptions& options, NodeMemory& memory,
                         const Masks& masks, Waits& waits)
    : plan_(plan),
      memory_(memory),
      waits_(waits),
      in_order_(options.arrival_flags == ArrivalFlags::kWrite),
      kernels_(plan, memory, options.num_threads, masks),
      ring_(plan, kernels_, waits.counters()),
      ledger_(plan.shape.steps_in_flight),
      context_{plan, options.communicator, kernels_, ring_, ledger_} {
  if (options.poison) kernels_.poison();
}

std::optional<provider::MemorySpan> HostBackend::regions() const {
  return provider::MemorySpan{
      .data = memory_.data().data(), .bytes = memory_.data().size(), .in_order = in_order_};
}

std::optional<provider::MemorySpan> HostBackend::mapped_regions(int node) const {
  const auto data = memory_.far_data(node);
  if (data.empty()) return std::nullopt;
  return provider::MemorySpan{.data = data.data(), .bytes = data.size()};
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

// The last rank of the node to hand in rings the doorbell. A neighbour that is gone or was stopped
// before it handed in never does.
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

const OpenCall& HostBackend::sent(Handle handle, Stage stage, const char* what) const {
  const uint64_t step = context_.open(handle).meta().first_step;
  const OpenCall* call = ledger_.find_named(step, handle.words, stage);
  MOE_P2P_CHECK(call, Code::kInvalidArgument, what, "_recv: this handle has no ", what,
                "_send waiting; each send half is received once");
  return *call;
}

void HostBackend::dispatch(const DispatchSend* send, const DispatchRecv* recv) {
  if (send) make_room(plan_.num_chunks(send->max_tokens));
  if (!recv) return send_dispatch(*send);
  DispatchCall call =
      send ? DispatchCall(context_, *send)
           : DispatchCall(context_, sent(recv->handle, Stage::kDispatchSent, "dispatch"),
                          recv->handle);
  call.check(*recv);
  run([&] { return call.advance_recv(*recv); }, [&] { return call.pending(); });
}

void HostBackend::send_dispatch(const DispatchSend& send) {
  check_halves(plan_, plan_.num_chunks(send.max_tokens));
  DispatchCall call(context_, send);
  run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void HostBackend::combine(const CombineSend* send, const CombineRecv* recv) {
  if (send && ledger_.releases()) {
    const HandleView handle = context_.open(send->handle);
    if (!context_.open_dispatch(handle)) make_room(handle.meta().num_chunks);
  }
  if (!recv) return send_combine(*send);
  CombineCall call =
      send
          ? CombineCall(context_, *send)
          : CombineCall(context_, sent(recv->handle, Stage::kCombineSent, "combine"), recv->handle);
  check_out(*recv, call.meta());
  run([&] { return call.advance_recv(*recv); }, [&] { return call.pending(); });
}

void HostBackend::send_combine(const CombineSend& send) {
  CombineCall call(context_, send);
  check_halves(plan_, call.num_chunks());
  if (send.ready.counters) wait_ready(send);
  run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

// Until the rows that this rank sums are written.
void HostBackend::wait_ready(const CombineSend& send) {
  const HandleView handle = context_.open(send.handle);
  abi::RowCounters place{};
  place.rows = send.ready.rows;
  place.per_expert = send.ready.per_expert;
  place.capacity = static_cast<int32_t>(send.capacity);
  std::set<int32_t> awaited;
  for (int32_t chunk = 0; chunk < handle.meta().num_chunks; ++chunk)
    for (int source = 0; source < plan_.shape.world_size; ++source)
      for (int32_t slot = 0; slot < handle.slot_count(chunk, source); ++slot)
        for (int k = 0; k < plan_.shape.topk; ++k)
          if (const int32_t row = handle.slot_rows(chunk, source, slot)[k]; row >= 0)
            awaited.insert(place.counter_of(row));
  const uint32_t want = send.ready.want + (send.ready.base ? *send.ready.base : 0);
  const auto value = [&](int32_t counter) {
    // acquire: pairs with the release of who wrote the rows.
    return std::atomic_ref(const_cast<uint32_t&>(send.ready.counters[counter]))
        .load(std::memory_order_acquire);
  };
  const auto up = [&] {
    std::erase_if(
        awaited, [&](int32_t counter) { return static_cast<int32_t>(value(counter) - want) >= 0; });
    return awaited.empty();
  };
  waits_.latching([&] {
    waits_.wait_for_caller(up, [&] { return unready(*awaited.begin(), value(*awaited.begin())); });
  });
}

void HostBackend::release(Handle handle, const platform::Stream&) {
  const HandleView view = context_.open(handle);
  const OpenCall* call =
      ledger_.find_named(view.meta().first_step, handle.words, Stage::kDispatchSent);
  if (!call) call = context_.open_dispatch(view);
  if (!call) return;  // the handle of a solo dispatch, or combined already
  release(OpenCall(*call));
  view.meta().state = abi::kReleased;
}

void HostBackend::clean_masks(uint64_t round, const platform::Stream&) {
  waits_.latching([this] { waits_.check_abort([] { return ""; }); });
  ring_.begin_round(round);
  ledger_.restart((round << abi::kRoundBit) + static_cast<uint64_t>(plan_.shape.steps_in_flight));
}

void HostBackend::release(const OpenCall& call) {
  for (int64_t chunk = 0; chunk < call.num_steps; ++chunk) {
    const Step step = ring_.step_of(call.first_step + static_cast<uint64_t>(chunk));
    if (call.stage == Stage::kDispatchSent)  // arriving rows are dropped
      run([&] { return ring_.arrived(step, Phase::kDispatch); },
          [&] { return Pending{step, Phase::kDispatch}; });
    ring_.acknowledge(step);
  }
  ledger_.record(ledger_.find_named(call.named_step, call.handle, call.stage), call, 0, false,
                 false);
}

void HostBackend::make_room(int64_t num_steps) {
  for (const OpenCall& call : ledger_.to_release(num_steps)) release(call);
}

}  // namespace moe_p2p::moe
