// What an engine counts per NIC. Read by any thread through TransferEngine::counters().
#pragma once

#include <cstdint>

namespace moe_p2p::engine {

struct NicCounters {
  uint64_t bytes_written = 0;
  uint64_t writes = 0;  // posted work requests that are not reads
  uint64_t bytes_read = 0;
  uint64_t reads = 0;
  uint64_t immediates_sent = 0;
  uint64_t immediates_received = 0;
  uint64_t connections_refused = 0;  // from strangers (Domain::num_refused)
  // Steady clock just before the last post to the provider; 0 = never. With the time at which a
  // doorbell was rung it gives the engine's own latency.
  uint64_t last_post_ns = 0;
};

}  // namespace moe_p2p::engine
