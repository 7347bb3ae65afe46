// Whether anybody listens at a peer's address, over tcp. libfabric answers a write to a peer that
// it must connect to first with "try again", and goes on so when the connection is refused at once:
// then the peer's NIC is gone, and need not be waited for. A peer that is slow, or stopped, is
// connected by its kernel. Data path: nothing here blocks.
#pragma once

#include "base/wire.h"
#include "platform/wait.h"

namespace moe_p2p::provider::libfabric {

class Listener {
 public:
  Listener() = default;
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  ~Listener() { forget(); }

  // Asks now and then, and looks for the answer. `name`: as libfabric gives it, a socket's address.
  bool is_gone(const base::Bytes& name, platform::Clock::time_point now) noexcept;
  void forget() noexcept;

 private:
  bool ask(const base::Bytes& name) noexcept;

  int socket_ = -1;  // that connects
  platform::Clock::time_point asked_{};
};

}  // namespace moe_p2p::provider::libfabric
