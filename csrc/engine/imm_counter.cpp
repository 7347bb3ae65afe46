#include "engine/imm_counter.h"

namespace moe_p2p::engine {

bool ImmCounter::wait(uint64_t expected, platform::Deadline deadline,
                      const platform::WaitPolicy& policy) {
  return platform::wait_until(event, policy, deadline, [&] {
    return count.load(std::memory_order_acquire) >= expected;  // pairs with ImmTable::deliver()
  });
}

ImmTable::ImmTable() : free_form_(std::make_unique<Entry[]>(kMaxFreeForm)) {}

void ImmTable::deliver(uint32_t imm) noexcept {
  if ((imm & ImmKey::kKeyedBit) != 0) {
    const ImmKey key = ImmKey::unpack(imm);
    if (ImmSink* sink = sinks_[key.communicator]; sink != nullptr) [[likely]] {
      sink->on_imm(key);
      return;
    }
  } else if (ImmCounter* counter = find_or_add(imm); counter != nullptr) [[likely]] {
    // release: pairs with the acquire in ImmCounter::wait().
    counter->count.fetch_add(1, std::memory_order_release);
    platform::notify_all(counter->event);
    return;
  }
  discarded_.fetch_add(1, std::memory_order_relaxed);  // a statistic; orders nothing
}

void ImmTable::set_sink(uint32_t communicator, ImmSink* sink) noexcept {
  sinks_[communicator % ImmKey::kMaxCommunicators] = sink;
}

// Linear probing over entries that are never given back: whoever finds a free one on the way knows
// that the value is not further on.
ImmCounter* ImmTable::find_or_add(uint32_t value) noexcept {
  static_assert((kMaxFreeForm & (kMaxFreeForm - 1)) == 0);
  if ((value & ImmKey::kKeyedBit) != 0) return nullptr;
  const uint32_t tag = value + 1;
  const uint32_t home = value * 0x9e3779b1u >> 16;  // spreads neighbours over the table
  for (uint32_t i = 0; i < kMaxFreeForm; ++i) {
    Entry& entry = free_form_[(home + i) % kMaxFreeForm];
    // relaxed, both: the tag guards no data, the counter starts at zero in every entry.
    uint32_t found = entry.tag.load(std::memory_order_relaxed);
    if (found == 0 && entry.tag.compare_exchange_strong(found, tag, std::memory_order_relaxed))
      return &entry.counter;
    if (found == tag) return &entry.counter;
  }
  return nullptr;
}

}  // namespace moe_p2p::engine
