#include "moe/all_to_all.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/context.h"
#include "moe/all_to_all_state.h"
#include "platform/interrupt.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;

namespace {

struct RankAddress {
  int32_t rank;
  engine::EngineAddress engine;
  base::Bytes data;   // a serialized MemoryDescriptor; empty where the regions are on a GPU
  base::Bytes board;  // the same of HostGather; empty without other nodes
  NodeMemory::Neighbour memory;

  static RankAddress parse(std::span<const std::byte> bytes) {
    base::WireReader in(bytes, "rank address");
    RankAddress a;
    a.rank = in.get<int32_t>();
    a.engine = engine::EngineAddress::parse(in.get_bytes());
    const auto data = in.get_bytes();
    a.data.assign(data.begin(), data.end());
    const auto board = in.get_bytes();
    a.board.assign(board.begin(), board.end());
    a.memory.memory_name = in.get_string();
    a.memory.waker_name = in.get_string();
    in.expect_end();
    return a;
  }
};

provider::MemorySpan device_span(const Plan& plan, uint64_t address, int ordinal) {
  return {.data = reinterpret_cast<std::byte*>(address),
          .bytes = plan.regions.total_bytes,
          .kind = provider::MemoryKind::kCuda,
          .device = ordinal,
          .read_by_neighbours = plan.shape.ranks_per_node > 1};
}

}  // namespace

AllToAll::State::State(engine::TransferEngine& with_engine, proxy::ProxyThread* with_proxy,
                       const AllToAllOptions& with_options)
    : engine(with_engine),
      proxy(with_proxy),
      options(with_options),
      plan(make_plan(with_options.plan)),
      masks(checked_masks()),
      memory(plan, checked_rank(), !with_options.device),
      kernels(plan, memory, with_options.num_threads, masks),
      ring(plan, kernels),
      gather(plan, memory, with_engine, with_options.communicator),
      data(with_options.device
               ? nullptr
               : with_engine.register_memory({memory.data().data(), memory.data().size()})) {}

int AllToAll::State::checked_rank() const {
  MOE_P2P_CHECK(options.rank >= 0 && options.rank < plan.shape.world_size, Code::kInvalidArgument,
                "rank is ", options.rank, ", must be from 0 to ", plan.shape.world_size - 1);
  return options.rank;
}

int32_t* AllToAll::State::checked_masks() const {
  if (!options.masks) return nullptr;
  MOE_P2P_CHECK(plan.shape.num_nodes() == 1 || plan.shape.ranks_per_node == 1,
                Code::kInvalidArgument, "masks are for ranks of one node, or of one rank a node; ",
                plan.shape.num_nodes(), " nodes of ", plan.shape.ranks_per_node,
                " ranks lose a gateway with each rank that is gone. Pass ranks_per_node=1");
  MOE_P2P_CHECK(plan.shape.chunk_tokens >= plan.max_tokens, Code::kInvalidArgument,
                "chunk_tokens is ", plan.shape.chunk_tokens, ", with masks it must be at least ",
                "max_tokens ", plan.max_tokens, ": a rank is there for a whole call or not at all");
  return options.masks;
}

AllToAll::AllToAll(engine::TransferEngine& engine, proxy::ProxyThread* proxy,
                   const AllToAllOptions& options)
    : state_(std::make_unique<State>(engine, proxy, options)) {}

AllToAll::~AllToAll() {
  close();
  if (state_->memory.inherited()) (void)state_.release();  // the parent's engine is part of it
}

const Plan& AllToAll::plan() const noexcept { return state_->plan; }

base::Bytes AllToAll::address() const {
  base::WireWriter out;
  out.put(static_cast<int32_t>(state_->options.rank));
  out.put_bytes(state_->engine.address().serialize());
  out.put_bytes(state_->data ? state_->engine.descriptor(state_->data).serialize() : base::Bytes{});
  out.put_bytes(state_->gather.descriptor());
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
  MOE_P2P_CHECK(!s.options.device || s.device, Code::kInvalidArgument,
                "use_device() has not been called");
  std::vector<NodeMemory::Neighbour> neighbours;
  std::vector<Exchange::Remote> remotes;
  std::vector<HostGather::Remote> boards;
  for (int rank = 0; rank < s.plan.shape.world_size; ++rank) {
    const auto address = RankAddress::parse(addresses[static_cast<size_t>(rank)]);
    MOE_P2P_CHECK(address.rank == rank, Code::kInvalidArgument, "address ", rank, " is of rank ",
                  address.rank);
    const int node = rank / s.plan.shape.ranks_per_node;
    if (node == s.memory.node()) {
      neighbours.push_back(address.memory);
    } else if (rank % s.plan.shape.ranks_per_node == s.memory.local()) {
      const engine::Peer* peer = base::with_context(base::concat("connecting to rank ", rank), [&] {
        return s.engine.connect(address.engine);
      });
      s.peers.push_back(peer);
      const auto nics = static_cast<int>(address.engine.nics.size());
      const auto* region = s.engine.resolve(engine::MemoryDescriptor::parse(address.data), peer);
      const auto* board = s.engine.resolve(engine::MemoryDescriptor::parse(address.board), peer);
      remotes.push_back({node, region, board, nics});
      boards.push_back({node, board, nics});
      if (const uint64_t here = s.device ? s.device_memory.peer_data[node] : 0)
        s.engine.map_region(region, device_span(s.plan, here, s.device_memory.ordinal));
    }
  }
  s.memory.attach(neighbours);
  s.gather.connect(boards);
  s.exchange = std::make_unique<Exchange>(s.plan, s.memory, s.engine, s.data, s.gather.board(),
                                          s.options.communicator, std::move(remotes), s.masks,
                                          s.options.device);
  const auto attach = [&s] { s.engine.imm_table().set_sink(s.options.communicator, &s); };
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

bool AllToAll::State::failed() const {
  return story || exchange->failure().node >= 0 || (device && device->fault());
}

// The last of the node to hand in rings. A neighbour that is gone, or was stopped, without having done
// so never does. A GPU has rung whatever it will.
std::vector<Step> AllToAll::State::combines_to_send() const {
  if (device) return {};
  const bool aborted =
      std::atomic_ref(memory.head(memory.local()).abort).load(std::memory_order_acquire) != 0;
  std::vector<Step> steps = ring.last_combines();
  std::erase_if(steps, [&](Step step) {
    for (int l = 0; l < memory.num_local(); ++l) {
      const bool stays = l == memory.local() || (!aborted && gone(l).empty());
      if (!stays && !kernels.arrived(step, Phase::kCombine, rank_of(memory.node(), l))) return true;
    }
    return false;
  });
  return steps;
}

void AllToAll::State::leave() {
  const auto combines = combines_to_send();
  const auto gathers = [this](int node) { return gather.num_arrived(node); };
  engine.run_on_poller([&] { exchange->leave({failed(), gathers, combines}); },
                       platform::Clock::now() + options.timeout);
}

// Partners may still need what this rank's proxy has to send.
void AllToAll::State::wait_to_leave() {
  leave();
  const auto patience = failed()
                            ? std::min<std::chrono::milliseconds>(options.timeout, kFailedPatience)
                            : options.timeout;
  const auto deadline = platform::Clock::now() + patience;
  auto next_look = platform::Clock::now() + kLookAtNeighbours;
  while (!exchange->has_left() && platform::Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (platform::Clock::now() < next_look) continue;
    next_look = platform::Clock::now() + kLookAtNeighbours;
    if (platform::interrupted()) break;  // partners that still need something find this rank gone
    leave();
  }
}

void AllToAll::leave() { state_->leave(); }

bool AllToAll::has_left() const noexcept { return state_->exchange->has_left(); }

void AllToAll::close() noexcept {
  State& s = *state_;
  if (std::exchange(s.closed, true) || s.memory.inherited()) return;
  try {
    if (s.proxy && s.exchange) s.wait_to_leave();
  } catch (const std::exception& error) {
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", s.options.rank, ": closing: ", error.what());
  }
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
    s.gather.close(end);
  } catch (const std::exception& error) {
    if (s.exchange) (void)s.exchange.release();
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", s.options.rank, ": closing: ", error.what());
  }
}

void AllToAll::use_device(const DeviceMemory& memory) {
  State& s = *state_;
  MOE_P2P_CHECK(s.options.device && !s.device, Code::kInvalidArgument,
                "use_device() is for communicators of GPU tensors, once");
  s.device = std::make_unique<DeviceKernels>(s.plan, s.options, memory);
  s.device_memory = memory;
  if (s.plan.shape.num_nodes() > 1)
    s.data = s.engine.register_memory(
        device_span(s.plan, memory.data[static_cast<size_t>(s.memory.local())], memory.ordinal));
}

DeviceKernels& AllToAll::device() {
  MOE_P2P_CHECK(state_->device, Code::kInvalidArgument, "use_device() has not been called");
  return *state_->device;
}

std::vector<std::span<std::byte>> AllToAll::signals() const {
  MOE_P2P_CHECK(state_->exchange, Code::kInvalidArgument, "connect() has not been called");
  std::vector<std::span<std::byte>> spans;
  for (int l = 0; l < state_->memory.num_local(); ++l)
    spans.emplace_back(state_->memory.signals(l), state_->plan.signals.total_bytes);
  return spans;
}

void AllToAll::use_signals(const std::vector<uint64_t>& device_addresses) {
  device().set_signals(device_addresses);
  state_->has_signals = true;
}

int64_t AllToAll::handle_words(int64_t num_rows, int64_t max_tokens) const {
  const Plan& plan = state_->plan;
  const auto layout = abi::HandleLayout::make(plan.shape, num_rows, plan.num_chunks(max_tokens),
                                              plan.num_slots(max_tokens));
  return static_cast<int64_t>(layout.total);
}

}  // namespace moe_p2p::moe
