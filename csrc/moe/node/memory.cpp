#include "moe/node/memory.h"

#include "base/context.h"
#include "base/log.h"

namespace moe_p2p::moe {

using abi::Phase;

NodeMemory::NodeMemory(const Plan& plan, int rank, bool with_regions)
    : plan_(plan),
      rank_(rank),
      ranks_per_node_(plan.shape.ranks_per_node),
      board_(plan.signals.total_bytes + (with_regions ? plan.regions.total_bytes : 0)),
      own_(platform::SharedMemory::create("rank", board_ + plan.board.total_bytes)) {}

void NodeMemory::attach(const std::vector<Neighbour>& neighbours) {
  for (int l = 0; l < ranks_per_node_; ++l) {
    const Neighbour& neighbour = neighbours[static_cast<size_t>(l)];
    if (neighbour.memory_name.empty()) {
      mapped_.push_back(platform::SharedMemory::blank(own_.size()));
      wakers_.push_back(platform::SharedMemory::blank(sizeof(platform::EventCount)));
      head(l).closed = 1;
      continue;
    }
    base::with_context(base::concat("connecting to rank ", node() * ranks_per_node_ + l), [&] {
      mapped_.push_back(l == local() ? platform::SharedMemory()
                                     : platform::SharedMemory::open(neighbour.memory_name));
      wakers_.push_back(platform::SharedMemory::open(neighbour.waker_name));
    });
  }
}

void NodeMemory::attach_far(int rank, const std::string& memory_name) {
  far_.resize(static_cast<size_t>(plan_.shape.world_size));
  base::with_context(base::concat("connecting to rank ", rank), [&] {
    far_[static_cast<size_t>(rank)] = platform::SharedMemory::open(memory_name);
  });
}

std::span<std::byte> NodeMemory::far_data(int node) const noexcept {
  if (far_.empty()) return {};
  return far_[static_cast<size_t>(node * ranks_per_node_ + local())].bytes().subspan(
      plan_.signals.total_bytes, board_ - plan_.signals.total_bytes);
}

bool NodeMemory::alive(int local) const noexcept {
  return local == this->local() || mapped_[static_cast<size_t>(local)].owner_alive();
}

std::byte* NodeMemory::signals(int local) const noexcept {
  return local == this->local() ? own_.data() : mapped_[static_cast<size_t>(local)].data();
}

abi::SignalHead& NodeMemory::head(int local) const noexcept {
  return *reinterpret_cast<abi::SignalHead*>(signals(local));
}

NodeMemory::Word NodeMemory::flag(int local, Phase phase, int slot, int source) const noexcept {
  return Word(
      *reinterpret_cast<uint64_t*>(signals(local) + plan_.signals.flag(phase, slot, source)));
}

abi::Doorbell& NodeMemory::doorbell(int local, Phase phase, int slot, int node) const noexcept {
  return *reinterpret_cast<abi::Doorbell*>(signals(local) + plan_.signals.bell(phase, slot, node));
}

NodeMemory::Word NodeMemory::rung(int local, Phase phase, int slot) const noexcept {
  return Word(*reinterpret_cast<uint64_t*>(signals(local) + plan_.signals.rung_word(phase, slot)));
}

std::atomic_ref<uint32_t> NodeMemory::bell_tag(int local, Phase phase, int slot,
                                               int node) const noexcept {
  return std::atomic_ref(
      *reinterpret_cast<uint32_t*>(signals(local) + plan_.signals.bell_tag(phase, slot, node)));
}

std::atomic_ref<uint32_t> NodeMemory::slot_bell(int local, Phase phase, int slot, int node,
                                                int index) const noexcept {
  return std::atomic_ref(*reinterpret_cast<uint32_t*>(
      signals(local) + plan_.signals.slot_bell(phase, slot, node, index)));
}

// relaxed, then release, which pairs with the acquire in Exchange::bell(): who has taken the bell
// has seen the words before it, so that none of an earlier step comes behind a word of a later one.
void NodeMemory::ring(int local, Phase phase, int slot, int node, const abi::BellWords& words,
                      int part, uint64_t step) const noexcept {
  if (part == 0) {
    rung(local, phase, slot).store(step + 1, std::memory_order_relaxed);
    bell_tag(local, phase, slot, node)
        .store(static_cast<uint32_t>(step + 1), std::memory_order_relaxed);
  }
  abi::BellWords& bell = doorbell(local, phase, slot, node).part[part];
  std::atomic_ref(bell.size).store(words.size, std::memory_order_release);
  std::atomic_ref(bell.place).store(words.place, std::memory_order_release);
}

NodeMemory::Word NodeMemory::gather_count(int local, int slot, int node) const noexcept {
  return Word(*reinterpret_cast<uint64_t*>(signals(local) + plan_.signals.gathered(slot, node)));
}

platform::EventCount& NodeMemory::bell(int local) const noexcept {
  static_assert(sizeof(platform::EventCount) == sizeof(abi::SignalHead::bell));
  return *reinterpret_cast<platform::EventCount*>(signals(local) + offsetof(abi::SignalHead, bell));
}

platform::EventCount& NodeMemory::waker(int local) const noexcept {
  return *reinterpret_cast<platform::EventCount*>(wakers_[static_cast<size_t>(local)].data());
}

int NodeMemory::other(int node) const noexcept { return abi::other_index(node, this->node()); }

NodeMemory::Region& NodeMemory::region(int local, int slot, uint64_t at) const noexcept {
  return region_in(signals(local), slot, at);
}

NodeMemory::Region& NodeMemory::region_in(std::byte* memory, int slot, uint64_t at) const noexcept {
  return *reinterpret_cast<Region*>(memory + plan_.signals.total_bytes +
                                    static_cast<uint64_t>(slot) * plan_.regions.step_bytes + at);
}

NodeMemory::Region& NodeMemory::sent(int local, int slot, int node, uint64_t outbox,
                                     uint64_t landing, uint64_t bytes) const noexcept {
  if (far_.empty()) return region(local, slot, outbox + static_cast<uint64_t>(other(node)) * bytes);
  const auto from = static_cast<uint64_t>(abi::other_index(this->node(), node));
  return region_in(far_[static_cast<size_t>(node * ranks_per_node_ + local)].data(), slot,
                   landing + from * bytes);
}

NodeMemory::Region& NodeMemory::inbox(int local, int slot, int source_local) const noexcept {
  return region(
      local, slot,
      plan_.regions.inbox + static_cast<uint64_t>(source_local) * abi::inbox_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::outbox(int local, int slot, int node) const noexcept {
  return sent(local, slot, node, plan_.regions.outbox, plan_.regions.landing,
              abi::outbox_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::landing(int local, int slot, int source_node) const noexcept {
  return region(local, slot,
                plan_.regions.landing +
                    static_cast<uint64_t>(other(source_node)) * abi::outbox_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::partial_inbox(int local, int slot,
                                              int expert_local) const noexcept {
  return region(local, slot,
                plan_.regions.partial_inbox +
                    static_cast<uint64_t>(expert_local) * abi::partial_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::gather(int local, int slot, int source_node,
                                       int expert_local) const noexcept {
  const auto index = static_cast<uint64_t>(other(source_node) * ranks_per_node_ + expert_local);
  return region(local, slot, plan_.regions.gather + index * abi::partial_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::combine_outbox(int local, int slot,
                                               int source_node) const noexcept {
  return sent(local, slot, source_node, plan_.regions.combine_outbox, plan_.regions.combine_landing,
              abi::partial_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::combine_landing(int local, int slot,
                                                int expert_node) const noexcept {
  return region(local, slot,
                plan_.regions.combine_landing +
                    static_cast<uint64_t>(other(expert_node)) * abi::partial_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::weights_inbox(int local, int slot,
                                              int source_local) const noexcept {
  return region(local, slot,
                plan_.regions.weights_inbox +
                    static_cast<uint64_t>(source_local) * abi::weights_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::weights_outbox(int local, int slot, int node) const noexcept {
  return sent(local, slot, node, plan_.regions.weights_outbox, plan_.regions.weights_landing,
              abi::weights_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::weights_landing(int local, int slot,
                                                int source_node) const noexcept {
  return region(local, slot,
                plan_.regions.weights_landing +
                    static_cast<uint64_t>(other(source_node)) * abi::weights_bytes(plan_.shape));
}

NodeMemory::Word NodeMemory::arrival_flag(Phase phase, int slot, int node, int part,
                                          int nic) const noexcept {
  const uint64_t at = plan_.regions.arrivals +
                      abi::arrival_flags_at(plan_.shape, phase, slot, other(node), part) +
                      8 * static_cast<uint64_t>(nic);
  return Word(*reinterpret_cast<uint64_t*>(data().data() + at));
}

std::span<std::byte> NodeMemory::data() const noexcept {
  return own_.bytes().subspan(plan_.signals.total_bytes, board_ - plan_.signals.total_bytes);
}

}  // namespace moe_p2p::moe
