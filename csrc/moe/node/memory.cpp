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
    base::with_context(base::concat("connecting to rank ", node() * ranks_per_node_ + l), [&] {
      mapped_.push_back(l == local() ? platform::SharedMemory()
                                     : platform::SharedMemory::open(neighbour.memory_name));
      wakers_.push_back(platform::SharedMemory::open(neighbour.waker_name));
    });
  }
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
  return *reinterpret_cast<Region*>(signals(local) + plan_.signals.total_bytes +
                                    static_cast<uint64_t>(slot) * plan_.regions.step_bytes + at);
}

NodeMemory::Region& NodeMemory::inbox(int local, int slot, int source_local) const noexcept {
  return region(
      local, slot,
      plan_.regions.inbox + static_cast<uint64_t>(source_local) * abi::inbox_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::outbox(int local, int slot, int node) const noexcept {
  return region(
      local, slot,
      plan_.regions.outbox + static_cast<uint64_t>(other(node)) * abi::outbox_bytes(plan_.shape));
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
  return region(local, slot,
                plan_.regions.combine_outbox +
                    static_cast<uint64_t>(other(source_node)) * abi::partial_bytes(plan_.shape));
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
  return region(local, slot,
                plan_.regions.weights_outbox +
                    static_cast<uint64_t>(other(node)) * abi::weights_bytes(plan_.shape));
}

NodeMemory::Region& NodeMemory::weights_landing(int local, int slot,
                                                int source_node) const noexcept {
  return region(local, slot,
                plan_.regions.weights_landing +
                    static_cast<uint64_t>(other(source_node)) * abi::weights_bytes(plan_.shape));
}

std::span<std::byte> NodeMemory::data() const noexcept {
  return own_.bytes().subspan(plan_.signals.total_bytes, board_ - plan_.signals.total_bytes);
}

}  // namespace moe_p2p::moe
