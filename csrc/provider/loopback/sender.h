// The sending half of a NIC: the table of connections, and the completions ready for poll().
// Connections are added and closed by any thread, used by the polling thread, and deleted by the
// next control call after the polling thread has removed them.
#pragma once

#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "provider/loopback/config.h"
#include "provider/loopback/output.h"
#include "provider/loopback/peers.h"
#include "provider/loopback/trace.h"

namespace moe_p2p::provider::loopback {

class Sender {
 public:
  // Too small: a rank cannot connect to all others. A power of two; the upper bits of a PeerId
  // count up.
  static constexpr uint32_t kMaxPeers = 4096;

  Sender(const Config& config, int nic, RegionTable& regions, Copies& copies,
         const TimeSource& time);
  ~Sender();  // gives all channels back

  // --- any thread --- The names of our own segment and waker go into the claim. Throws as
  // Connection does.
  PeerId connect(std::shared_ptr<Segment> segment, const std::string& peer_waker,
                 const std::string& own_segment, const std::string& own_waker, int priority,
                 uint64_t tag);
  // The polling thread then completes what is outstanding. Throws for an id that is not connected.
  void request_close(PeerId peer);
  // As Domain::lends().
  bool lends(PeerId peer, uint64_t remote_key);
  // As LoopbackControl::fail_write().
  void fail_write(uint64_t nth) noexcept;

  // --- polling thread ---
  size_t post(std::span<const WorkRequest> requests) noexcept;
  void complete_writes(Output& output) noexcept;  // acknowledgements, failures
  void pump() noexcept;                           // sends bytes, publishes finished copies
  // For a NIC that is dead: fails what is in flight and gives every channel back, once.
  void abandon() noexcept;
  bool idle() const noexcept;

 private:
  Connection* find(PeerId peer) const noexcept;
  bool accept(const WorkRequest& request) noexcept;
  void touch(Connection& connection) noexcept;
  void notify_touched() noexcept;
  void reap(Connection& connection, Output& output) noexcept;
  void show(const Completion& completion, Output& output) noexcept;
  void show_ready(Output& output) noexcept;
  void look_after(Connection& connection) noexcept;
  int64_t poll_time_ns() noexcept;
  void fail_all(Connection& connection, base::Code code) noexcept;
  void close_requested_connections() noexcept;
  void remove(Connection& connection) noexcept;
  void delete_removed();

  const Config config_;
  const uint64_t stream_;
  LinkModel link_;
  Copies& copies_;
  const TimeSource& time_;
  std::atomic<int> most_urgent_{std::numeric_limits<int>::max()};
  InFlight of_class_{};  // polling thread
  const SendContext context_;
  Chaos chaos_;  // order of completions
  Trace trace_;  // polling thread

  std::mutex mutex_;                                // between control calls
  std::vector<std::unique_ptr<Connection>> owned_;  // under mutex_
  uint32_t num_connects_ = 0;                       // under mutex_
  // What the polling thread sees. Stored by connect(), release; set to null by remove(), release:
  // from then on the polling thread does not use the connection. Acquire on both sides.
  std::unique_ptr<std::atomic<Connection*>[]> table_;
  std::atomic<uint32_t> table_end_{0};       // one past the highest used index; release, acquire
  std::atomic<uint32_t> close_requests_{0};  // not yet carried out
  std::atomic<uint64_t> fail_at_;            // number of the write that fails; relaxed, tests only

  // Polling thread only.
  Pool<Completion> ready_;  // completions to report; each still counts as in flight
  uint32_t in_flight_ = 0;  // accepted, completion not reported
  uint64_t num_accepted_ = 0;
  int64_t poll_time_ns_ = 0;  // 0: not read in this poll
  bool abandoned_ = false;
  std::array<Connection*, 64> touched_{};
  uint32_t num_touched_ = 0;
};

}  // namespace moe_p2p::provider::loopback
