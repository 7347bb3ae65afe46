// Partners of an Exchange: whether they are there (probes), and how either side closes (farewells).
// Its own writes and arrivals are in exchange.cpp.
#include "base/mutation.h"
#include "moe/host/gather.h"
#include "moe/node/exchange.h"

namespace moe_p2p::moe {

using abi::Phase;

namespace {

// After a failed probe: requests sooner than kSoon may predate an arrival; requests later than
// kLater belong to another wait.
constexpr auto kSoon = Exchange::kProbeInterval / 2, kLater = Exchange::kProbeInterval * 2;
// Turns between two clock reads of a thread that never sleeps: a read costs more than a turn.
constexpr uint32_t kTurns = 1u << 12;

// A farewell is one word, not 0: how many writes its sender made, and above kOrderBits how it left.
constexpr int kOrderBits = 2;

}  // namespace

// --- probes --------------------------------------------------------------------------------------

void Exchange::probe(int node) noexcept {
  partner_of(node).probe_wanted.store(true, std::memory_order_relaxed);
  probing_.store(true, std::memory_order_release);  // pairs with take_probes()
  platform::notify_all(engine_.waker());
}

// Returns a lane whose last step this rank has sent and the partner has not.
const Exchange::Lane* Exchange::owed_by(int node) const noexcept {
  const int index = abi::other_index(node, memory_.node());
  for (int phase = 0; phase < abi::kNumPhases; ++phase)
    for (int slot = 0; slot < plan_.shape.steps_in_flight; ++slot) {
      const Lane& lane = this->lane(static_cast<Phase>(phase), slot, index);
      // relaxed: only this thread writes it.
      const uint64_t flag = memory_.flag(memory_.local(), lane.phase, slot, rank_of(node))
                                .load(std::memory_order_relaxed);
      if (flag < lane.parts[0].word * abi::kMaxParts) return &lane;
    }
  return nullptr;
}

void Exchange::take_probes() noexcept {
  if (device_ && ++turns_ % kTurns == 0 && platform::Clock::now() >= next_probe_) {
    next_probe_ = platform::Clock::now() + kProbeInterval;
    for (const Remote& remote : remotes_)
      if (owed_by(remote.node)) probe(remote.node);
  }
  if (!probing_.load(std::memory_order_relaxed)) return;
  bool busy = false;
  probing_.exchange(false, std::memory_order_acquire);  // pairs with probe()
  for (const Remote& remote : remotes_) {
    Partner& partner = partner_of(remote.node);
    const bool wanted = partner.probe_wanted.exchange(false, std::memory_order_relaxed);
    if (partner.probing) {
      partner.probing = !partner.probe.done();
      busy |= partner.probing;
      if (partner.probing) continue;
      partner.probe_status = partner.probe.status();
      partner.probed = platform::Clock::now();
    }
    if (!wanted || masks_.has(rank_of(remote.node)) || partner_left(remote.node)) continue;
    const auto age = platform::Clock::now() - partner.probed;
    if (!partner.probe_status.ok() && age < kLater) {
      const Lane* lane = owed_by(remote.node);
      if (age >= kSoon)
        fail({remote.node, Failure::Kind::kProbe, lane ? lane->phase : Phase{},
              lane ? lane->parts[0].word - 1 : 0, partner.probe_status});
      continue;
    }
    const engine::ImmKey key{communicator_, HostGather::kPhase, HostGather::kProbeSlot,
                             static_cast<uint32_t>(memory_.rank())};
    partner.probe.operation =  // through every NIC
        engine::Write{.source = data_, .target = remote.region, .bytes = 0, .imm = key.pack()};
    partner.probing = busy = true;
    engine_.submit_from_poller(partner.probe);
  }
  if (busy) probing_.store(true, std::memory_order_relaxed);
}

// --- this rank closes ----------------------------------------------------------------------------

void Exchange::leave(const Closing& closing) noexcept {
  leaving_ = true;
  closing_ = closing;
  closing_.combines = {};
  for (size_t i = 0; i < num_lanes_; ++i) lanes_[i].wanted = 0;
  for (const Step& step : closing.combines)
    for (size_t i = 0; i < remotes_.size(); ++i)
      lane(Phase::kCombine, step.slot, static_cast<int>(i)).wanted = step.word();
}

// Everything that was rung for the node has arrived there, and nothing more will be rung.
bool Exchange::all_arrived(int node) const noexcept {
  for (int phase = 0; phase < abi::kNumPhases; ++phase)
    for (int slot = 0; slot < plan_.shape.steps_in_flight; ++slot) {
      const Lane& lane =
          this->lane(static_cast<Phase>(phase), slot, abi::other_index(node, memory_.node()));
      if (lane.acknowledged < lane.wanted) return false;
      for (int i = 0; i < most_parts(lane); ++i)
        if (lane.parts[i].busy ||
            (may_ring(lane, i) && bell(lane, i).tag() != static_cast<uint32_t>(lane.parts[i].word)))
          return false;
    }
  return true;
}

bool Exchange::part_from(const Remote& remote) noexcept {
  Partner& partner = partner_of(remote.node);
  if (partner.parting == Partner::Parting::kDone) return false;
  const bool needs_nothing =
      partner_left(remote.node) || partner.lost || masks_.has(rank_of(remote.node)) ||
      (failed_.load(std::memory_order_relaxed) && MOE_P2P_MUTATED(kFailByLeft));
  if (!needs_nothing && partner.parting == Partner::Parting::kNo) {
    const std::optional<uint64_t> gathers = closing_.gathers ? closing_.gathers(remote.node) : 0;
    if ((!gathers || !all_arrived(remote.node)) && !MOE_P2P_MUTATED(kFarewellEarly)) return false;
    const Left left = closing_.failed ? Left::kFailed : Left::kInOrder;
    // The NICs read it once they have the write.
    memory_.farewell_out(remote.node)
        .store((partner.written + gathers.value_or(0)) << kOrderBits | static_cast<uint64_t>(left),
               std::memory_order_relaxed);
    const engine::ImmKey key{communicator_, HostGather::kPhase, HostGather::kFarewellSlot,
                             static_cast<uint32_t>(memory_.rank())};
    const abi::u64 to = plan_.board.farewell_in + 8 * static_cast<uint64_t>(memory_.node());
    partner.farewell.operation = engine::Write{
        .source = board_,
        .source_offset = plan_.board.farewell_out + 8 * static_cast<uint64_t>(remote.node),
        .target = remote.board,
        .target_offset = to,
        .bytes = sizeof(uint64_t),
        .imm = key.pack()};
    partner.parting = Partner::Parting::kSent;
    engine_.submit_from_poller(partner.farewell);
    return true;
  }
  // Whether or not it arrived, nothing is left to do.
  if (!needs_nothing && !partner.farewell.done()) return false;
  partner.parting = Partner::Parting::kDone;
  // release: pairs with the acquire in has_left().
  num_parted_.fetch_add(1, std::memory_order_release);
  return true;
}

bool Exchange::has_left() const noexcept {
  return num_parted_.load(std::memory_order_acquire) == remotes_.size();  // pairs with part_from()
}

bool Exchange::settle(bool turn, platform::Deadline deadline) noexcept {
  const auto settled = [&](engine::Request& request) {
    while (!request.done()) {
      if (turn) engine_.progress();
      if (turn ? platform::Clock::now() >= deadline : !request.wait(deadline)) return false;
    }
    return true;
  };
  for (size_t i = 0; i < num_lanes_; ++i)
    for (Part& part : lanes_[i].parts)
      if (part.busy && !settled(part.request)) return false;
  for (size_t i = 0; i < remotes_.size(); ++i)
    for (engine::Request* request : {&partners_[i].probe, &partners_[i].farewell})
      if (request->active() && !settled(*request)) return false;
  return true;
}

// --- a partner closes ----------------------------------------------------------------------------

// Its farewell may arrive before the farewell's immediates. When the partner is gone, and writes to
// it fail for that, the farewell is here: the partner left after it had arrived (provider.h,
// assumption 2).
bool Exchange::partner_left(int node) noexcept {
  Partner& partner = partner_of(node);
  if (!partner.left) partner.left = memory_.farewell_in(node).load(std::memory_order_relaxed) != 0;
  return partner.left;
}

// Its farewell may also overtake earlier writes. So this rank reports it to its node once all the
// partner's immediates have arrived, and their flags are up: what is missing then never arrives.
bool Exchange::publish_left() noexcept {
  bool moved = false;
  for (const Remote& remote : remotes_) {
    Partner& partner = partner_of(remote.node);
    const auto nics = static_cast<uint64_t>(remote.num_nics);
    if (partner.complete || partner.farewells < nics) continue;
    partner.left = true;
    const uint64_t word = memory_.farewell_in(remote.node).load(std::memory_order_relaxed);
    const bool all_here = partner.received >= (word >> kOrderBits) * nics;
    if (!all_here && !MOE_P2P_MUTATED(kFarewellOvertakes)) continue;
    partner.complete = moved = true;
    // release: pairs with the acquire in Waits::silent(), which then finds the flags too.
    memory_.left(memory_.local(), remote.node)
        .store(word & ((1u << kOrderBits) - 1), std::memory_order_release);
    for (int l = 0; l < memory_.num_local(); ++l) platform::notify_all(memory_.bell(l));
    check_left(remote.node);
  }
  return moved;
}

// Kernels of a GPU cannot see why a partner does not arrive: so this rank fails for the kernel when
// it has sent a step and the partner has left without sending it.
void Exchange::check_left(int node) noexcept {
  if (!device_ || !partner_of(node).complete) return;
  if (const Lane* lane = owed_by(node))
    fail({node,
          Failure::Kind::kLeft,
          lane->phase,
          lane->parts[0].word - 1,
          {base::Code::kPeerDead, 0}});
}

}  // namespace moe_p2p::moe
