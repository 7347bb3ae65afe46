// libibverbs for machines without RDMA: devices fake0 and fake1 (ports up) and fake2 (down),
// reliable queue pairs, a shared receive queue, completion and event queues, in this process's
// memory. A write is carried out while somebody polls the writer's completion queue, in the order
// of its queue pair, the queue pairs among each other in an order drawn from a seed. As strict as
// mlx5: it says nothing of unsignalled writes, flushes what a broken queue pair holds, waits when
// the target has no receive, acknowledges a write before the target's completion is there, forgets
// the completions of a queue pair that is destroyed, keeps the place of a write or receive until
// its completion is polled, ends with a completion queue that overruns, and destroys nothing that
// is in use. With Faults::slow_memory what a NIC has accepted lies before memory until the
// completion of a receive, a read of that memory by the same NIC, or the end of its registration
// lets it through; a registration with relaxed ordering waits for no read. Faults are set by tests.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "provider/verbs/api.h"

namespace moe_p2p::test {

class FakeVerbs {
 public:
  // What the setting library=fake opens from now on; the same one at each call, without faults.
  // With `old_sysfs` a library as it was in 2018: no query_gid_table (types of GIDs stand in files
  // below that folder), no reg_mr_iova2, no dma-bufs, no is_fork_initialized.
  static FakeVerbs& install(const std::string& old_sysfs = "");

  struct Faults {
    int post_error = 0;             // what post_send returns, after taking posts_taken of the chain
    int num_post_errors = 1 << 30;  // so often
    uint32_t posts_taken = 0;
    int next_status = 0;     // how the next write that is carried out fails (a WcStatus)
    int register_error = 0;  // errno of every registration of addresses
    int dmabuf_error = 0;    // errno of every registration of dma-bufs
    int queue_error = 0;     // errno of making queues
    bool link_down = false;  // nothing is acknowledged: retries run out
    int make_queue_ms = 0;   // how long making a queue pair takes
    uint64_t max_queue_pairs = ~uint64_t{0};
    int receive_error = 0;  // what post_srq_recv returns, after taking receives_taken of the chain
    uint32_t receives_taken = 0;
    int max_reads_sent = 16, max_reads_served = 16;  // of a queue pair at a time, by query_device
    bool signaled_errors_only = false;  // a broken queue says nothing of unsignalled writes
    bool no_errors = false;             // nor of any other
    bool no_thread_domains = false;
    bool no_extended_ops = false;  // a library that has no calls but the first ones
    bool slow_memory = false;
    // Ports are InfiniBand ones; by device: its flag, subnet and FLID. What has no
    // global address where it is needed, or another LID, gets nowhere, and nobody says so.
    bool infiniband = false;
    bool needs_grh[3] = {};
    uint8_t subnet[3] = {}, flid[3] = {};
    bool old_kernel = false;       // one before 5.12: memory has to be kept from children
    int fork_error = 0;            // what ibv_fork_init returns
    bool gid_moved = false;        // addresses of Ethernet ports are others
    bool no_last_receive = false;  // the event of the last receive does not come (rxe of Linux 6.1)
  };
  struct Counters {
    uint64_t doorbells = 0, writes = 0, inlined = 0, overruns = 0, receiver_waits = 0;
    uint64_t address_regions = 0, dmabuf_regions = 0, queue_pairs_made = 0;
    uint64_t queue_pairs = 0;                // alive
    uint64_t thread_domains = 0;             // alive
    uint64_t queue_pairs_without_locks = 0;  // made in one
    uint64_t lock_violations = 0;            // two threads posted at once to one of those
    uint64_t reads = 0, read_waits = 0;      // started; found as many under way as were agreed
    uint64_t broken = 0;                     // queue pairs that were moved to error
    uint64_t busy = 0;                       // was to be destroyed and is in use
    uint64_t fork_inits = 0;                 // with no device open; others are refused
    uint64_t full_receives = 0;              // receives that found no place
  };
  template <typename Step>
  auto locked(Step&& step) {
    const std::lock_guard lock(mutex_);
    return step(*this);
  }
  Faults faults;                           // set in locked()
  Counters counters;                       // since install(), but for those alive
  std::vector<std::pair<int, int>> paths;  // service level, traffic class of each end, as made
  std::mt19937_64 random{1};
  // An event of a device, not its effect: of a link that goes down (Faults::link_down), of a GID
  // that is another one (Faults::gid_moved). Events of queue pairs name the one made last.
  void raise(const char* device, int event_type);
  // What lies before memory gets there. Returns how many writes.
  size_t let_through();
  // The context that was opened last; null when there is none.
  static provider::verbs::Context* newest_context();

 private:
  std::mutex mutex_;
};

}  // namespace moe_p2p::test
