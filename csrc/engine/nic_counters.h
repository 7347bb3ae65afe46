// What an engine counts per NIC. Read by any thread through TransferEngine::counters().
#pragma once

#include <cstdint>

namespace moe_p2p::engine {

// Per NIC, as the engine counted them; monotonic.
struct NicCounters {
  uint64_t bytes_written = 0;
  uint64_t writes = 0;  // posted work requests
  uint64_t immediates_sent = 0;
  uint64_t immediates_received = 0;
  uint64_t connections_refused = 0;  // of strangers (Domain::num_refused)
  // Steady clock, taken just before the provider was last given work; 0 = never. With the time at
  // which a doorbell was rung this gives the engine's own latency.
  uint64_t last_post_ns = 0;
};

}  // namespace moe_p2p::engine
