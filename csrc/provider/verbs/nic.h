// One opened device: its port, address, protection domain, completion queue and shared receive
// queue. Made and destroyed on the control path; the data path reads it. Everything here outlives
// the queue pairs and memory registered with it.
#pragma once

#include <memory>
#include <string>

#include "provider/verbs/api.h"
#include "provider/verbs/config.h"

namespace moe_p2p::provider::verbs {

template <typename T>
using Owned = std::unique_ptr<T, int (*)(T*)>;

// wr_id of every posted receive. Sends carry the index of their slot.
inline constexpr uint64_t kReceiveId = ~uint64_t{0};

struct Nic {
  // Throws Error{kUnavailable} that lists the devices, Error{kResourceExhausted} when the device or
  // the limit on locked memory does not allow the queues.
  Nic(const Config& config, int nic, bool with_events);

  std::string name() const;  // "mlx5_0 port 1"

  const Config config;
  const Api& api;
  Owned<Context> context;
  PortAttr port{};
  GidTableEntry gid{};
  bool ethernet = false;
  uint8_t max_reads_sent = 0, max_reads_served = 0;  // of one queue pair at a time
  uint32_t num_receives = 0;  // most receives posted; the completion queue holds as many
  Owned<Pd> pd;
  // For queue pairs that send, to which one thread posts: the driver takes no locks there, and
  // stops the process when two threads post. `sending` is null without thread domains.
  Owned<Td> thread;
  Owned<Pd> sending;
  Owned<CompChannel> channel;  // null without events
  Owned<Cq> cq;
  Owned<Srq> srq;

 private:
  void open_port();
  void make_domains();
  void make_queues(bool with_events);
};

// "Cannot allocate memory (12)", with the limit on locked memory if that may be the cause.
std::string error_text(int error);

}  // namespace moe_p2p::provider::verbs
