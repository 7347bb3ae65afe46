// What tests may do to a software NIC while it runs: dynamic_cast<LoopbackControl*>(domain). Any
// thread. Nothing outside tests and simulations includes this.
#pragma once

#include <cstdint>
#include <string>

namespace moe_p2p::provider {

class LoopbackControl {
 public:
  virtual ~LoopbackControl() = default;

  // The NIC falls dead: nothing arrives or leaves any more. Its own writes fail with kTransport,
  // those of its peers with kPeerDead.
  virtual void kill() noexcept = 0;
  // Of the writes accepted since the NIC was opened, the nth (from 1) fails with kTransport. 0:
  // none.
  virtual void fail_write(uint64_t nth) noexcept = 0;
  // "loopback NIC 0 (seed=7)"
  virtual std::string describe() const = 0;
};

}  // namespace moe_p2p::provider
