// A NIC that completes every write at once and delivers nothing: what remains is the cost of our
// own code. Used in benchmarks and in tests of counts, offsets and limits. Accepts memory of every
// kind and connects to every address; never touches memory. Settings: max_in_flight (default 1024),
// max_write_bytes (default 1 GiB).
#pragma once

#include <memory>

#include "provider/provider.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_null_domain(const DomainOptions& options);

}  // namespace moe_p2p::provider
