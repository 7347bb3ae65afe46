#include "moe/replay/rank.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "moe/host/gather.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe::replay {

using abi::Phase;
using base::Code;
using base::Event;

namespace {

// The order in which a step's phases are waited for.
constexpr std::array kOrder{Phase::kDispatch, Phase::kWeights, Phase::kCombine};
int place_of(Phase phase) {
  return static_cast<int>(std::ranges::find(kOrder, phase) - kOrder.begin());
}

// Its own event has its word.
bool of_farewell(uint32_t imm) {
  const auto key = engine::ImmKey::unpack(imm);
  return (imm & engine::ImmKey::kKeyedBit) != 0 && key.phase == HostGather::kPhase &&
         key.slot == HostGather::kFarewellSlot;
}

uint32_t communicator_of(const Event& event) { return event.detail & 0x1ff; }
Phase phase_of(const Event& event) { return static_cast<Phase>(event.detail >> 9 & 3); }
int part_of(const Event& event) { return event.detail >> 11; }

engine::EngineOptions engine_options(const Rank::Facts& facts, int node) {
  engine::EngineOptions options;
  options.num_nics = static_cast<int>(facts.nics.at(static_cast<size_t>(node)));
  options.label = base::concat("rank ", facts.options.rank);
  return options;
}

Rank::Facts checked(const Rank::Facts& facts) {
  const PlanInput& plan = facts.options.plan;
  (void)make_plan(plan);  // checks the numbers
  const auto num_nodes = static_cast<size_t>(plan.world_size / plan.ranks_per_node);
  MOE_P2P_CHECK(num_nodes > 1, Code::kInvalidArgument,
                "the ranks are of one node: nothing passes their proxies");
  MOE_P2P_CHECK(facts.nics.size() == num_nodes, Code::kInvalidArgument, "NICs of ",
                facts.nics.size(), " nodes, there are ", num_nodes);
  for (const int64_t nics : facts.nics)
    MOE_P2P_CHECK(nics > 0 && nics <= engine::kMaxNics, Code::kInvalidArgument, "a rank has ", nics,
                  " NICs, must be from 1 to ", engine::kMaxNics);
  for (const int64_t rank : facts.masked)
    MOE_P2P_CHECK(rank >= 0 && rank < plan.world_size, Code::kInvalidArgument, "rank ", rank,
                  " is masked, of ", plan.world_size);
  const auto words = static_cast<size_t>(abi::kNumPhases * plan.steps_in_flight * plan.world_size);
  MOE_P2P_CHECK(facts.flags.empty() || facts.flags.size() == words, Code::kInvalidArgument,
                facts.flags.size(), " flags, must be ", words);
  return facts;
}

}  // namespace

Rank::Rank(const Facts& facts)
    : facts_(checked(facts)),
      plan_(make_plan(facts.options.plan)),
      masks_(nullptr),
      memory_(plan_, facts.options.rank, false),
      engine_(engine_options(facts_, memory_.node()),
              [this](const provider::DomainOptions&) {
                auto nic = std::make_unique<Nic>();
                nics_.push_back(nic.get());
                return nic;
              }),
      waits_(plan_, facts_.options, memory_, masks_, engine_),
      kernels_(plan_, memory_, 1, masks_),
      unknown_(static_cast<size_t>(plan_.shape.world_size)) {
  for (const int64_t rank : facts_.masked) unknown_.at(static_cast<size_t>(rank)) = true;
}

Rank::~Rank() {
  if (exchange_) engine_.imm_table().set_sink(facts_.options.communicator, nullptr);
}

void Rank::connect(const std::vector<NodeMemory::Neighbour>& neighbours) {
  memory_.attach(neighbours);
  const int num_local = plan_.shape.ranks_per_node;
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    const auto keeper = static_cast<size_t>(source % num_local);
    const bool own = source / num_local == memory_.node();
    if (own ? facts_.flags.empty() : neighbours[keeper].memory_name.empty())
      unknown_[static_cast<size_t>(source)] = true;
  }
  // Addresses are computed and never used.
  handle_ = engine_.register_memory({memory_.board(memory_.local()), plan_.board.total_bytes});
  const engine::Peer* peer = engine_.connect(engine_.address());
  engine::RemoteRegion region{peer, plan_.regions.total_bytes, {}};
  for (const provider::PeerId id : peer->rails()) region.rails.push_back({id, 0, 0});
  regions_.push_back(region);
  std::vector<Exchange::Remote> remotes;
  for (int node = 0; node < plan_.shape.num_nodes(); ++node)
    if (node != memory_.node())
      remotes.push_back({node, &regions_[0], &regions_[0],
                         static_cast<int>(facts_.nics[static_cast<size_t>(node)])});
  exchange_ = std::make_unique<Exchange>(plan_, memory_, engine_, handle_, handle_,
                                         facts_.options.communicator, std::move(remotes), masks_,
                                         facts_.options.device);
  engine_.imm_table().set_sink(facts_.options.communicator, exchange_.get());
  waits_.set_exchange(exchange_.get());
  begin_at(facts_.first_step);
}

// All that came before is there. Of ranks of the own node the flags are those at the end of the
// recording: nothing that passes a proxy says when they rose.
void Rank::begin_at(uint64_t step) {
  exchange_->begin_at(step);
  const int num_slots = plan_.shape.steps_in_flight;
  size_t i = 0;
  for (int phase = 0; phase < abi::kNumPhases; ++phase)
    for (int slot = 0; slot < num_slots; ++slot)
      for (int source = 0; source < plan_.shape.world_size; ++source, ++i) {
        const auto word = memory_.flag(memory_.local(), static_cast<Phase>(phase), slot, source);
        const bool own = source / plan_.shape.ranks_per_node == memory_.node();
        if (own && !facts_.flags.empty())
          word.store(static_cast<uint64_t>(facts_.flags[i]), std::memory_order_relaxed);
        else
          word.store(Exchange::uses_before(step, slot, num_slots) == 0
                         ? 0
                         : abi::come(Exchange::last_before(step, slot, num_slots)),
                     std::memory_order_relaxed);
      }
}

void Rank::turn() noexcept {
  proxy::ProxyTask* const task = exchange_.get();
  proxy::ProxyThread::turn(engine_, {&task, 1});
}

void Rank::ring(const Event& event) {
  abi::BellWords words{event.b, event.c};
  const int part = part_of(event);
  // Slots with bells of their own were written: the proxy had looked.
  if (part == 0) words.place &= ~uint64_t{(1u << abi::BellWords::kPartsBit) - 1};
  const int node = static_cast<int>(event.peer) / plan_.shape.ranks_per_node;
  const Phase phase = phase_of(event);
  memory_.ring(memory_.local(), phase, event.nic, node, words, part, event.a);
  sent_.insert({event.a, place_of(phase)});
}

void Rank::check(const Event& event) const {
  const bool of_lane =
      event.kind == Event::Kind::kDoorbell || event.kind == Event::Kind::kPublished;
  const auto world_size = static_cast<uint32_t>(plan_.shape.world_size);
  if (of_lane || event.kind == Event::Kind::kFarewell)
    MOE_P2P_CHECK(event.peer < world_size &&
                      static_cast<int>(event.peer) / plan_.shape.ranks_per_node != memory_.node(),
                  Code::kInvalidArgument, "an event of rank ", event.peer, " at rank ",
                  memory_.rank(), ", must be one of another node below ", world_size);
  if (of_lane)
    MOE_P2P_CHECK(event.nic < plan_.shape.steps_in_flight && place_of(phase_of(event)) < 3 &&
                      part_of(event) <= abi::kMaxParts - (event.kind == Event::Kind::kDoorbell),
                  Code::kInvalidArgument, "an event of step slot ", int{event.nic}, ", part ",
                  part_of(event), " and phase ", static_cast<int>(phase_of(event)),
                  " does not fit ", plan_.shape.steps_in_flight, " steps in flight");
  else
    MOE_P2P_CHECK(event.nic < nics_.size(), Code::kInvalidArgument, "an event of NIC ",
                  int{event.nic}, ", there are ", nics_.size());
  MOE_P2P_CHECK(
      event.kind != Event::Kind::kCompleted || event.detail <= static_cast<int>(Code::kCancelled),
      Code::kInvalidArgument, "a completion with code ", event.detail);
}

// Posts have a name here once the recorded NIC took them, and arrivals a word.
std::string Rank::compare(const Event& event) const {
  if (event.kind == Event::Kind::kPosted)
    return nics_.at(event.nic)->name(static_cast<uint32_t>(event.c), event.b, event.a)
               ? ""
               : base::concat("was recorded to post ", event.b, " bytes with immediate ", event.c,
                              " at NIC ", int{event.nic}, ", and does not here");
  if (event.kind != Event::Kind::kPublished) return "";
  const uint64_t word =
      memory_.flag(memory_.local(), phase_of(event), event.nic, static_cast<int>(event.peer))
          .load(std::memory_order_relaxed);
  if (word >= event.b) return "";
  return base::concat("was recorded to publish ", phase_name(phase_of(event)), " of step ", event.a,
                      " of rank ", event.peer, " (word ", event.b, "), and does not here (word ",
                      word, ")");
}

std::string Rank::feed(const Event& event) {
  check(event);
  switch (event.kind) {
    case Event::Kind::kDoorbell: ring(event); break;
    case Event::Kind::kCompleted:
      nics_[event.nic]->complete(event.a, event.b,
                                 {static_cast<Code>(event.detail), static_cast<int32_t>(event.c)});
      break;
    case Event::Kind::kImmediate:
      if (event.detail != 0 && !of_farewell(static_cast<uint32_t>(event.a)))
        nics_[event.nic]->arrive(static_cast<uint32_t>(event.a));
      break;
    case Event::Kind::kFarewell: {
      const int node = static_cast<int>(event.peer) / plan_.shape.ranks_per_node;
      memory_.farewell_in(node).store(event.a, std::memory_order_relaxed);
      const engine::ImmKey key{communicator_of(event), HostGather::kPhase,
                               HostGather::kFarewellSlot, event.peer};
      nics_[0]->arrive(key.pack());
      break;
    }
    case Event::Kind::kSpan: break;  // of a caller's thread
    case Event::Kind::kPosted:
    case Event::Kind::kRefused:
    case Event::Kind::kPublished: return compare(event);
  }
  turn();
  turn();  // finishes what completed in the first
  return "";
}

std::vector<std::string> Rank::waits() {
  std::vector<std::string> lines;
  for (auto sent = sent_.begin(); sent != sent_.end();) {
    const Phase phase = kOrder[static_cast<size_t>(sent->second)];
    const Pending pending{Step::of(sent->first, plan_.shape.steps_in_flight), phase};
    const auto arrived = [&](int source) {
      return unknown_[static_cast<size_t>(source)] || kernels_.arrived(pending.step, phase, source);
    };
    bool all = true;
    for (int source = 0; source < plan_.shape.world_size; ++source) all = all && arrived(source);
    if (all) {
      sent = sent_.erase(sent);
      continue;
    }
    ++sent;
    const auto text = [&] { return waits_.waiting_for(pending, arrived); };
    try {
      waits_.check_abort([&] { return "; " + text(); });
      waits_.check_neighbours(arrived, text);
      lines.push_back(base::concat("rank ", memory_.rank(), ": ", text()));
    } catch (const base::Error& error) {
      lines.push_back(error.what());
    }
  }
  return lines;
}

size_t Rank::num_untaken() const noexcept {
  return std::accumulate(nics_.begin(), nics_.end(), size_t{0},
                         [](size_t sum, const Nic* nic) { return sum + nic->num_unnamed(); });
}

}  // namespace moe_p2p::moe::replay
