// Ends receiving queue pairs. Immediates acknowledged to the peer may still lie in the completion
// queue, and a NIC may drop them with their queue pair (mlx5 does: rdma-core,
// providers/mlx5/verbs.c, mlx5_destroy_qp), so each queue pair is broken first, then drained by the
// polling thread, then destroyed. Control thread only; nothing waits here.
#pragma once

#include <cstdint>
#include <vector>

#include "provider/verbs/changes.h"
#include "provider/verbs/nic.h"

namespace moe_p2p::provider::verbs {

class Drain {
 public:
  Drain(const Nic& nic, Changes& changes) : nic_(nic), changes_(changes) {}

  // `has_ended`: last_receive() was called for it before.
  void add(Owned<Qp> qp, bool has_ended, uint64_t tag);
  // Called when the NIC reports that all receives of this queue pair have completed.
  void last_receive(const void* qp) noexcept;
  // Has the polling thread drain what is due, resets and destroys what it has drained.
  void look();
  // True when so many wait that no more may be made: the polling thread does not run.
  bool full() const noexcept;
  bool holds(uint64_t tag) const noexcept;

 private:
  struct Entry {
    Owned<Qp> qp;
    platform::Deadline ready_at;  // all its receives have completed by then
    uint64_t tag;                 // of its connection
    uint64_t ticket = 0;          // of Changes; 0: none drawn yet
  };
  const Nic& nic_;
  Changes& changes_;
  std::vector<Entry> entries_;
};

}  // namespace moe_p2p::provider::verbs
