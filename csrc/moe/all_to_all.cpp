#include "moe/all_to_all.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <numeric>
#include <thread>
#include <utility>

#include "base/context.h"
#include "base/mutation.h"
#include "moe/device/backend.h"
#include "moe/host/backend.h"
#include "moe/host/gather.h"
#include "moe/node/arrival_flags.h"
#include "moe/node/exchange.h"
#include "moe/node/waits.h"
#include "platform/interrupt.h"
#include "platform/process.h"
#include "platform/ranges.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;

namespace {

// By phase: what was dispatched, and weights, are read by all ranks of the node; sums that come
// back by the rank that they are for; a board is host memory.
constexpr engine::PhaseReaders kReaders{engine::Readers::kNeighbours, engine::Readers::kOwner,
                                        engine::Readers::kNeighbours, engine::Readers::kNobody};
static_assert(static_cast<int>(abi::Phase::kDispatch) == 0 &&
              static_cast<int>(abi::Phase::kCombine) == 1 &&
              static_cast<int>(abi::Phase::kWeights) == 2 && HostGather::kPhase == 3);

struct RankAddress {
  int32_t rank;
  engine::EngineAddress engine;
  base::Bytes data;   // a serialized MemoryDescriptor; empty where the regions are on a GPU
  base::Bytes board;  // the descriptor of HostGather's board; empty without other nodes
  NodeMemory::Neighbour memory;
  FlagOffer flags;
  std::string host;

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
    a.flags = {in.get_string(), in.get_string(), a.engine.nics.size()};
    a.host = in.get_string();
    in.expect_end();
    return a;
  }
};

}  // namespace

struct AllToAll::State final : engine::ImmSink {
  State(engine::TransferEngine& engine, proxy::ProxyThread* proxy, const AllToAllOptions& options);

  int checked_rank() const;
  int32_t* checked_masks() const;
  void set_backend(std::unique_ptr<Backend> made);
  void use_flags(const std::vector<RankAddress>& ranks);
  void require_usable() const;
  bool failed() const;
  // Begins to close; wait_to_leave() ends once all that was sent arrived, or the partners are gone.
  void leave();
  void wait_to_leave();

  void on_imm(const engine::ImmKey& key) noexcept override {
    if (key.phase == HostGather::kPhase) gather.on_imm(key);
    exchange->on_imm(key);
  }

  // Deadline of wait_to_leave() after a failure: data under way to live partners takes less.
  static constexpr std::chrono::seconds kFailedPatience{5};

  engine::TransferEngine& engine;
  proxy::ProxyThread* proxy;
  const AllToAllOptions options;
  const Plan plan;
  std::vector<uint8_t> absent;  // [W]: Masks::absent
  const Masks masks;
  NodeMemory memory;
  Waits waits;
  HostGather gather;
  std::unique_ptr<Backend> backend;               // null until use_device()
  const engine::MemoryHandle* regions = nullptr;  // null where NICs do not use the regions
  std::vector<const engine::Peer*> peers;
  std::unique_ptr<MappedFlags> mapped_flags;
  FlagOffer flag_offer;
  ArrivalFlags flags = ArrivalFlags::kRelay;  // the way that was chosen
  std::unique_ptr<Exchange> exchange;
  bool has_signals;  // kernels know the signals' addresses, where there are kernels
  bool closed = false;
  uint64_t num_cleans = 0;  // clean_masks()
  uint64_t num_lost = 0;    // Lost::num_tokens that check() has thrown
};

AllToAll::State::State(engine::TransferEngine& with_engine, proxy::ProxyThread* with_proxy,
                       const AllToAllOptions& with_options)
    : engine(with_engine),
      proxy(with_proxy),
      options(with_options),
      plan(make_plan(with_options.plan)),
      absent(static_cast<size_t>(plan.shape.world_size)),
      masks(checked_masks(), absent.data(), with_options.fixed_masks),
      memory(plan, checked_rank(), !with_options.device),
      waits(plan, options, memory, masks, engine),
      gather(plan, memory, with_engine, with_options.communicator),
      has_signals(!with_options.device) {
  if (!options.device)
    set_backend(std::make_unique<HostBackend>(plan, options, memory, masks, waits));
}

void AllToAll::State::set_backend(std::unique_ptr<Backend> made) {
  backend = std::move(made);
  if (const auto span = backend->regions()) regions = engine.register_memory(*span);
  if (plan.shape.num_nodes() > 1)
    flag_offer = offer_flags(plan, options, engine, *backend->regions(), mapped_flags);
}

void AllToAll::State::use_flags(const std::vector<RankAddress>& ranks) {
  if (plan.shape.num_nodes() == 1) return;
  std::map<int, FlagOffer> offers;  // of those that are there
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (!absent[rank]) offers.emplace(static_cast<int>(rank), ranks[rank].flags);
  flags = choose_flags(options, offers);
  if (flags != ArrivalFlags::kGdrCopy) mapped_flags.reset();
  const auto words = flags == ArrivalFlags::kWrite     ? static_cast<int>(flag_offer.num_nics)
                     : flags == ArrivalFlags::kGdrCopy ? 1
                                                       : 0;
  memory.set_flag_words(words);
  if (auto* const device = dynamic_cast<DeviceBackend*>(backend.get()))
    device->set_flag_words(words);
}

int AllToAll::State::checked_rank() const {
  MOE_P2P_CHECK(options.rank >= 0 && options.rank < plan.shape.world_size, Code::kInvalidArgument,
                "rank is ", options.rank, ", must be from 0 to ", plan.shape.world_size - 1);
  return options.rank;
}

int32_t* AllToAll::State::checked_masks() const {
  if (!options.masks) return nullptr;
  if (options.fixed_masks) return options.masks;
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
  out.put_bytes(state_->regions ? state_->engine.descriptor(state_->regions).serialize()
                                : base::Bytes{});
  out.put_bytes(state_->gather.descriptor());
  out.put_string(state_->memory.name());
  out.put_string(state_->engine.waker_name());
  out.put_string(state_->flag_offer.no_write);
  out.put_string(state_->flag_offer.no_map);
  out.put_string(platform::host_name());
  return out.take();
}

void AllToAll::connect(std::span<const base::Bytes> addresses) {
  State& s = *state_;
  MOE_P2P_CHECK(!s.closed && !s.exchange, Code::kInvalidArgument, "connect() was called before");
  MOE_P2P_CHECK(addresses.size() == static_cast<size_t>(s.plan.shape.world_size),
                Code::kInvalidArgument, addresses.size(), " addresses for world_size ",
                s.plan.shape.world_size);
  MOE_P2P_CHECK(s.backend, Code::kInvalidArgument, "use_device() has not been called");
  std::vector<NodeMemory::Neighbour> neighbours;
  std::vector<Exchange::Remote> remotes;
  std::vector<HostGather::Remote> boards;
  std::vector<RankAddress> ranks;
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    s.absent[rank] = addresses[rank].empty();
    MOE_P2P_CHECK(
        !s.absent[rank] || (s.masks.enabled() && rank != static_cast<size_t>(s.options.rank)),
        Code::kInvalidArgument, "address ", rank,
        " is empty: only masks can do without another rank");
    ranks.push_back(s.absent[rank] ? RankAddress{} : RankAddress::parse(addresses[rank]));
  }
  s.use_flags(ranks);
  for (int rank = 0; rank < s.plan.shape.world_size; ++rank) {
    const RankAddress& address = ranks[static_cast<size_t>(rank)];
    const int node = rank / s.plan.shape.ranks_per_node;
    const bool partner = rank % s.plan.shape.ranks_per_node == s.memory.local();
    if (s.absent[static_cast<size_t>(rank)]) {  // a place among neighbours or partners, unused
      if (node == s.memory.node()) {
        neighbours.push_back({});
      } else if (partner) {
        remotes.push_back({node, nullptr, nullptr, 1});
        boards.push_back({node, nullptr, 1});
      }
      continue;
    }
    MOE_P2P_CHECK(address.rank == rank, Code::kInvalidArgument, "address ", rank, " is of rank ",
                  address.rank);
    if (node != s.memory.node() && !s.options.device && s.engine.writes_in_place())
      s.memory.attach_far(rank, address.memory.memory_name);
    if (node == s.memory.node()) {
      neighbours.push_back(address.memory);
    } else if (partner) {
      const engine::Peer* peer = base::with_context(base::concat("connecting to rank ", rank), [&] {
        return s.engine.connect(address.engine, 0, s.options.tag);
      });
      s.peers.push_back(peer);
      const auto nics = static_cast<int>(address.engine.nics.size());
      const auto* region = s.engine.resolve(engine::MemoryDescriptor::parse(address.data), peer);
      const auto* board = s.engine.resolve(engine::MemoryDescriptor::parse(address.board), peer);
      remotes.push_back({node, region, board, nics});
      boards.push_back({node, board, nics});
      const auto here = s.backend->mapped_regions(node);
      MOE_P2P_CHECK(here || !s.engine.writes_in_place(), Code::kUnavailable, "the memory of rank ",
                    rank, " is not mapped here, and this transport writes in place");
      if (here) s.engine.map_region(region, *here);
    }
  }
  s.memory.attach(neighbours);
  s.gather.connect(boards);
  s.exchange = std::make_unique<Exchange>(s.plan, s.memory, s.engine, s.regions, s.gather.board(),
                                          s.options.communicator, std::move(remotes), s.masks,
                                          s.options.device);
  s.exchange->use_flags(s.flags == ArrivalFlags::kWrite, s.mapped_flags.get());
  s.waits.set_exchange(s.exchange.get());
  std::vector<std::string> hosts;
  for (RankAddress& each : ranks) hosts.push_back(std::move(each.host));
  s.waits.set_hosts(std::move(hosts));
  const auto attach = [&s] { s.engine.imm_table().set_sink(s.options.communicator, &s, kReaders); };
  if (s.proxy) {
    s.engine.run_on_poller(attach, platform::Clock::now() + s.options.timeout);
    s.proxy->add_task(s.exchange.get());
  } else {
    attach();
  }
}

HostBackend& AllToAll::host() { return dynamic_cast<HostBackend&>(*state_->backend); }

proxy::ProxyTask* AllToAll::task() noexcept { return state_->exchange.get(); }

bool AllToAll::State::failed() const {
  return waits.broken() || exchange->failure().node >= 0 || backend->failed();
}

void AllToAll::State::leave() {
  const auto combines = backend->last_steps();
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

std::array<int64_t, 4> AllToAll::exchange_times() {
  const auto dispatch = state_->exchange->times(abi::Phase::kDispatch);
  const auto combine = state_->exchange->times(abi::Phase::kCombine);
  return {dispatch.taken, dispatch.published, combine.taken, combine.published};
}

AllToAll::Snapshot AllToAll::snapshot() const {
  const State& s = *state_;
  MOE_P2P_CHECK(s.exchange, Code::kInvalidArgument, "connect() has not been called");
  Snapshot made;
  for (int phase = 0; phase < abi::kNumPhases; ++phase)
    for (int slot = 0; slot < s.plan.shape.steps_in_flight; ++slot)
      for (int source = 0; source < s.plan.shape.world_size; ++source)
        made.flags.push_back(static_cast<int64_t>(
            s.memory.flag(s.memory.local(), static_cast<Phase>(phase), slot, source)
                .load(std::memory_order_relaxed)));
  for (int node = 0; node < s.plan.shape.num_nodes(); ++node)
    made.nics.push_back(node == s.memory.node() ? s.engine.num_nics() : s.exchange->num_nics(node));
  return made;
}

std::unique_ptr<base::Recording> AllToAll::record(size_t num_events) {
  if (!state_->backend) return nullptr;
  return state_->backend->record(num_events > 0 ? std::make_unique<base::Recording>(num_events)
                                                : nullptr);
}

const char* AllToAll::arrival_flags() const noexcept {
  return state_->plan.shape.num_nodes() == 1 ? "none" : name_of(state_->flags);
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
  // release: pairs with check_neighbours(); this rank sends nothing after it.
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
      (void)s.exchange.release();  // the engine still holds its Requests: leaked rather than freed
      MOE_P2P_LOG(base::LogLevel::kError, "rank ", s.options.rank, ": writes did not end at close");
    }
    s.mapped_flags.reset();
    if (s.regions) s.engine.unregister_memory(s.regions);
    s.gather.close(end);
  } catch (const std::exception& error) {
    if (s.exchange) (void)s.exchange.release();
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", s.options.rank, ": closing: ", error.what());
  }
}

void AllToAll::use_device(const DeviceMemory& memory) {
  State& s = *state_;
  MOE_P2P_CHECK(s.options.device && !s.backend, Code::kInvalidArgument,
                "use_device() is for communicators of GPU tensors, once");
  s.set_backend(std::make_unique<DeviceBackend>(s.plan, s.options, memory, s.waits));
}

DeviceBackend& AllToAll::device() {
  auto* const device = dynamic_cast<DeviceBackend*>(state_->backend.get());
  MOE_P2P_CHECK(device, Code::kInvalidArgument, "use_device() has not been called");
  return *device;
}

std::vector<int> AllToAll::ended() const { return state_->waits.ended(); }

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

void AllToAll::enter(AllToAll* before, const platform::Stream& stream) {
  if (state_->options.device)
    device().enter(before ? &before->device() : nullptr, state_->absent, stream);
  if (!before) return;
  Counters& counters = state_->waits.counters();
  counters.add(before->state_->waits.counters());
  Counters::add(counters.lost_tokens, before->lost().num_tokens);
}

int64_t AllToAll::handle_words(int64_t num_rows, int64_t max_tokens) const {
  return static_cast<int64_t>(state_->plan.handle_layout(num_rows, max_tokens).total);
}

// --- calls ---------------------------------------------------------------------------------------

void AllToAll::State::require_usable() const {
  MOE_P2P_CHECK(!closed, Code::kClosed, "rank ", options.rank, ": the communicator is closed");
  if (waits.broken()) throw *waits.broken();
  MOE_P2P_CHECK(exchange, Code::kInvalidArgument, "rank ", options.rank,
                ": connect() has not been called");
  MOE_P2P_CHECK(has_signals, Code::kInvalidArgument, "rank ", options.rank,
                ": use_signals() has not been called");
}

std::string AllToAll::broken() const {
  if (state_->waits.broken()) return state_->waits.broken()->what();
  try {
    if (state_->backend) state_->backend->check();
  } catch (const base::Error& error) {
    return error.what();
  }
  return "";
}

void AllToAll::check() {
  State& s = *state_;
  s.require_usable();
  s.waits.latching([&s] { s.backend->check(); }, Waits::always);
  s.waits.latching([&s] { s.waits.check_abort([] { return ""; }); });
  if (!s.options.poison) return;
  const Lost now = lost();
  const uint64_t num_new = now.num_tokens - std::exchange(s.num_lost, now.num_tokens);
  MOE_P2P_CHECK(num_new == 0, Code::kPeerDead, "rank ", s.options.rank, ": step ", now.step,
                " lost rank ", now.rank, ": the sums of ", num_new,
                " tokens lack what it had to send, and are NaN");
}

Lost AllToAll::lost() const noexcept { return state_->backend ? state_->backend->lost() : Lost{}; }

void AllToAll::dispatch(const DispatchSend* send, const DispatchRecv* recv) {
  State& s = *state_;
  const platform::Range range(!recv   ? "moe_p2p.dispatch_send"
                              : !send ? "moe_p2p.dispatch_recv"
                                      : "moe_p2p.dispatch");
  s.require_usable();
  s.backend->dispatch(send, recv);
  Counters& counters = s.waits.counters();
  if (send) {
    Counters::add(counters.dispatches, 1);
    if (!send->device_num_tokens)
      Counters::add(counters.tokens_sent, static_cast<uint64_t>(send->num_tokens));
  }
  if (!recv || s.options.device) return;
  const std::span rows(recv->counts, static_cast<size_t>(s.plan.num_local_experts(s.options.rank)));
  Counters::add(counters.rows_received, std::accumulate(rows.begin(), rows.end(), uint64_t{0}));
}

void AllToAll::combine(const CombineSend* send, const CombineRecv* recv) {
  const platform::Range range(!recv   ? "moe_p2p.combine_send"
                              : !send ? "moe_p2p.combine_recv"
                                      : "moe_p2p.combine");
  state_->require_usable();
  state_->backend->combine(send, recv);
  if (send) Counters::add(state_->waits.counters().combines, 1);
}

void AllToAll::release(Handle handle, const platform::Stream& stream) {
  const platform::Range range("moe_p2p.release");
  state_->require_usable();
  state_->backend->release(handle, stream);
  Counters::add(state_->waits.counters().releases, 1);
}

const Counters& AllToAll::counters() const noexcept { return state_->waits.counters(); }

std::vector<int> AllToAll::watch(const Progress& progress, uint64_t step,
                                 std::chrono::milliseconds waited,
                                 const std::vector<int64_t>& masked) {
  publish(state_->memory, progress);
  return state_->waits.behind(progress, step, waited, masked);
}

void AllToAll::clean_masks(const platform::Stream& stream) {
  State& s = *state_;
  s.require_usable();
  MOE_P2P_CHECK(s.masks.enabled(), Code::kInvalidArgument,
                "this communicator has no masks; make it with mask_lost_ranks=True");
  MOE_P2P_CHECK(s.plan.shape.num_nodes() == 1, Code::kUnavailable,
                "ranks of several nodes are not taken back: the counts of what NICs have written "
                "would not agree; make a new communicator");
  MOE_P2P_CHECK(s.num_cleans + 1 < abi::kMostRounds, Code::kResourceExhausted,
                "masks were cleaned ", s.num_cleans, " times; make a new communicator");
  s.backend->clean_masks(MOE_P2P_MUTATED(kCleanWithoutJump) ? 0 : s.num_cleans + 1, stream);
  ++s.num_cleans;  // no word of that round was stored if it threw
}

void AllToAll::release_oldest() {
  MOE_P2P_CHECK(state_->backend, Code::kInvalidArgument, "use_device() has not been called");
  state_->backend->ledger().release_oldest();
}

void AllToAll::await_counts(const uint32_t& word, uint32_t number) {
  State& s = *state_;
  const platform::Range range("moe_p2p.await_counts");
  s.require_usable();
  s.waits.latching([&] {
    // acquire: pairs with the last store of kernels/count.cu.
    const std::atomic_ref there(const_cast<uint32_t&>(word));
    s.waits.wait([&] { return there.load(std::memory_order_acquire) == number; },
                 [](int) { return true; },
                 [] {
                   return "the counts of this rank's tokens: work before them in the stream has "
                          "not ended";
                 });
  });
}

void AllToAll::gather_counts(std::span<const int32_t> values, std::span<int32_t> gathered) {
  State& s = *state_;
  const platform::Range range("moe_p2p.gather_counts");
  s.require_usable();
  MOE_P2P_CHECK(!s.masks.enabled(), Code::kInvalidArgument,
                "gather_counts is for all ranks, and this communicator goes on without those that "
                "are masked; use one without masks");
  s.waits.latching([&s] { s.backend->check(); }, Waits::always);
  s.waits.latching([&] {
    s.gather.send(values);
    const auto arrived = [&s](int source) { return s.gather.arrived(source); };
    const auto text = [&] {
      const auto progress = [&s](int node) { return s.gather.progress(node); };
      return base::concat(s.gather.call(), " waits for", s.waits.missing(arrived, progress));
    };
    const auto deadline = [&s] { return platform::Clock::now() + s.options.timeout; };
    s.waits.wait([&] { return s.gather.complete(deadline()); }, arrived, text);
    s.gather.read(gathered, deadline());
  });
}

}  // namespace moe_p2p::moe
