#include "moe/exchange.h"

#include "base/mutation.h"
#include "moe/host_gather.h"

namespace moe_p2p::moe {

using abi::Phase;

namespace {

static_assert(abi::kMaxParts <= engine::ImmKey::kMaxParts);

// After a knock in vain: whoever asks before the first may not have seen what came at the same time,
// and whoever asks after the second waits for something else.
constexpr auto kSoon = Exchange::kKnock / 2, kLater = Exchange::kKnock * 2;
// Of a thread that never sleeps, between two looks at the clock: they cost more than a turn.
constexpr uint32_t kTurns = 1u << 12;

}  // namespace

Exchange::Exchange(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
                   const engine::MemoryHandle* data, uint32_t communicator,
                   std::vector<Remote> remotes, const Masks& masks, bool device)
    : plan_(plan),
      memory_(memory),
      engine_(engine),
      data_(data),
      communicator_(communicator),
      remotes_(std::move(remotes)),
      masks_(masks),
      device_(device),
      num_lanes_(static_cast<size_t>(abi::kNumPhases * plan.shape.steps_in_flight) *
                 remotes_.size()),
      lanes_(std::make_unique<Lane[]>(num_lanes_)),
      knocks_(std::make_unique<Knock[]>(remotes_.size())) {
  size_t i = 0;
  for (int phase = 0; phase < abi::kNumPhases; ++phase)
    for (int slot = 0; slot < plan.shape.steps_in_flight; ++slot)
      for (const Remote& remote : remotes_) {
        Lane& lane = lanes_[i++];
        lane.phase = static_cast<Phase>(phase);
        lane.slot = slot;
        lane.node = remote.node;
      }
}

Exchange::Lane& Exchange::lane(Phase phase, int slot, int index) const noexcept {
  const auto row =
      static_cast<size_t>(static_cast<int>(phase) * plan_.shape.steps_in_flight + slot);
  return lanes_[row * remotes_.size() + static_cast<size_t>(index)];
}

Exchange::Knock& Exchange::knock_of(int node) const noexcept {
  return knocks_[static_cast<size_t>(abi::other_index(node, memory_.node()))];
}

const Exchange::Remote& Exchange::remote_of(int node) const noexcept {
  return remotes_[static_cast<size_t>(abi::other_index(node, memory_.node()))];
}

int Exchange::rank_of(int node) const noexcept {
  return node * plan_.shape.ranks_per_node + memory_.local();
}

// --- sending -----------------------------------------------------------------------------------

namespace {

// Where a phase's regions begin at the sender and at the receiver, and their size.
struct Road {
  uint64_t outbox;
  uint64_t landing;
  uint64_t region_bytes;
};

Road road_of(const Plan& plan, Phase phase) noexcept {
  const abi::Regions& r = plan.regions;
  switch (phase) {
    case Phase::kDispatch: return {r.outbox, r.landing, abi::outbox_bytes(plan.shape)};
    case Phase::kCombine:
      return {r.combine_outbox, r.combine_landing, abi::partial_bytes(plan.shape)};
    case Phase::kWeights: break;
  }
  return {r.weights_outbox, r.weights_landing, abi::weights_bytes(plan.shape)};
}

}  // namespace

// Weights are few.
int Exchange::most_parts(const Lane& lane) noexcept {
  return lane.phase == Phase::kWeights ? 1 : abi::kMaxParts;
}

// acquire: pairs with HostKernels::ring(); the part is complete.
abi::BellWords Exchange::bell(const Lane& lane, int index) const noexcept {
  abi::BellWords& words =
      memory_.doorbell(memory_.local(), lane.phase, lane.slot, lane.node).part[index];
  return {std::atomic_ref(words.size).load(std::memory_order_acquire),
          std::atomic_ref(words.place).load(std::memory_order_acquire)};
}

bool Exchange::take(Lane& lane, int index) noexcept {
  Part& part = lane.parts[index];
  const abi::BellWords sent = bell(lane, index);
  const uint32_t steps = sent.tag() - static_cast<uint32_t>(part.word);  // since the last one taken
  if (steps == 0 || !sent.whole()) return false;
  part.word += steps;
  if (masks_.has(rank_of(lane.node))) return false;
  part.num_parts = sent.num_parts();
  // By the plan, because a GPU's regions have no address here. All ranks share one plan, so the other
  // end is computed as that rank would: this node's place among the nodes other than *its* own.
  const Road road = road_of(plan_, lane.phase);
  const uint64_t slot = static_cast<uint64_t>(lane.slot) * plan_.regions.step_bytes;
  const auto from = static_cast<uint64_t>(abi::other_index(lane.node, memory_.node()));
  const auto to = static_cast<uint64_t>(abi::other_index(memory_.node(), lane.node));
  const auto i = static_cast<uint32_t>(index);
  const engine::ImmKey key{communicator_,
                           static_cast<uint32_t>(lane.phase),
                           static_cast<uint32_t>(lane.slot),
                           static_cast<uint32_t>(memory_.rank()),
                           i,
                           i + 1 == part.num_parts};
  part.request.operation = engine::Write{
      .source = data_,
      .source_offset = slot + road.outbox + from * road.region_bytes + sent.begin(),
      .target = remote_of(lane.node).region,
      .target_offset = slot + road.landing + to * road.region_bytes + sent.begin(),
      .bytes = sent.bytes(),
      .imm = key.pack(),
  };
  part.busy = true;
  engine_.submit_from_poller(part.request);
  return true;
}

void Exchange::finish(Lane& lane, Part& part) noexcept {
  if (!part.request.status().ok()) return fail({lane.node, lane.phase, part.request.status()});
  part.acknowledged = part.word;
  for (uint64_t i = 0; i < part.num_parts; ++i)
    if (lane.parts[i].acknowledged < part.word) return;
  // release: pairs with the acquire in sent().
  lane.acknowledged.store(part.word, std::memory_order_release);
}

void Exchange::fail(const Failure& failure) noexcept {
  if (masks_.enabled()) {
    masks_.add(rank_of(failure.node));
    platform::notify_all(memory_.bell(memory_.local()));
    return;
  }
  if (failed_.load(std::memory_order_relaxed)) return;  // only this thread writes it
  failure_ = failure;
  failed_.store(true, std::memory_order_release);  // pairs with failure()
  for (int l = 0; l < memory_.num_local(); ++l) {
    // The whole node stops waiting: whom this rank cannot reach, its neighbours will miss too.
    std::atomic_ref(memory_.head(l).abort)
        .store(1 + static_cast<uint64_t>(memory_.rank()), std::memory_order_release);
    platform::notify_all(memory_.bell(l));
  }
}

bool Exchange::take_doorbells() noexcept {
  bool moved = false;
  for (size_t i = 0; i < num_lanes_; ++i) {
    Lane& lane = lanes_[i];
    for (int p = 0; p < most_parts(lane); ++p) {
      Part& part = lane.parts[p];
      if (part.busy) {
        if (!part.request.done()) continue;
        part.busy = false;
        finish(lane, part);
        moved = true;
      }
      if (take(lane, p)) moved = true;
    }
  }
  take_knocks();
  return moved;
}

// --- knocking ------------------------------------------------------------------------------------

void Exchange::knock(int node) noexcept {
  knock_of(node).wanted.store(true, std::memory_order_relaxed);
  knocking_.store(true, std::memory_order_release);  // pairs with take_knocks()
  platform::notify_all(engine_.waker());
}

// What the node was sent of some step has not been answered in kind.
bool Exchange::owes(int node) const noexcept {
  for (const Phase phase : {Phase::kDispatch, Phase::kCombine})
    for (int slot = 0; slot < plan_.shape.steps_in_flight; ++slot) {
      const Lane& lane = this->lane(phase, slot, abi::other_index(node, memory_.node()));
      if (next_step(lane) < lane.parts[0].word) return true;
    }
  return false;
}

void Exchange::take_knocks() noexcept {
  if (device_ && ++turns_ % kTurns == 0 && platform::Clock::now() >= next_knock_) {
    next_knock_ = platform::Clock::now() + kKnock;
    for (const Remote& remote : remotes_)
      if (owes(remote.node)) knock(remote.node);
  }
  if (!knocking_.load(std::memory_order_relaxed)) return;
  bool busy = false;
  knocking_.exchange(false, std::memory_order_acquire);  // pairs with knock()
  for (const Remote& remote : remotes_) {
    Knock& knock = knock_of(remote.node);
    const bool wanted = knock.wanted.exchange(false, std::memory_order_relaxed);
    if (knock.busy) {
      knock.busy = !knock.request.done();
      busy |= knock.busy;
      if (knock.busy) continue;
      knock.failed = knock.request.status();
      knock.ended = platform::Clock::now();
    }
    if (!wanted || masks_.has(rank_of(remote.node))) continue;
    const auto age = platform::Clock::now() - knock.ended;
    if (!knock.failed.ok() && age < kLater) {
      if (age >= kSoon) fail({remote.node, {}, knock.failed});
      continue;
    }
    const engine::ImmKey key{communicator_, HostGather::kPhase, HostGather::kKnockSlot,
                             static_cast<uint32_t>(memory_.rank())};
    knock.request.operation =  // through every NIC
        engine::Write{.source = data_, .target = remote.region, .bytes = 0, .imm = key.pack()};
    knock.busy = busy = true;
    engine_.submit_from_poller(knock.request);
  }
  if (busy) knocking_.store(true, std::memory_order_relaxed);
}

// --- receiving -----------------------------------------------------------------------------------

void Exchange::on_imm(const engine::ImmKey& key) noexcept {
  int node = static_cast<int>(key.source) / plan_.shape.ranks_per_node;
  const int local = static_cast<int>(key.source) % plan_.shape.ranks_per_node;
  if (MOE_P2P_MUTATED(kCountWithoutSource)) node = remotes_.front().node;
  const bool valid = key.phase < abi::kNumPhases &&
                     key.slot < static_cast<uint32_t>(plan_.shape.steps_in_flight) &&
                     node < plan_.shape.num_nodes() && node != memory_.node() &&
                     local == memory_.local();
  if (!valid) return;  // not from a rank of this communicator
  Lane& from = lane(static_cast<Phase>(key.phase), static_cast<int>(key.slot),
                    abi::other_index(node, memory_.node()));
  const uint64_t num_parts = key.part + 1;
  ++from.parts[key.part].immediates;
  from.heard_last |= key.is_last;
  from.immediates.fetch_add(1, std::memory_order_relaxed);
  if (num_parts > from.num_heard.load(std::memory_order_relaxed))
    from.num_heard.store(num_parts, std::memory_order_relaxed);
  dirty_ = true;
}

// The one whose immediates are coming. Dispatch and combine come with every use of a slot. Not
// every step has weights, but the combine of the slot's last use has left here, because the source had
// it before it began this one, and that of this one waits for the weights: so it is the use that
// follows the last doorbell of combine.
uint64_t Exchange::next_step(const Lane& lane) const noexcept {
  const auto slot = static_cast<uint64_t>(lane.slot);
  const auto steps = static_cast<uint64_t>(plan_.shape.steps_in_flight);
  if (lane.phase != Phase::kWeights || MOE_P2P_MUTATED(kWeightsInEveryStep))
    return slot + lane.published * steps;
  const Lane& combine =
      this->lane(Phase::kCombine, lane.slot, abi::other_index(lane.node, memory_.node()));
  const uint64_t combined = combine.parts[0].word;
  return combined == 0 ? slot : combined - 1 + steps;
}

// True when more parts are here than the flag counts. Those of the slot's next use cannot be among
// them: its source begins that once it knows that this one was received.
bool Exchange::publish(Lane& lane) noexcept {
  const auto nics = static_cast<uint64_t>(
      MOE_P2P_MUTATED(kPublishBeforePayload) ? 1 : remote_of(lane.node).num_nics);
  int here = 0;
  while (here < most_parts(lane) && lane.parts[here].immediates >= nics) ++here;
  const auto num_heard = static_cast<int>(lane.num_heard.load(std::memory_order_relaxed));
  if (MOE_P2P_MUTATED(kLastPartIsAll) && lane.heard_last &&
      lane.parts[num_heard - 1].immediates >= nics)
    here = num_heard;
  if (here == lane.told) return false;
  const uint64_t step = next_step(lane);
  const bool whole = lane.heard_last && here == num_heard;
  const uint64_t word =
      whole ? abi::come(step) : step * abi::kMaxParts + static_cast<uint64_t>(here);
  lane.told = whole ? 0 : here;
  if (whole) {
    for (Part& part : std::span(lane.parts).first(static_cast<size_t>(here))) {
      part.immediates -= nics;
      lane.immediates.fetch_sub(nics, std::memory_order_relaxed);
    }
    lane.num_heard.store(1, std::memory_order_relaxed);
    lane.heard_last = false;
    ++lane.published;
  }
  const int source = rank_of(lane.node);
  // release: pairs with the acquire in HostKernels::arrived(). The payload is visible to this thread
  // (provider.h, assumption 1), so it is to whoever acquires the flag.
  memory_.flag(memory_.local(), lane.phase, lane.slot, source)
      .store(word, std::memory_order_release);
  const bool whole_node = lane.phase != Phase::kCombine;
  for (int l = 0; l < memory_.num_local(); ++l)
    if (whole_node || l == memory_.local()) platform::notify_all(memory_.bell(l));
  return true;
}

bool Exchange::publish_arrivals() noexcept {
  if (!dirty_) return false;
  dirty_ = false;
  bool moved = false;
  for (size_t i = 0; i < num_lanes_; ++i)
    if (publish(lanes_[i])) moved = true;
  return moved;
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
    if (knocks_[i].busy && !settled(knocks_[i].request)) return false;
  return true;
}

// --- any thread ----------------------------------------------------------------------------------

Exchange::Failure Exchange::failure() const noexcept {
  return failed_.load(std::memory_order_acquire) ? failure_ : Failure{};  // pairs with fail()
}

std::string Exchange::immediates(Phase phase, int slot, int node) const {
  const Lane& from = lane(phase, slot, abi::other_index(node, memory_.node()));
  return base::concat(from.immediates.load(std::memory_order_relaxed), " of ",
                      from.num_heard.load(std::memory_order_relaxed) *
                          static_cast<uint64_t>(remote_of(node).num_nics));
}

bool Exchange::sent(Phase phase, int slot, uint64_t word) const noexcept {
  for (size_t i = 0; i < remotes_.size(); ++i) {
    const Lane& to = lane(phase, slot, static_cast<int>(i));
    if (to.acknowledged.load(std::memory_order_acquire) < word && !masks_.has(rank_of(to.node)))
      return false;  // acquire: pairs with finish()
  }
  return true;
}

bool Exchange::sent_weights(int slot) const noexcept {
  for (size_t i = 0; i < remotes_.size(); ++i) {
    const Lane& to = lane(Phase::kWeights, slot, static_cast<int>(i));
    const auto sent = static_cast<uint32_t>(to.acknowledged.load(std::memory_order_acquire));
    if (bell(to, 0).tag() != sent && !masks_.has(rank_of(to.node)))
      return false;  // acquire: pairs with finish()
  }
  return true;
}

}  // namespace moe_p2p::moe
