// Engines of one process that a real provider connects, each polled by a thread of its own: their
// options, and traffic that every such provider must carry.
#pragma once

#include <chrono>
#include <string>

#include "engine_pair.h"
#include "patience.h"

namespace moe_p2p::test {

inline engine::EngineOptions engine_options(const std::string& provider,
                                            const std::string& settings, int num_nics) {
  engine::EngineOptions options;
  options.provider = provider;
  options.settings = settings;
  options.num_nics = num_nics;
  return options;
}

// Every kind of request, several times over, between engines that threads poll: each arrives, with
// its immediates, and nothing else is written.
void check_every_kind_of_request(TransferEngine& from, TransferEngine& to);

}  // namespace moe_p2p::test
