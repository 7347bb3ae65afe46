#include "engine/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"

namespace moe_p2p::engine {

using base::Code;

namespace {

constexpr auto kControlTimeout = std::chrono::seconds(10);

// Words of the directory are shared with NICs, which load and store 8 bytes at a time. TSan takes
// a software NIC's copies for those of a thread.
[[gnu::no_sanitize_thread, gnu::noinline]] void publish(uint64_t& word, uint64_t value) noexcept {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
[[gnu::no_sanitize_thread, gnu::noinline]] uint64_t look(const uint64_t& word) noexcept {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

const InboxPlace& checked(const InboxPlace& inbox, const std::string& label) {
  inbox.check(label.c_str());
  return inbox;
}

}  // namespace

Inbox::Inbox(TransferEngine& engine, const InboxPlace& size, std::string label)
    : engine_(engine),
      label_(std::move(label)),
      place_(checked(size, label_)),
      rings_(size.num_rings) {
  MOE_P2P_CHECK(!engine.writes_in_place(), Code::kUnavailable, label_,
                ": NICs that only keep time carry no messages");
  directory_ = std::make_unique<std::byte[]>(directory_bytes(size));
  std::vector<const MemoryHandle*> made;
  try {
    made.push_back(engine.register_memory({directory_.get(), directory_bytes(size)}));
    place_.rails = engine.descriptor(made.back()).rails;
    for (size_t i = 0; i < rings_.size(); ++i) {
      add_ring(rings_[i], i);
      made.push_back(rings_[i].handle);
    }
    const PhaseReaders host{};  // nothing of it is read by a GPU
    engine.run_on_poller(
        [&] { engine.imm_table().set_sink(MessageImm::kCommunicator, this, host); },
        platform::Clock::now() + kControlTimeout);
  } catch (...) {
    for (const MemoryHandle* handle : made) engine.unregister_memory(handle);
    throw;
  }
  engine.show_inbox(place_);
}

RingEntry& Inbox::entry(size_t ring) const noexcept {
  return reinterpret_cast<RingEntry*>(directory_.get())[ring];
}

void Inbox::add_ring(Ring& ring, size_t index) {
  ring.memory = std::make_unique<std::byte[]>(ring_bytes(place_));
  ring.arrived = std::make_unique<std::atomic<bool>[]>(place_.num_slots);
  ring.handle = engine_.register_memory({ring.memory.get(), ring_bytes(place_)});
  publish_keys(ring, index);
}

void Inbox::publish_keys(const Ring& ring, size_t index) {
  const auto keys = engine_.descriptor(ring.handle).rails;
  for (size_t nic = 0; nic < keys.size(); ++nic) {
    publish(entry(index).keys[nic].remote_addr, keys[nic].remote_addr);
    publish(entry(index).keys[nic].remote_key, keys[nic].remote_key);
  }
}

void Inbox::on_imm(const ImmKey& key) noexcept {
  const MessageImm imm = MessageImm::unpack(key.pack());
  if (imm.ring >= rings_.size()) return;
  Ring& ring = rings_[imm.ring];
  const uint64_t generation = ring.generation.load(std::memory_order_acquire);
  if (generation % MessageImm::kGenerations != imm.generation) return;  // of an earlier owner
  if (imm.kind == MessageImm::Kind::kClaim) return claim(ring, imm.ring);
  const uint64_t owner = ring.owner.load(std::memory_order_relaxed);
  if (owner == 0) return;
  if (imm.kind == MessageImm::Kind::kMessage && imm.value < place_.num_slots)
    ring.arrived[imm.value].store(true, std::memory_order_release);  // pairs with find()
  else
    ring.bye.store(imm.value, std::memory_order_release);
  bell(purpose_of(owner)).ring();
}

// Of several that wrote their names there, the one whose name is found has the ring; all of them
// read the entry until it has an owner.
void Inbox::claim(Ring& ring, size_t index) noexcept {
  const uint64_t name = look(entry(index).claim);
  if (name == 0 || ring.owner.load(std::memory_order_relaxed) != 0) return;
  ring.owner.store(name, std::memory_order_release);
  publish(entry(index).owner, name);
}

void Inbox::Bell::ring() noexcept {
  // release: pairs with clear(), whose caller looks for messages afterwards.
  if (!rung.exchange(true, std::memory_order_acq_rel)) event.signal();
}

// The descriptor first: a ring in between is then seen by the look that follows.
void Inbox::Bell::clear() noexcept {
  if (!rung.load(std::memory_order_relaxed)) return;
  event.clear();
  rung.exchange(false, std::memory_order_acq_rel);
}

std::optional<Message> Inbox::take(Purpose purpose) {
  const std::lock_guard lock(mutex_);
  if (auto message = find(purpose)) return message;
  if (awake_.load(std::memory_order_acquire)) return std::nullopt;
  bell(purpose).clear();
  auto message = find(purpose);
  if (message) bell(purpose).ring();  // there may be more
  return message;
}

std::optional<Message> Inbox::find(Purpose purpose) {
  for (size_t i = 0; i < rings_.size(); ++i) {
    const size_t index = (cursor_ + i) % rings_.size();
    Ring& ring = rings_[index];
    free_if_left(ring, index);
    const uint64_t owner = ring.owner.load(std::memory_order_acquire);
    if (owner == 0 || purpose_of(owner) != purpose) continue;
    // acquire: pairs with on_imm().
    if (!ring.arrived[ring.taken % place_.num_slots].load(std::memory_order_acquire)) continue;
    cursor_ = index + 1;
    return take_from(ring, index, owner);
  }
  return std::nullopt;
}

// The slot is free for its sender once `taken` says so.
Message Inbox::take_from(Ring& ring, size_t index, uint64_t owner) {
  const uint64_t slot = ring.taken % place_.num_slots;
  const std::byte* at = ring.memory.get() + slot * slot_bytes(place_);
  SlotHead head;
  std::memcpy(&head, at, sizeof head);
  head.label.back() = 0;
  const uint32_t bytes = std::min(head.bytes, place_.max_bytes);
  Message message{.sender = owner,
                  .label = base::readable(head.label.data()),
                  .data = {at + sizeof head, at + sizeof head + bytes}};
  ring.arrived[slot].store(false, std::memory_order_relaxed);
  publish(entry(index).taken, ++ring.taken);
  free_if_left(ring, index);
  MOE_P2P_CHECK(head.bytes == bytes, Code::kProtocol, label_, ": a message of ", message.label,
                " is said to have ", head.bytes, " bytes, more than ", bytes);
  return message;
}

// A bye may come before messages that were sent before it.
void Inbox::free_if_left(Ring& ring, size_t index) noexcept {
  const uint32_t bye = ring.bye.load(std::memory_order_acquire);
  if (bye != Ring::kNoBye && (ring.taken & 0xff) == bye) release(ring, index);
}

// Nothing of its owner is under way. The owner last: from then on it may be claimed.
void Inbox::release(Ring& ring, size_t index) noexcept {
  ring.taken = 0;
  ring.bye.store(Ring::kNoBye, std::memory_order_relaxed);
  const uint64_t generation = ring.generation.load(std::memory_order_relaxed) + 1;
  ring.generation.store(generation, std::memory_order_release);
  publish(entry(index).taken, 0);
  publish(entry(index).generation, generation);
  ring.owner.store(0, std::memory_order_release);
  publish(entry(index).owner, 0);
}

bool Inbox::forget(uint64_t sender) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(rings_, [&](const Ring& ring) {
    return ring.owner.load(std::memory_order_acquire) == sender;
  });
  if (sender == 0 || found == rings_.end()) return false;
  Ring& ring = *found;
  const auto index = static_cast<size_t>(found - rings_.begin());
  // Immediates of it are none of the ring's any more, and nobody may claim the ring yet.
  const auto part = [&] {
    ring.generation.fetch_add(1, std::memory_order_release);
    for (uint32_t slot = 0; slot < place_.num_slots; ++slot)
      ring.arrived[slot].store(false, std::memory_order_relaxed);
  };
  engine_.run_on_poller(part, platform::Clock::now() + kControlTimeout);
  if (ring.handle != nullptr) engine_.unregister_memory(ring.handle);
  ring.handle = nullptr;
  ring.handle = engine_.register_memory({ring.memory.get(), ring_bytes(place_)});
  publish_keys(ring, index);
  release(ring, index);
  return true;
}

uint32_t Inbox::num_senders() const noexcept {
  return static_cast<uint32_t>(std::ranges::count_if(
      rings_, [](const Ring& ring) { return ring.owner.load(std::memory_order_relaxed) != 0; }));
}

void Inbox::wake() noexcept {
  awake_.store(true, std::memory_order_release);
  for (Bell& each : bells_) each.event.signal();
}

}  // namespace moe_p2p::engine
