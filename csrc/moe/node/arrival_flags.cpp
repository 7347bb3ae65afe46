#include "moe/node/arrival_flags.h"

#include "base/log.h"

namespace moe_p2p::moe {

using base::Code;
using enum ArrivalFlags;

namespace {

std::string why_no_write(const AllToAllOptions& options, const engine::TransferEngine& engine,
                         const provider::MemorySpan& regions) {
  // Hosts sleep until a proxy wakes them: flags are for tests there.
  if (options.arrival_flags != kWrite && (options.arrival_flags != kAuto || !options.device))
    return "not asked for";
  if (!engine.orders_writes())
    return "its NICs do not keep writes in order (of verbs ordered_writes=1 says that they do)";
  if (options.device && !platform::orders_writes(regions.device))
    return "its GPU does not order what NICs write";
  return "";
}

[[noreturn]] void refuse(ArrivalFlags way, int rank, const std::string& why) {
  throw base::Error(Code::kUnavailable,
                    base::concat("arrival_flags=", name_of(way), ": rank ", rank, ": ", why,
                                 "; arrival_flags=relay needs nothing of NICs and GPUs"));
}

}  // namespace

const char* name_of(ArrivalFlags way) noexcept {
  switch (way) {
    case kAuto: return "auto";
    case kWrite: return "write";
    case kGdrCopy: return "gdrcopy";
    case kRelay: break;
  }
  return "relay";
}

FlagOffer offer_flags(const Plan& plan, const AllToAllOptions& options,
                      const engine::TransferEngine& engine, const provider::MemorySpan& regions,
                      std::unique_ptr<MappedFlags>& mapped) {
  FlagOffer offer{why_no_write(options, engine, regions), "not asked for",
                  static_cast<size_t>(engine.num_nics())};
  if (options.arrival_flags != kAuto && options.arrival_flags != kGdrCopy) return offer;
  offer.no_map = "its tensors are not on a GPU";
  if (!options.device) return offer;
  try {
    mapped = std::make_unique<MappedFlags>(plan, regions);
    offer.no_map.clear();
  } catch (const base::Error& error) {
    if (error.code() != Code::kUnavailable) throw;
    offer.no_map = error.what();
  }
  return offer;
}

// One way on all ranks for flags that NICs store: where a proxy stored them too, a NIC's would pass
// for its.
ArrivalFlags choose_flags(const AllToAllOptions& options, const std::map<int, FlagOffer>& ranks) {
  const auto& [first, like] = *ranks.begin();
  std::string why;
  int of = first;
  for (const auto& [rank, offer] : ranks) {
    why = offer.no_write, of = rank;
    if (why.empty() && offer.num_nics != like.num_nics)
      why = base::concat("it has ", offer.num_nics, " NICs, rank ", first, " has ", like.num_nics);
    if (!why.empty()) break;
  }
  if (why.empty()) return kWrite;
  if (options.arrival_flags == kWrite) refuse(kWrite, of, why);
  if (options.arrival_flags == kGdrCopy)
    for (const auto& [rank, offer] : ranks)
      if (!offer.no_map.empty()) refuse(kGdrCopy, rank, offer.no_map);
  const std::string& no_map = ranks.at(options.rank).no_map;
  if (no_map.empty()) return kGdrCopy;
  if (options.device)
    MOE_P2P_LOG(base::LogLevel::kInfo, "rank ", options.rank,
                ": arrivals are relayed; flags by write: rank ", of, ": ", why,
                "; by gdrcopy: ", no_map);
  return kRelay;
}

}  // namespace moe_p2p::moe
