// The sending side of one NIC, on the polling thread: a queue of Requests with something to post
// here, a small batch of staged work requests, and the number of work requests in flight. Filled
// and emptied by the Poller. A full NIC keeps its queue and holds up no other NIC.
#pragma once

#include <array>
#include <atomic>
#include <span>

#include "engine/nic_counters.h"
#include "engine/pieces.h"
#include "engine/request.h"
#include "provider/provider.h"

namespace moe_p2p::engine {

class NicQueue {
 public:
  // Work requests given to the provider at once. Too small: the NIC's doorbell rings for every few
  // writes. Too large: a full NIC keeps more writes staged for Requests that fail meanwhile.
  static constexpr size_t kBatch = 64;
  // Writes one Request may stage before the next one's turn. Too small: more turns per batch. Too
  // large: a one-write Request waits for this many writes of each large one.
  static constexpr size_t kQuantum = 16;

  void open(provider::Domain& domain, int nic, int num_nics);

  // Adds a Request. False when it has nothing to send through this NIC.
  bool add(Request& request) noexcept;
  Request* front() const noexcept { return head_; }

  // Stages the front Request's next writes, at most kQuantum, and moves it to the back or, when it
  // has no more or is held, out of the queue. Requires room() > 0.
  void stage_front() noexcept;
  size_t room() const noexcept;
  // Removes all that is queued or staged for the Request; returns what it will not send here.
  Amount drop(Request& request) noexcept;
  // Returns all that the Request sends through this NIC.
  Amount share_of(const Request& request) const noexcept;
  // Posts what is staged; returns how many work requests the provider took.
  size_t post() noexcept;
  bool has_staged() const noexcept { return num_staged_ != 0; }

  size_t poll(std::span<provider::Completion> completions) noexcept {
    return domain_->poll(completions);
  }
  // The provider completed one work request of `request`.
  void complete(Request& request) noexcept;
  void count_immediate() noexcept { add(counters_.immediates_received, 1); }

  bool idle() const noexcept { return head_ == nullptr && in_flight_ == 0 && num_staged_ == 0; }
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

  // Requests take turns: one with more to stage goes to the back.
  void push_back(Request& request) noexcept;
  void remove(Request& request) noexcept;
  CutContext context(const Request& request) const noexcept;
  size_t cut_next(Request& request, std::span<provider::WorkRequest> out) const noexcept;
  Request::Rail& rail(Request& request) const noexcept { return request.rails_[nic_]; }
  void count(std::span<const provider::WorkRequest> posted, int sign) noexcept;  // sign: 1 or -1

  provider::Domain* domain_ = nullptr;
  size_t nic_ = 0;
  int num_nics_ = 1;
  provider::DomainLimits limits_;
  Request* head_ = nullptr;
  Request* tail_ = nullptr;
  size_t in_flight_ = 0;  // taken by the provider, not completed
  size_t num_staged_ = 0;
  std::array<provider::WorkRequest, kBatch> staged_;
  Counters counters_;
};

}  // namespace moe_p2p::engine
