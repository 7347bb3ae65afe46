// The sending side of one NIC, on the polling thread: a queue of Requests with something to post
// here, a small batch of staged work requests, and the number of work requests in flight. Filled
// and emptied by the Poller. A full NIC keeps its queue and holds up no other NIC.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <span>

#include "base/recorder.h"
#include "engine/nic_counters.h"
#include "engine/pieces.h"
#include "engine/request.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

// Which classes there are, over all NICs.
struct Classes {
  std::array<uint64_t, kNumPriorities> active{};  // Requests that are not done
  std::array<bool, kNumPriorities> used{};        // ever
  int first_used =
      kNumPriorities;  // the most urgent that was ever active; lower ones are cut short
  int num_used = 0;

  void add(int priority) noexcept {
    ++active[static_cast<size_t>(priority)];
    if (used[static_cast<size_t>(priority)]) return;
    used[static_cast<size_t>(priority)] = true;
    ++num_used;
    first_used = std::min(first_used, priority);
  }
  // The most urgent class that has work.
  int urgent() const noexcept {
    int priority = 0;
    while (priority < kNumPriorities && active[static_cast<size_t>(priority)] == 0) ++priority;
    return priority;
  }
};

class NicQueue {
 public:
  // Work requests given to the provider at once. Too small: the NIC's doorbell rings for every few
  // writes. Too large: a full NIC keeps more writes staged for Requests that fail meanwhile.
  static constexpr size_t kBatch = 64;
  // Writes one Request may stage before the next one's turn. Too small: more turns per batch. Too
  // large: a one-write Request waits for this many writes of each large one.
  static constexpr size_t kQuantum = 16;
  // Bytes of lower classes in flight while a higher one has work, and their largest write then. Too
  // small: lower classes crawl between two steps. Too large: a step waits for them; 256 KiB take
  // 5 us at 400 Gbit/s.
  static constexpr uint64_t kLowerBytes = 256 << 10;
  static constexpr uint32_t kLowerPiece = 16 << 10;
  // A class that had no turn for so long gets one before all others. Too small: urgent writes wait
  // for it. Too large: its users time out.
  static constexpr std::chrono::milliseconds kPatience{10};

  void open(provider::Domain& domain, int nic, int num_nics, base::Recorder& recorder);

  // Adds a Request. False when it has nothing to send through this NIC.
  bool add(Request& request) noexcept;

  // Who may stage next: how many writes, of how many bytes each. No Request: nobody may now.
  struct Turn {
    Request* request = nullptr;
    size_t most = 0;
    uint32_t max_bytes = 0;
  };
  // `now` matters only while several classes are used.
  Turn next(const Classes& classes, platform::Deadline now) noexcept;
  // Stages the Request's next writes, and moves it to the back of its class or, when it has no more
  // or is held, out of the queue. Returns how many writes.
  size_t stage(const Turn& turn, platform::Deadline now) noexcept;
  size_t num_staged() const noexcept { return num_staged_; }
  // Removes all that is queued or staged for the Request; returns what it will not send here.
  Amount drop(Request& request) noexcept;
  // Returns all that the Request sends through this NIC.
  Amount share_of(const Request& request) const noexcept;
  // Posts what is staged; returns how many work requests the provider took.
  size_t post() noexcept;

  size_t poll(std::span<provider::Completion> completions) noexcept {
    return domain_->poll(completions);
  }
  // The provider completed so many work requests of `request`.
  void complete(Request& request, size_t count) noexcept;
  void count_immediate() noexcept { add(counters_.immediates_received, 1); }
  uint8_t index() const noexcept { return static_cast<uint8_t>(nic_); }

  bool idle() const noexcept { return num_waiting_ == 0 && in_flight_ == 0 && num_staged_ == 0; }
  NicCounters counters() const noexcept;

 private:
  // Written by the polling thread, read by any; relaxed, because they order nothing.
  struct Counters {
    std::atomic<uint64_t> bytes_written{0}, writes{0}, bytes_read{0}, reads{0};
    std::atomic<uint64_t> immediates_sent{0}, immediates_received{0};
    std::atomic<uint64_t> last_post_ns{0};
  };
  // One writer, so no read-modify-write instruction is needed.
  static void add(std::atomic<uint64_t>& counter, uint64_t amount) noexcept {
    counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }

  // The Requests of one class.
  struct Lane {
    Request* head = nullptr;
    Request* tail = nullptr;
    // In flight or staged, at most: counts each write of a Request as its largest one.
    uint64_t bytes = 0;
    platform::Deadline waits_since{};  // for its turn; the epoch: not known yet
  };
  Lane& lane(const Request& request) noexcept { return lanes_[request.priority]; }
  Turn turn_of(int priority, int urgent, const Classes& classes) const noexcept;
  size_t room(bool lower) const noexcept;

  // Requests take turns: one with more to stage goes to the back.
  void push_back(Request& request) noexcept;
  void remove(Request& request) noexcept;
  CutContext context(const Request& request) const noexcept;
  Request::Rail& rail(Request& request) const noexcept { return request.rails_[nic_]; }
  void count(std::span<const provider::WorkRequest> posted, int sign) noexcept;  // sign: 1 or -1
  void note_first(std::span<const provider::WorkRequest> posted, platform::Deadline now) noexcept;

  void record(std::span<const provider::WorkRequest> given, size_t taken,
              platform::Deadline time) const noexcept;

  provider::Domain* domain_ = nullptr;
  base::Recorder* recorder_ = nullptr;  // of the engine
  size_t nic_ = 0;
  int num_nics_ = 1;
  provider::DomainLimits limits_;
  std::array<Lane, kNumPriorities> lanes_;
  size_t num_waiting_ = 0;  // Requests in lanes
  size_t in_flight_ = 0;    // taken by the provider, not completed
  size_t num_staged_ = 0;
  bool notes_first_ = false;  // a timed Request that has posted nothing is staged
  std::array<provider::WorkRequest, kBatch> staged_;
  Counters counters_;
};

}  // namespace moe_p2p::engine
