#include "moe/exchange.h"

#include "base/mutation.h"

namespace moe_p2p::moe {

using abi::Phase;

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
      lanes_(std::make_unique<Lane[]>(num_lanes_)) {
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

const Exchange::Remote& Exchange::remote_of(const Lane& lane) const noexcept {
  return remotes_[static_cast<size_t>(abi::other_index(lane.node, memory_.node()))];
}

int Exchange::rank_of(const Lane& lane) const noexcept {
  return lane.node * plan_.shape.ranks_per_node + memory_.local();
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

bool Exchange::take(Lane& lane) noexcept {
  abi::Doorbell& bell = memory_.doorbell(memory_.local(), lane.phase, lane.slot, lane.node);
  // acquire: pairs with HostKernels::ring(); the region and its length are complete.
  const uint64_t word = std::atomic_ref(bell.word).load(std::memory_order_acquire);
  if (word == lane.word) return false;
  lane.word = word;
  if (masks_.has(rank_of(lane))) return false;
  // By the plan, because a GPU's regions have no address here. All ranks share one plan, so the other
  // end is computed as that rank would: this node's place among the nodes other than *its* own.
  const Road road = road_of(plan_, lane.phase);
  const uint64_t slot = static_cast<uint64_t>(lane.slot) * plan_.regions.step_bytes;
  const auto from = static_cast<uint64_t>(abi::other_index(lane.node, memory_.node()));
  const auto to = static_cast<uint64_t>(abi::other_index(memory_.node(), lane.node));
  const engine::ImmKey key{communicator_, static_cast<uint32_t>(lane.phase),
                           static_cast<uint32_t>(lane.slot), static_cast<uint32_t>(memory_.rank())};
  lane.request.operation = engine::Write{
      .source = data_,
      .source_offset = slot + road.outbox + from * road.region_bytes,
      .target = remote_of(lane).region,
      .target_offset = slot + road.landing + to * road.region_bytes,
      .bytes = bell.bytes,
      .imm = key.pack(),
  };
  lane.busy = true;
  engine_.submit_from_poller(lane.request);
  return true;
}

void Exchange::finish(Lane& lane) noexcept {
  lane.busy = false;
  if (lane.request.status().ok()) {
    // release: pairs with the acquire in sent().
    lane.acknowledged.store(lane.word, std::memory_order_release);
    return;
  }
  if (masks_.enabled()) {
    masks_.add(rank_of(lane));
    platform::notify_all(memory_.bell(memory_.local()));
    return;
  }
  if (failed_.load(std::memory_order_relaxed)) return;  // only this thread writes it
  failure_ = {lane.node, lane.phase, lane.request.status()};
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
    if (lane.busy) {
      if (!lane.request.done()) continue;
      finish(lane);
      moved = true;
    }
    if (take(lane)) moved = true;
  }
  return moved;
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
  lane(static_cast<Phase>(key.phase), static_cast<int>(key.slot),
       abi::other_index(node, memory_.node()))
      .immediates.fetch_add(1,
                            std::memory_order_relaxed);  // other threads read it for stories only
  dirty_ = true;
}

// Of the step whose immediates are complete. Dispatch and combine come with every use of a slot. Not
// every step has weights, but the combine of the slot's last use has left here, because the source had
// it before it began this one, and that of this one waits for the weights: so it is the use that
// follows the last doorbell of combine.
uint64_t Exchange::next_word(const Lane& lane) const noexcept {
  const auto slot = static_cast<uint64_t>(lane.slot);
  const auto steps = static_cast<uint64_t>(plan_.shape.steps_in_flight);
  if (lane.phase != Phase::kWeights || MOE_P2P_MUTATED(kWeightsInEveryStep))
    return slot + lane.published * steps + 1;
  const uint64_t combined =
      this->lane(Phase::kCombine, lane.slot, abi::other_index(lane.node, memory_.node())).word;
  return combined == 0 ? slot + 1 : combined + steps;
}

void Exchange::publish(Lane& lane) noexcept {
  const uint64_t word = next_word(lane);
  ++lane.published;
  const int source = rank_of(lane);
  // release: pairs with the acquire in HostKernels::arrived(). The payload is visible to this thread
  // (provider.h, assumption 1), so it is to whoever acquires the flag.
  memory_.flag(memory_.local(), lane.phase, lane.slot, source)
      .store(word, std::memory_order_release);
  const bool whole_node = lane.phase != Phase::kCombine;
  for (int l = 0; l < memory_.num_local(); ++l)
    if (whole_node || l == memory_.local()) platform::notify_all(memory_.bell(l));
}

bool Exchange::publish_arrivals() noexcept {
  if (!dirty_) return false;
  dirty_ = false;
  bool moved = false;
  for (size_t i = 0; i < num_lanes_; ++i) {
    Lane& lane = lanes_[i];
    const auto per_step = static_cast<uint64_t>(
        MOE_P2P_MUTATED(kPublishBeforePayload) ? 1 : remote_of(lane).num_nics);
    while (lane.immediates.load(std::memory_order_relaxed) >= (lane.published + 1) * per_step) {
      publish(lane);
      moved = true;
    }
  }
  return moved;
}

bool Exchange::settle(bool turn, platform::Deadline deadline) noexcept {
  for (size_t i = 0; i < num_lanes_; ++i) {
    engine::Request& request = lanes_[i].request;
    while (lanes_[i].busy && !request.done()) {
      if (turn) engine_.progress();
      if (turn ? platform::Clock::now() >= deadline : !request.wait(deadline)) return false;
    }
  }
  return true;
}

// --- any thread ----------------------------------------------------------------------------------

Exchange::Failure Exchange::failure() const noexcept {
  return failed_.load(std::memory_order_acquire) ? failure_ : Failure{};  // pairs with finish()
}

uint64_t Exchange::immediates(Phase phase, int slot, int node) const noexcept {
  const Lane& from = lane(phase, slot, abi::other_index(node, memory_.node()));
  return from.immediates.load(std::memory_order_relaxed) %
         static_cast<uint64_t>(remote_of(from).num_nics);
}

bool Exchange::sent(Phase phase, int slot, uint64_t word) const noexcept {
  for (size_t i = 0; i < remotes_.size(); ++i) {
    const Lane& to = lane(phase, slot, static_cast<int>(i));
    if (to.acknowledged.load(std::memory_order_acquire) < word && !masks_.has(rank_of(to)))
      return false;  // acquire: pairs with finish()
  }
  return true;
}

bool Exchange::sent_weights(int slot) const noexcept {
  for (size_t i = 0; i < remotes_.size(); ++i) {
    abi::Doorbell& bell =
        memory_.doorbell(memory_.local(), Phase::kWeights, slot, remotes_[i].node);
    // relaxed: whoever rang is done with it.
    const uint64_t rung = std::atomic_ref(bell.word).load(std::memory_order_relaxed);
    const Lane& to = lane(Phase::kWeights, slot, static_cast<int>(i));
    if (to.acknowledged.load(std::memory_order_acquire) < rung && !masks_.has(rank_of(to)))
      return false;  // acquire: pairs with finish()
  }
  return true;
}

}  // namespace moe_p2p::moe
