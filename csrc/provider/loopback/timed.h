// The timed NIC: everything of the software NIC but the copies. Senders store what they write to a
// mapped region of a peer (map_remote) straight into the peer's memory, over NVLink or shared
// memory; the write that follows takes its time on a modelled link (link_model.h), and only then is
// its immediate seen. Doorbells, polling, posting and arrivals are real. Other memory is carried as
// the software NIC carries it, in the link's time, so traffic of all priorities shares the link.
// For ranks of one host, to measure what a real NIC would take. The model has the figures of a real
// NIC, each of which may be replaced; per NIC and direction:
//
//   preset=cx7         cx7: ConnectX-7, one for each GPU. efa: of two EFA devices of a GPU
//   gbps=400           rate; efa 200
//   latency_us=2.7     one way, GPU memory to GPU memory; efa 13.1
//   post_us=0.13       of the polling thread for one write; efa 0.43
//   mwrites=11.1       most million writes per second; efa 1.05
//   flush=1            what arrives in GPU memory is flushed where a real NIC needs it; 0: never
//   hollow=0           1: no write of GPU memory carries its payload, for timing alone
//   max_in_flight=1024 as of the software NIC (config.h), like the next four
//   channels=256
//   ring_kib=1024
//   ordered=0
//   row_kernel=0
//
// Where the figures come from: docs/providers.md, "The timed NIC".
#pragma once

#include <memory>
#include <string>

#include "provider/loopback/config.h"
#include "provider/provider.h"

namespace moe_p2p::provider {

// Throws as make_loopback_domain() does.
std::unique_ptr<Domain> make_timed_domain(const DomainOptions& options);

namespace loopback {

// Throws Error{kInvalidArgument} that names the key and its valid values.
Config parse_timed_config(const std::string& settings);

}  // namespace loopback
}  // namespace moe_p2p::provider
