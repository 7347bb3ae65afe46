#include "engine/imm_counter.h"

namespace moe_p2p::engine {

ImmTable::ImmTable() : entries_(std::make_unique<Entry[]>(kEntries)) {}

void ImmTable::deliver(uint32_t imm) noexcept {
  if ((imm & ImmKey::kKeyedBit) != 0) {
    const ImmKey key = ImmKey::unpack(imm);
    if (ImmSink* sink = sinks_[key.communicator].sink; sink != nullptr) [[likely]] {
      sink->on_imm(key);
      return;
    }
  } else if (Entry* counter = find_or_add(imm); counter != nullptr) [[likely]] {
    // release: pairs with the acquire in wait() and value().
    counter->count.fetch_add(1, std::memory_order_release);
    platform::notify_all(counter->event);
    return;
  }
  discarded_.fetch_add(1, std::memory_order_relaxed);  // a statistic; orders nothing
}

void ImmTable::set_sink(uint32_t communicator, ImmSink* sink,
                        const PhaseReaders& readers) noexcept {
  sinks_[communicator % ImmKey::kMaxCommunicators] = {sink, readers};
}

// Linear probing. Only the polling thread takes entries and turns kGivenBack into kFree, so that no
// value ever has two entries.
ImmTable::Entry* ImmTable::find(uint32_t value) const noexcept {
  const uint32_t wanted = value + 1, first = home(value);
  for (uint32_t i = 0; i < kEntries; ++i) {
    const uint32_t tag = entry(first + i).tag.load(std::memory_order_acquire);
    if (tag == wanted) return &entry(first + i);
    if (tag == kFree) break;
  }
  return nullptr;
}

ImmTable::Entry* ImmTable::find_or_add(uint32_t value) noexcept {
  const uint32_t wanted = value + 1, first = home(value);
  Entry* place = nullptr;
  uint32_t end = 0;  // of the search: a free entry
  for (; end < kEntries; ++end) {
    Entry& here = entry(first + end);
    const uint32_t tag = here.tag.load(std::memory_order_relaxed);
    if (tag == wanted) return &here;
    if (place == nullptr && (tag == kFree || tag == kGivenBack)) place = &here;
    if (tag == kFree) break;
  }
  if (place == nullptr || num_taken_.load(std::memory_order_relaxed) >= kMaxFreeForm)
    return nullptr;
  // kGivenBack entries right before a free one lead a search nowhere, so they become free.
  // Otherwise searches would grow with every value ever counted.
  for (; end > 0 && end < kEntries; --end) {
    std::atomic<uint32_t>& tag = entry(first + end - 1).tag;
    if (tag.load(std::memory_order_relaxed) != kGivenBack) break;
    tag.store(kFree, std::memory_order_relaxed);
  }
  place->count.store(0, std::memory_order_relaxed);
  place->tag.store(wanted, std::memory_order_release);
  num_taken_.fetch_add(1, std::memory_order_relaxed);
  platform::notify_all(added_);
  return place;
}

uint64_t ImmTable::value(uint32_t imm) const {
  const std::lock_guard lock(mutex_);
  const Entry* counter = find(imm);
  return counter != nullptr ? counter->count.load(std::memory_order_acquire) : 0;
}

bool ImmTable::wait(uint32_t imm, uint64_t expected, platform::Deadline deadline,
                    const platform::WaitPolicy& policy) {
  if (expected == 0) return true;
  Entry* counter = nullptr;
  for (;;) {
    if (!platform::wait_until(added_, policy, deadline, [&] { return find(imm) != nullptr; }))
      return false;
    const std::lock_guard lock(mutex_);
    counter = find(imm);
    if (counter == nullptr) continue;  // just given back
    ++counter->num_waiting;
    break;
  }
  const bool reached = platform::wait_until(counter->event, policy, deadline, [&] {
    return counter->count.load(std::memory_order_acquire) >= expected;  // pairs with deliver()
  });
  const std::lock_guard lock(mutex_);
  --counter->num_waiting;
  return reached;
}

std::optional<uint64_t> ImmTable::give_back(uint32_t imm) {
  const std::lock_guard lock(mutex_);
  Entry* counter = find(imm);
  if (counter == nullptr) return 0;
  if (counter->num_waiting != 0) return std::nullopt;
  const uint64_t count = counter->count.load(std::memory_order_acquire);
  counter->tag.store(kGivenBack, std::memory_order_release);
  num_taken_.fetch_sub(1, std::memory_order_relaxed);
  return count;
}

bool ImmTable::can_count(uint32_t imm) const noexcept {
  return num_taken_.load(std::memory_order_relaxed) < kMaxFreeForm || find(imm) != nullptr;
}

}  // namespace moe_p2p::engine
