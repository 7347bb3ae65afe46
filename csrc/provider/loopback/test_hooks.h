// Faults that tests may cause in a running software NIC: dynamic_cast<LoopbackControl*>(domain).
// Any thread. Used in tests and simulations only.
#pragma once

#include <cstdint>
#include <string>

namespace moe_p2p::provider {

class LoopbackControl {
 public:
  virtual ~LoopbackControl() = default;

  // The NIC dies: nothing arrives or leaves any more. Its own writes fail with kTransport, its
  // peers' writes with kPeerDead.
  virtual void kill() noexcept = 0;
  // The nth write (from 1) accepted since the NIC was opened fails with kTransport. 0: none.
  virtual void fail_write(uint64_t nth) noexcept = 0;
  // The link model goes by this clock, in nanoseconds.
  virtual void use_clock(int64_t (*now)()) noexcept = 0;
  // "loopback NIC 0 (seed=7)"
  virtual std::string describe() const = 0;
};

}  // namespace moe_p2p::provider
