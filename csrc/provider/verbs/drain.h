// Receiving queue pairs that are over. What the peer was told has arrived may still lie in the
// completion queue, and a NIC may forget it with its queue pair (mlx5 does: rdma-core,
// providers/mlx5/verbs.c, mlx5_destroy_qp), so that each is broken first, then drained by the
// polling thread, then destroyed. Control thread only; nobody waits here.
#pragma once

#include <cstdint>
#include <vector>

#include "provider/verbs/changes.h"
#include "provider/verbs/nic.h"

namespace moe_p2p::provider::verbs {

class Drain {
 public:
  Drain(const Nic& nic, Changes& changes) : nic_(nic), changes_(changes) {}

  // `has_ended`: its last_receive() has been.
  void add(Owned<Qp> qp, bool has_ended);
  // The NIC says that it has handed in all that this queue pair took.
  void last_receive(const void* qp) noexcept;
  // Asks the polling thread for what is due, destroys what it has drained.
  void look();
  // So many wait that more must not be made: the polling thread does not run.
  bool full() const noexcept;

 private:
  struct Entry {
    Owned<Qp> qp;
    platform::Deadline ready_at;  // the NIC has handed in everything by then
    uint64_t ticket = 0;          // of Changes; 0: not asked yet
  };
  const Nic& nic_;
  Changes& changes_;
  std::vector<Entry> entries_;
};

}  // namespace moe_p2p::provider::verbs
