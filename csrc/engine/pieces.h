// Cuts an operation into the work requests of one NIC. Pure functions: no engine, no NIC, no state
// beyond the cursor. Called by the Poller each time a NIC has room; must not assume that the
// pieces complete in any order.
#pragma once

#include <cstdint>
#include <span>

#include "engine/request.h"

namespace moe_p2p::engine {

struct Shard {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The shard of `bytes` that NIC `nic` of `num_nics` carries. The shards of all NICs cover every
// byte once. Boundaries lie on multiples of 128 bytes, so that no NIC starts in the middle of a
// line of the PCIe root or of GPU memory; the last shards of a small write are therefore empty.
Shard shard_of(uint64_t bytes, int nic, int num_nics) noexcept;

struct CutContext {
  int nic = 0;
  int num_nics = 1;
  uint32_t max_write_bytes = 0;
  uint64_t wr_id = 0;
};

// Fills `out` with the next pieces and moves the cursor past them, in_flight included. Returns how
// many; cursor.state has the reason for the stop. With an empty `out` it only sets that. When an
// item with an immediate has several pieces, the last piece carries it and is held back until
// cursor.in_flight is 0 again, because the immediate means that the item is complete.
size_t cut(const Operation& operation, const CutContext& context, RailCursor& cursor,
           std::span<provider::WorkRequest> out) noexcept;

// What the cursor has yet to stage. Looks at sizes only, never at memory, peers or keys, which may
// be gone.
Amount left(const Operation& operation, const CutContext& context,
            const RailCursor& cursor) noexcept;

// How many rows of an operation had no write of their own, when it took so many in all, immediates
// alone not counted.
uint64_t num_merged(const Operation& operation, uint64_t num_writes) noexcept;

}  // namespace moe_p2p::engine
