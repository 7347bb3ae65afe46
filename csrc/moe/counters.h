// What the calls of one rank have done since it was made, epochs that it has left included. Any
// thread reads it, at any time; relaxed everywhere: no data depends on a count.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace moe_p2p::moe {

struct Counters {
  using Count = std::atomic<uint64_t>;
  // By the rank that is waited for.
  struct Source {
    Count wait_ns{0};    // of host threads, which charge a wait to one rank at a time (WaitWatch)
    Count straggles{0};  // waits in which it was named before the deadline
  };

  explicit Counters(int world_size) : sources(static_cast<size_t>(world_size)) {}

  Count steps{0};       // begun; on a GPU kernels begin them, and the device counts
  Count dispatches{0};  // calls, or their first halves; on a GPU launched or captured
  Count combines{0};
  Count releases{0};
  Count tokens_sent{0};    // as far as the host knows the number
  Count rows_received{0};  // on hosts
  Count deadlines{0};      // waits that reached theirs
  Count lost_tokens{0};    // of epochs that were left
  std::vector<Source> sources;

  static void add(Count& count, uint64_t more) noexcept {
    count.fetch_add(more, std::memory_order_relaxed);
  }
  static uint64_t read(const Count& count) noexcept {
    return count.load(std::memory_order_relaxed);
  }
  // Goes on from where another epoch's ended.
  void add(const Counters& before) noexcept {
    for (Count Counters::* const each :
         {&Counters::steps, &Counters::dispatches, &Counters::combines, &Counters::releases,
          &Counters::tokens_sent, &Counters::rows_received, &Counters::deadlines,
          &Counters::lost_tokens})
      add(this->*each, read(before.*each));
    for (size_t source = 0; source < sources.size(); ++source) {
      add(sources[source].wait_ns, read(before.sources[source].wait_ns));
      add(sources[source].straggles, read(before.sources[source].straggles));
    }
  }
};

}  // namespace moe_p2p::moe
