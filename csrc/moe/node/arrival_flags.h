// Arrival flags (docs/protocol.md, section 7): which way is used, and flags that a proxy stores.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "engine/transfer_engine.h"
#include "moe/options.h"
#include "moe/plan/plan.h"
#include "platform/gpu_writes.h"
#include "platform/mapped_gpu_memory.h"
#include "provider/provider.h"

namespace moe_p2p::moe {

// Of a rank, in its GPU's memory.
class MappedFlags {
 public:
  // Throws Error{kUnavailable} where they cannot be mapped, or the GPU cannot flush.
  MappedFlags(const Plan& plan, const provider::MemorySpan& regions)
      : flush_(regions.device, /*for_neighbours=*/false, /*always=*/true),
        memory_(reinterpret_cast<uint64_t>(regions.data) + plan.regions.arrivals,
                plan.regions.total_bytes - plan.regions.arrivals) {}

  // --- polling thread ---
  // What NICs wrote before is visible to the GPU behind it. A store by the CPU takes another way
  // through the bus than a NIC's writes, so the GPU's order of these does not help. False: it
  // failed.
  bool flush() const noexcept { return flush_.flush(/*neighbours_read=*/false) == 0; }
  void store(uint64_t offset, uint64_t value) noexcept {
    memory_.store(offset, value);
    platform::MappedGpuMemory::fence();
  }

 private:
  const platform::GpuWriteFlush flush_;
  platform::MappedGpuMemory memory_;
};

// What a rank can do, for all others to know.
struct FlagOffer {
  std::string no_write;  // why its NICs store no flags; empty: they do
  std::string no_map;    // why its proxy stores none; empty: it can
  size_t num_nics = 0;
};

// Returns what a rank can, as far as options want it, and maps the flags if its proxy can store
// them. regions: the rank's own.
FlagOffer offer_flags(const Plan& plan, const AllToAllOptions& options,
                      const engine::TransferEngine& engine, const provider::MemorySpan& regions,
                      std::unique_ptr<MappedFlags>& mapped);

// Returns the way of this rank, never kAuto. ranks: who is there, each with its offer; the rank of
// `options` is one of them. Throws Error{kUnavailable}, on all of them alike, when what `options`
// want cannot be.
ArrivalFlags choose_flags(const AllToAllOptions& options, const std::map<int, FlagOffer>& ranks);
const char* name_of(ArrivalFlags way) noexcept;

}  // namespace moe_p2p::moe
