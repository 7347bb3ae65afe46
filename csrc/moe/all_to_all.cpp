#include "moe/all_to_all.h"

#include <atomic>
#include <list>
#include <optional>
#include <thread>
#include <utility>

#include "moe/calls.h"
#include "moe/device_kernels.h"
#include "moe/exchange.h"
#include "moe/host_kernels.h"
#include "moe/node_memory.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using base::Error;

namespace {

struct RankAddress {
  int32_t rank;
  engine::EngineAddress engine;
  base::Bytes data;  // a serialized MemoryDescriptor; empty where the regions are on a GPU
  NodeMemory::Neighbour memory;

  static RankAddress parse(std::span<const std::byte> bytes) {
    base::WireReader in(bytes, "rank address");
    RankAddress a;
    a.rank = in.get<int32_t>();
    a.engine = engine::EngineAddress::parse(in.get_bytes());
    const auto data = in.get_bytes();
    a.data.assign(data.begin(), data.end());
    a.memory.memory_name = in.get_string();
    a.memory.waker_name = in.get_string();
    in.expect_end();
    return a;
  }
};

constexpr const char* phase_name(Phase phase) {
  return phase == Phase::kDispatch ? "dispatch" : "combine";
}

}  // namespace

struct AllToAll::State {
  State(engine::TransferEngine& with_engine, proxy::ProxyThread* with_proxy,
        const AllToAllOptions& with_options)
      : engine(with_engine),
        proxy(with_proxy),
        options(with_options),
        plan(make_plan(with_options.plan)),
        memory(plan, checked_rank(), !with_options.device),
        kernels(plan, memory, with_options.num_threads),
        ring(plan, kernels),
        data(with_options.device
                 ? nullptr
                 : with_engine.register_memory({memory.data().data(), memory.data().size()})) {}

  int checked_rank() const {
    MOE_P2P_CHECK(options.rank >= 0 && options.rank < plan.shape.world_size, Code::kInvalidArgument,
                  "rank is ", options.rank, ", must be from 0 to ", plan.shape.world_size - 1);
    return options.rank;
  }

  void require_usable() const {
    MOE_P2P_CHECK(!closed, Code::kClosed, "rank ", options.rank, ": the communicator is closed");
    if (story) throw *story;
    MOE_P2P_CHECK(exchange, Code::kInvalidArgument, "rank ", options.rank,
                  ": connect() has not been called");
  }

  [[noreturn]] void fail(Code code, const std::string& message) {
    throw Error(code, base::concat("rank ", options.rank, ": ", message));
  }
  // The first failure stays, and stops everybody on this node who waits.
  void latch(const Error& error) {
    story = error;
    for (int l = 0; l < memory.num_local(); ++l) {
      uint64_t none = 0;
      // release: pairs with the acquire in check_abort() of the neighbours.
      std::atomic_ref(memory.head(l).abort)
          .compare_exchange_strong(none, 1 + static_cast<uint64_t>(options.rank),
                                   std::memory_order_release, std::memory_order_relaxed);
      platform::notify_all(memory.bell(l));
    }
  }

  void check_abort() {
    const uint64_t word =
        std::atomic_ref(memory.head(memory.local()).abort).load(std::memory_order_acquire);
    if (word == 0) return;
    const auto failure = exchange->failure();
    if (failure.node >= 0)
      fail(failure.status.code,
           base::concat("a ", phase_name(failure.phase), " write to rank ",
                        rank_of(failure.node, memory.local()), " (node ", failure.node,
                        ") failed: ", base::code_name(failure.status.code), ", detail ",
                        failure.status.detail, engine.first_failure()));
    fail(Code::kAborted, base::concat("rank ", word - 1, " of this node gave up; see its error"));
  }

  int rank_of(int node, int local) const { return node * plan.shape.ranks_per_node + local; }

  // Ranks of this node whose signal memory or process the wait depends on.
  void check_neighbours(const Pending& pending) {
    for (int source = 0; source < plan.shape.world_size; ++source) {
      if (kernels.arrived(pending.step, pending.phase, source)) continue;
      const int local =
          source % plan.shape.ranks_per_node;  // of the source, or of its gateway here
      const bool gone =
          std::atomic_ref(memory.head(local).closed).load(std::memory_order_acquire) != 0;
      if (!gone && memory.alive(local)) continue;
      if (kernels.arrived(pending.step, pending.phase, source))
        continue;  // it said so before leaving
      fail(Code::kPeerDead,
           base::concat("rank ", rank_of(memory.node(), local),
                        gone ? " has closed its communicator" : "'s process has ended", "; ",
                        waiting_for(pending)));
    }
  }

  std::string waiting_for(const Pending& pending) const {
    std::string text =
        base::concat(phase_name(pending.phase), " of step ", pending.step.index, " waits for");
    for (int source = 0; source < plan.shape.world_size; ++source) {
      if (kernels.arrived(pending.step, pending.phase, source)) continue;
      const int node = source / plan.shape.ranks_per_node;
      text += base::concat(" rank ", source, " (node ", node);
      if (node != memory.node() && source % plan.shape.ranks_per_node == memory.local()) {
        const auto uses = pending.step.index / static_cast<uint64_t>(plan.shape.steps_in_flight);
        const auto nics = static_cast<uint64_t>(num_nics[static_cast<size_t>(node)]);
        text += base::concat(
            ", ", exchange->immediates(pending.phase, pending.step.slot, node) - uses * nics,
            " of ", nics, " immediates came");
      }
      text += ")";
    }
    return text;
  }

  // Advances until done; every time something moved the deadline starts anew.
  template <typename Advance, typename GetPending>
  void run(Advance&& advance, GetPending&& get_pending) {
    try {
      if (advance()) return;
      for (;;) {
        const Pending pending = get_pending();
        const auto deadline = platform::Clock::now() + options.timeout;
        platform::Waiter waiter(memory.bell(memory.local()), options.wait, deadline);
        auto next_look = platform::Clock::now() + kLookAtNeighbours;
        for (;;) {
          waiter.prepare();
          if (advance()) return;
          if (get_pending().step.index != pending.step.index ||
              get_pending().phase != pending.phase)
            break;
          check_abort();
          if (platform::Clock::now() >= next_look) {
            check_neighbours(pending);
            next_look = platform::Clock::now() + kLookAtNeighbours;
          }
          if (!waiter.pause())
            fail(Code::kTimeout, base::concat("timed out after ", options.timeout.count(),
                                              " ms: ", waiting_for(pending)));
        }
      }
    } catch (const Error& error) {
      if (error.code() != Code::kInvalidArgument) latch(error);
      throw;
    }
  }

  // Small next to any timeout, large next to its own cost (one flock per neighbour).
  static constexpr std::chrono::milliseconds kLookAtNeighbours{50};

  engine::TransferEngine& engine;
  proxy::ProxyThread* proxy;
  const AllToAllOptions options;
  const Plan plan;
  NodeMemory memory;
  HostKernels kernels;
  StepRing ring;
  const engine::MemoryHandle* data;
  std::vector<const engine::Peer*> peers;
  std::vector<int> num_nics;  // [N] of the rank with our local index
  std::unique_ptr<Exchange> exchange;
  std::unique_ptr<DeviceKernels> device;
  std::list<DispatchCall> dispatches;  // sent, not yet received
  std::list<CombineCall> combines;
  std::optional<Error> story;
  bool closed = false;
};

AllToAll::AllToAll(engine::TransferEngine& engine, proxy::ProxyThread* proxy,
                   const AllToAllOptions& options)
    : state_(std::make_unique<State>(engine, proxy, options)) {}

AllToAll::~AllToAll() { close(); }

const Plan& AllToAll::plan() const noexcept { return state_->plan; }

std::string AllToAll::broken() const {
  if (state_->story) return state_->story->what();
  try {
    if (state_->device) state_->device->check_fault();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

base::Bytes AllToAll::address() const {
  base::WireWriter out;
  out.put(static_cast<int32_t>(state_->options.rank));
  out.put_bytes(state_->engine.address().serialize());
  out.put_bytes(state_->data ? state_->engine.descriptor(state_->data).serialize() : base::Bytes{});
  out.put_string(state_->memory.name());
  out.put_string(state_->engine.waker_name());
  return out.take();
}

void AllToAll::connect(std::span<const base::Bytes> addresses) {
  State& s = *state_;
  MOE_P2P_CHECK(!s.closed && !s.exchange, Code::kInvalidArgument, "connect() was called before");
  MOE_P2P_CHECK(addresses.size() == static_cast<size_t>(s.plan.shape.world_size),
                Code::kInvalidArgument, addresses.size(), " addresses for world_size ",
                s.plan.shape.world_size);
  std::vector<NodeMemory::Neighbour> neighbours;
  std::vector<Exchange::Remote> remotes;
  s.num_nics.assign(static_cast<size_t>(s.plan.shape.num_nodes()), 0);
  for (int rank = 0; rank < s.plan.shape.world_size; ++rank) {
    const auto address = RankAddress::parse(addresses[static_cast<size_t>(rank)]);
    MOE_P2P_CHECK(address.rank == rank, Code::kInvalidArgument, "address ", rank, " is of rank ",
                  address.rank);
    const int node = rank / s.plan.shape.ranks_per_node;
    if (node == s.memory.node()) {
      neighbours.push_back(address.memory);
    } else if (rank % s.plan.shape.ranks_per_node == s.memory.local()) {
      const engine::Peer* peer = s.engine.connect(address.engine);
      s.peers.push_back(peer);
      const auto nics = static_cast<int>(address.engine.nics.size());
      s.num_nics[static_cast<size_t>(node)] = nics;
      remotes.push_back(
          {node, s.engine.resolve(engine::MemoryDescriptor::parse(address.data), peer), nics});
    }
  }
  s.memory.attach(neighbours);
  s.exchange = std::make_unique<Exchange>(s.plan, s.memory, s.engine, s.data,
                                          s.options.communicator, std::move(remotes));
  const auto attach = [&s] {
    s.engine.imm_table().set_sink(s.options.communicator, s.exchange.get());
  };
  if (s.proxy) {
    s.engine.run_on_poller(attach, platform::Clock::now() + s.options.timeout);
    s.proxy->add_task(s.exchange.get());
  } else {
    attach();
  }
}

AllToAll::Parts AllToAll::parts() noexcept {
  return {state_->ring, state_->kernels, state_->exchange.get()};
}

// Peers may still need what this rank's proxy has to send; waits for it unless something is broken.
void AllToAll::close() noexcept {
  State& s = *state_;
  if (std::exchange(s.closed, true)) return;
  const auto sent = [&s] {
    for (const auto& [step, combine_sent] : s.ring.last_steps())
      if (!s.exchange->sent(Phase::kDispatch, step.slot, step.word()) ||
          (combine_sent && !s.exchange->sent(Phase::kCombine, step.slot, step.word())))
        return false;
    return true;
  };
  const auto deadline = platform::Clock::now() + s.options.timeout;
  if (s.proxy && s.exchange)
    while (!s.story && s.exchange->failure().node < 0 && !sent() &&
           platform::Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  // release: pairs with check_neighbours(); all that this rank had to say is said.
  std::atomic_ref(s.memory.head(s.memory.local()).closed).store(1, std::memory_order_release);
  const auto end = platform::Clock::now() + s.options.timeout;
  try {
    if (s.exchange) {
      const auto detach = [&s] { s.engine.imm_table().set_sink(s.options.communicator, nullptr); };
      if (s.proxy) {
        s.proxy->remove_task(s.exchange.get());
        s.engine.run_on_poller(detach, end);
      } else {
        detach();
      }
    }
    for (const engine::Peer* peer : s.peers) s.engine.disconnect(peer);
    if (s.exchange && !s.exchange->settle(s.proxy == nullptr, end)) {
      (void)s.exchange.release();  // the engine still holds its Requests: better lost than freed
      MOE_P2P_LOG(base::LogLevel::kError, "rank ", s.options.rank, ": writes did not end at close");
    }
    if (s.data) s.engine.unregister_memory(s.data);
  } catch (const std::exception& error) {
    if (s.exchange) (void)s.exchange.release();
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", s.options.rank, ": closing: ", error.what());
  }
}

void AllToAll::use_device(const DeviceMemory& memory) {
  State& s = *state_;
  MOE_P2P_CHECK(s.options.device, Code::kInvalidArgument, "this communicator is for host tensors");
  s.device = std::make_unique<DeviceKernels>(s.plan, s.options, memory);
}

DeviceKernels& AllToAll::device() {
  MOE_P2P_CHECK(state_->device, Code::kInvalidArgument, "use_device() has not been called");
  return *state_->device;
}

int64_t AllToAll::handle_words(int64_t num_rows, int64_t max_tokens) const {
  const auto layout =
      abi::HandleLayout::make(state_->plan.shape, num_rows, state_->plan.num_chunks(max_tokens));
  return static_cast<int64_t>(layout.total);
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

}  // namespace

void AllToAll::dispatch(const DispatchSend& send, const DispatchRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->dispatch(&send, &recv, send.stream);
  DispatchCall call(s.plan, s.ring, s.kernels, s.options.communicator, send);
  call.check(recv);
  s.run([&] { return call.advance_recv(recv); }, [&] { return call.pending(); });
}

void AllToAll::dispatch_send(const DispatchSend& send) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->dispatch(&send, nullptr, send.stream);
  check_halves(s.plan, s.plan.num_chunks(send.max_tokens));
  s.dispatches.emplace_back(s.plan, s.ring, s.kernels, s.options.communicator, send);
  DispatchCall& call = s.dispatches.back();
  s.run([&] { return call.advance_send(); }, [&] { return call.pending(); });
}

void AllToAll::dispatch_recv(const DispatchRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->dispatch(nullptr, &recv, recv.stream);
  const auto call = find_call(s.dispatches, recv.handle, "dispatch");
  call->check(recv);
  s.run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  s.dispatches.erase(call);
}

void AllToAll::combine(const CombineSend& send, const CombineRecv& recv) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->combine(&send, &recv, send.stream);
  CombineCall call(s.plan, s.ring, s.kernels, s.options.communicator, send);
  s.run([&] { return call.advance_recv(recv); }, [&] { return call.pending(); });
}

void AllToAll::combine_send(const CombineSend& send) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->combine(&send, nullptr, send.stream);
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
  if (s.device) return s.device->combine(nullptr, &recv, recv.stream);
  const auto call = find_call(s.combines, recv.handle, "combine");
  s.run([&] { return call->advance_recv(recv); }, [&] { return call->pending(); });
  s.combines.erase(call);
}

void AllToAll::release(Handle handle, void* stream) {
  State& s = *state_;
  s.require_usable();
  if (s.device) return s.device->release(handle, stream);
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
