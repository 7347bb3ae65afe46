#include "moe/node/exchange.h"

#include <algorithm>
#include <utility>

#include "base/mutation.h"
#include "moe/host/gather.h"

namespace moe_p2p::moe {

using abi::Phase;

namespace {

static_assert(abi::kMaxParts <= engine::ImmKey::kMaxParts);

}  // namespace

Exchange::Exchange(const Plan& plan, NodeMemory& memory, engine::TransferEngine& engine,
                   const engine::MemoryHandle* data, const engine::MemoryHandle* board,
                   uint32_t communicator, std::vector<Remote> remotes, const Masks& masks,
                   bool device)
    : plan_(plan),
      memory_(memory),
      engine_(engine),
      data_(data),
      board_(board),
      communicator_(communicator),
      remotes_(std::move(remotes)),
      masks_(masks),
      device_(device),
      num_lanes_(static_cast<size_t>(abi::kNumPhases * plan.shape.steps_in_flight) *
                 remotes_.size()),
      lanes_(std::make_unique<Lane[]>(num_lanes_)),
      partners_(std::make_unique<Partner[]>(remotes_.size())),
      rows_(static_cast<size_t>(abi::kNumPhases * plan.shape.steps_in_flight)) {
  open_.reserve(num_lanes_);  // the proxy thread does not allocate
  touched_.reserve(num_lanes_);
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

Exchange::Partner& Exchange::partner_of(int node) const noexcept {
  return partners_[static_cast<size_t>(abi::other_index(node, memory_.node()))];
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

// acquire: pairs with ring_slot() of kernels. Slots that ring for themselves are written; others
// are behind the bell.
bool Exchange::slots_written(const Lane& lane, const abi::BellWords& sent,
                             int part) const noexcept {
  const uint32_t tag = abi::bell_tag_of(sent.tag());
  for (int i = std::min(sent.own_bells(part), abi::kOwnBells) - 1; i >= 0; --i)
    if (memory_.slot_bell(memory_.local(), lane.phase, lane.slot, lane.node, i)
            .load(std::memory_order_acquire) != tag)
      return false;
  return true;
}

bool Exchange::take(Lane& lane, int index) noexcept {
  Part& part = lane.parts[index];
  const abi::BellWords sent = bell(lane, index);
  const uint32_t steps = sent.tag() - static_cast<uint32_t>(part.word);  // since the last one taken
  if (steps == 0 || !sent.whole() || !slots_written(lane, sent, index)) return false;
  if (index == 0 && !may_answer(lane, part.word + steps - 1)) return false;
  part.word += steps;
  part.num_parts = sent.num_parts();
  record(base::Event::Kind::kDoorbell, lane, index, part.word - 1, sent.size, sent.place);
  if (masks_.has(rank_of(lane.node))) return false;
  if (partner_of(lane.node).left && !MOE_P2P_MUTATED(kFailByLeft)) {
    check_left(lane.node);
    return false;
  }
  // By the plan, because a GPU's regions have no address here. All ranks share one plan, so the
  // other end is computed as that rank would: this node's place among the nodes other than *its*
  // own.
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
      .source_offset = slot + road.outbox + from * road.region_bytes + sent.begin(index),
      .target = remote_of(lane.node).region,
      .target_offset = slot + road.landing + to * road.region_bytes + sent.begin(index),
      .bytes = sent.bytes(),
      .imm = key.pack(),
  };
  if (writes_flags_ && lane.phase != Phase::kWeights) {
    const abi::Shape& shape = plan_.shape;
    std::get<engine::Write>(part.request.operation).flag =
        engine::Flag{plan_.regions.arrivals + abi::arrival_flags_at(shape, lane.phase, lane.slot,
                                                                    static_cast<int>(to), index),
                     abi::arrival_flag(part.word - 1, index, key.is_last)};
  }
  part.busy = true;
  note(times_[static_cast<size_t>(lane.phase)].taken);
  engine_.submit_from_poller(part.request);
  return true;
}

// A kernel that sees flags may be ahead of the immediates that belong to them. Its answer lets the
// partner use the slot again, and immediates of two uses of a slot must not mix. Hence a write is
// posted only after the immediates it answers are counted: a combine after the immediates of this
// step's dispatch, a dispatch after the immediates of the slot's last combine.
bool Exchange::may_answer(const Lane& lane, uint64_t step) const noexcept {
  if (!writes_flags_ || lane.phase == Phase::kWeights) return true;
  if (masks_.has(rank_of(lane.node)) || partner_of(lane.node).left) return true;
  const bool combines = lane.phase == Phase::kCombine;
  const Lane& answered = this->lane(combines ? Phase::kDispatch : Phase::kCombine, lane.slot,
                                    abi::other_index(lane.node, memory_.node()));
  const uint64_t use = step / static_cast<uint64_t>(plan_.shape.steps_in_flight);
  return answered.published >= use + (combines ? 1 : 0);
}

void Exchange::finish(Lane& lane, Part& part) noexcept {
  const base::Status status = part.request.status();
  if (status.ok()) {
    ++partner_of(lane.node).written;
  } else if (!partner_left(lane.node) || MOE_P2P_MUTATED(kFailByLeft)) {
    partner_of(lane.node).lost = true;
    return fail({lane.node, Failure::Kind::kWrite, lane.phase, part.word - 1, status});
  }
  part.acknowledged = part.word;
  for (uint64_t i = 0; i < part.num_parts; ++i)
    if (lane.parts[i].acknowledged < part.word) return;
  lane.acknowledged = part.word;
}

void Exchange::fail(const Failure& failure) noexcept {
  if (masks_.grow()) {
    masks_.add(rank_of(failure.node));
    platform::notify_all(memory_.bell(memory_.local()));
    return;
  }
  stop(failure);
}

// Immediates that are not counted may include what this rank waits for.
void Exchange::check_flushes() noexcept {
  if (engine_.gpu_flush_failed() && !remotes_.empty()) [[unlikely]]
    stop({memory_.node(), Failure::Kind::kFlush, {}, 0, {base::Code::kTransport, 0}});
}

void Exchange::stop(const Failure& failure) noexcept {
  if (failed_.load(std::memory_order_relaxed)) return;  // only this thread writes it
  failure_ = failure;
  failed_.store(true, std::memory_order_release);  // pairs with failure()
  for (int l = 0; l < memory_.num_local(); ++l) {
    if (masks_.grow() && l != memory_.local()) continue;  // they mask this rank
    // The whole node stops waiting: neighbours will miss the same partner.
    std::atomic_ref(memory_.head(l).abort)
        .store(1 + static_cast<uint64_t>(memory_.rank()), std::memory_order_release);
    platform::notify_all(memory_.bell(l));
  }
}

// The first part may always be rung, the others once it was taken: the receiver cannot use them
// before.
bool Exchange::may_ring(const Lane& lane, int index) noexcept {
  const Part& first = lane.parts[0];
  return index == 0 ||
         (lane.parts[index].word != first.word && static_cast<uint64_t>(index) < first.num_parts);
}

bool Exchange::advance(Lane& lane) noexcept {
  bool moved = false;
  for (int p = 0; p < most_parts(lane); ++p) {
    Part& part = lane.parts[p];
    if (part.busy) {
      if (!part.request.done()) continue;
      part.busy = false;
      finish(lane, part);
      moved = true;
    }
    if (may_ring(lane, p) && take(lane, p)) moved = true;
  }
  return moved;
}

// All doorbells of its last step are taken, and their writes acknowledged.
bool Exchange::is_quiet(const Lane& lane) noexcept {
  for (int p = 0; p < most_parts(lane); ++p)
    if (lane.parts[p].busy || (p > 0 && may_ring(lane, p))) return false;
  return true;
}

// Takes what has been rung in a row that awaits bells.
bool Exchange::look_at(size_t row) noexcept {
  Lane* const lanes = &lanes_[row * remotes_.size()];
  const auto wanted = static_cast<uint32_t>(rows_[row].rung);
  bool moved = false, awaited = false;
  for (size_t i = 0; i < remotes_.size(); ++i) {
    Lane& lane = lanes[i];
    const auto taken = [&] { return static_cast<uint32_t>(lane.parts[0].word) == wanted; };
    if (taken()) continue;
    const int node = remotes_[i].node;
    // relaxed: take() looks again, at the bell.
    const uint32_t tag = memory_.bell_tag(memory_.local(), lane.phase, lane.slot, node)
                             .load(std::memory_order_relaxed);
    if (tag == wanted) moved |= advance(lane);
    // Nobody rings for a masked rank.
    awaited |= !taken() && !masks_.has(rank_of(node));
    if (!is_quiet(lane) && !std::exchange(lane.open, true)) open_.push_back(&lane);
  }
  rows_[row].awaited = awaited;
  return moved;
}

bool Exchange::take_doorbells() noexcept {
  bool moved = false;
  const auto num_slots = static_cast<size_t>(plan_.shape.steps_in_flight);
  for (size_t row = 0; !remotes_.empty() && row < rows_.size(); ++row) {
    const auto phase = static_cast<Phase>(row / num_slots);
    const uint64_t rung = memory_.rung(memory_.local(), phase, static_cast<int>(row % num_slots))
                              .load(std::memory_order_relaxed);
    if (rung != rows_[row].rung) rows_[row] = {rung, true};
    if (rows_[row].awaited) moved |= look_at(row);
  }
  for (size_t i = 0; i < open_.size();) {
    Lane& lane = *open_[i];
    moved |= advance(lane);
    if (!is_quiet(lane)) {
      ++i;
      continue;
    }
    lane.open = false;
    open_[i] = open_.back();
    open_.pop_back();
  }
  take_probes();
  check_flushes();
  if (leaving_)
    for (const Remote& remote : remotes_)
      if (part_from(remote)) moved = true;
  return moved;
}

// --- receiving -----------------------------------------------------------------------------------

void Exchange::on_imm(const engine::ImmKey& key) noexcept {
  int node = static_cast<int>(key.source) / plan_.shape.ranks_per_node;
  const int local = static_cast<int>(key.source) % plan_.shape.ranks_per_node;
  if (MOE_P2P_MUTATED(kCountWithoutSource)) node = remotes_.front().node;
  if (node >= plan_.shape.num_nodes() || node == memory_.node() || local != memory_.local()) return;
  const bool of_gather = key.phase == HostGather::kPhase;
  if (of_gather ? key.slot == HostGather::kProbeSlot
                : key.slot >= static_cast<uint32_t>(plan_.shape.steps_in_flight))
    return;
  dirty_ = true;
  Partner& partner = partner_of(node);
  if (of_gather && key.slot == HostGather::kFarewellSlot) {
    ++partner.farewells;
    if (base::Recorder& recorder = engine_.recorder(); recorder.on())
      recorder.add({.kind = base::Event::Kind::kFarewell,
                    .peer = key.source,
                    .a = memory_.farewell_in(node).load(std::memory_order_relaxed)});
    return;
  }
  ++partner.received;
  if (of_gather) return;
  Lane& from = lane(static_cast<Phase>(key.phase), static_cast<int>(key.slot),
                    abi::other_index(node, memory_.node()));
  if (!std::exchange(from.touched, true)) touched_.push_back(&from);
  const uint64_t num_parts = key.part + 1;
  ++from.parts[key.part].immediates;
  from.last_named |= key.is_last;
  from.immediates.fetch_add(1, std::memory_order_relaxed);
  if (num_parts > from.num_named.load(std::memory_order_relaxed))
    from.num_named.store(num_parts, std::memory_order_relaxed);
}

// The step whose immediates are arriving. Dispatch and combine arrive with every use of a slot. Not
// every step has weights, but the combine of the slot's last use has left here, because the source
// had it before it began this step, and the combine of this step waits for the weights: so it is
// the use that follows the last doorbell of combine.
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

// True when more parts have arrived than the flag counts. They cannot include parts of the slot's
// next use: its source begins that once it knows that this one was received.
bool Exchange::publish(Lane& lane) noexcept {
  const auto nics = static_cast<uint64_t>(
      MOE_P2P_MUTATED(kPublishBeforePayload) ? 1 : remote_of(lane.node).num_nics);
  int here = 0;
  while (here < most_parts(lane) && lane.parts[here].immediates >= nics) ++here;
  const auto num_named = static_cast<int>(lane.num_named.load(std::memory_order_relaxed));
  if (MOE_P2P_MUTATED(kLastPartIsAll) && lane.last_named &&
      lane.parts[num_named - 1].immediates >= nics)
    here = num_named;
  if (here == lane.counted) return false;
  const uint64_t step = next_step(lane);
  const bool whole = lane.last_named && here == num_named;
  const uint64_t word =
      whole ? abi::come(step) : step * abi::kMaxParts + static_cast<uint64_t>(here);
  if (mapped_ && lane.phase != Phase::kWeights) store_flags(lane, step, lane.counted, here, whole);
  lane.counted = whole ? 0 : here;
  if (whole) {
    for (Part& part : std::span(lane.parts).first(static_cast<size_t>(here))) {
      part.immediates -= nics;
      lane.immediates.fetch_sub(nics, std::memory_order_relaxed);
    }
    lane.num_named.store(1, std::memory_order_relaxed);
    lane.last_named = false;
    ++lane.published;
  }
  const int source = rank_of(lane.node);
  // release: pairs with the acquire in HostKernels::arrived(). The payload is visible to this
  // thread (provider.h, assumption 1), so it is to every thread that acquires the flag.
  memory_.flag(memory_.local(), lane.phase, lane.slot, source)
      .store(word, std::memory_order_release);
  note(times_[static_cast<size_t>(lane.phase)].published);
  record(base::Event::Kind::kPublished, lane, here, step, word, whole);
  const bool whole_node = lane.phase != Phase::kCombine;
  for (int l = 0; l < memory_.num_local(); ++l)
    if (whole_node || l == memory_.local()) platform::notify_all(memory_.bell(l));
  return true;
}

// The payload is visible, or will be once the GPU has flushed what NICs wrote.
void Exchange::store_flags(const Lane& lane, uint64_t step, int first, int end,
                           bool whole) noexcept {
  if (!mapped_->flush()) {
    stop({memory_.node(), Failure::Kind::kFlush, {}, 0, {base::Code::kTransport, 0}});
    return;
  }
  const int other = abi::other_index(lane.node, memory_.node());
  for (int part = first; part < end; ++part)
    mapped_->store(abi::arrival_flags_at(plan_.shape, lane.phase, lane.slot, other, part),
                   abi::arrival_flag(step, part, whole && part + 1 == end));
}

bool Exchange::publish_arrivals() noexcept {
  if (!dirty_) return false;
  dirty_ = false;
  bool moved = false;
  for (Lane* lane : touched_) {
    lane->touched = false;
    if (publish(*lane)) moved = true;
  }
  touched_.clear();
  return publish_left() || moved;
}

void Exchange::note(std::atomic<int64_t>& time) noexcept {
  if (!notes_times_.load(std::memory_order_relaxed)) [[likely]]
    return;
  const std::chrono::nanoseconds now = platform::Clock::now().time_since_epoch();
  time.store(now.count(), std::memory_order_relaxed);
}

void Exchange::record(base::Event::Kind kind, const Lane& lane, int part, uint64_t step, uint64_t b,
                      uint64_t c) const noexcept {
  base::Recorder& recorder = engine_.recorder();
  if (!recorder.on()) [[likely]]
    return;
  recorder.add({.kind = kind,
                .nic = static_cast<uint8_t>(lane.slot),
                .detail = base::Event::detail_of(communicator_, static_cast<uint32_t>(lane.phase),
                                                 static_cast<uint32_t>(part)),
                .peer = static_cast<uint32_t>(rank_of(lane.node)),
                .a = step,
                .b = b,
                .c = c});
}

// --- any thread ----------------------------------------------------------------------------------

Exchange::Failure Exchange::failure() const noexcept {
  return failed_.load(std::memory_order_acquire) ? failure_ : Failure{};  // pairs with fail()
}

Exchange::Times Exchange::times(Phase phase) noexcept {
  notes_times_.store(true, std::memory_order_relaxed);
  const TimeOf& of = times_[static_cast<size_t>(phase)];
  return {of.taken.load(std::memory_order_relaxed), of.published.load(std::memory_order_relaxed)};
}

std::string Exchange::immediates(Phase phase, int slot, int node) const {
  const Lane& from = lane(phase, slot, abi::other_index(node, memory_.node()));
  return base::concat(from.immediates.load(std::memory_order_relaxed), " of ",
                      from.num_named.load(std::memory_order_relaxed) *
                          static_cast<uint64_t>(remote_of(node).num_nics));
}

}  // namespace moe_p2p::moe
