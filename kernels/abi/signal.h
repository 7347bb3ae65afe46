// All words are 64-bit and never cleared. All but doorbells only increase, and waiters compare with
// >=. A rank's signal memory is mapped by all ranks of its node; its proxy thread reads it too.
//
//   flags[phase][slot][source]   value come(e): what `source` sent in `phase` of step e is visible
//       here. Own-node sources store it; for others the gateway's proxy does (an *arrival*),
//       and before it e * kMaxParts + n: the first n parts are visible. Arrivals of what (n, l)
//       dispatched, and of its weights, lie at the gateway with local index l; its node reads them.
//   doorbell[phase][slot][node]  for each part which bytes to send of the outbox for `node`, as the
//       proxy cannot look into a GPU's, and e + 1: the part is complete; rung by kernels.
//   rung[phase][slot]            e + 1: some doorbell of the phase is rung in step e. The proxy
//       looks at the bells of no other.
//   bell_tags[phase][slot][node]   32 bits, the low half of e + 1: the bell's first part is rung.
//       Side by side, for many nodes.
//   slot_bells[phase][slot][node][kOwnBells]   32 bits, bell_tag_of(e): this slot of the outbox, or
//       row of the combine_outbox, is written. Used in short steps, whose doorbell says how many
//       there are.
//   gather_count[slot][node]     partial sums handed in for `node`; the L-th of a step adds them up
#pragma once

#include "kernels/abi/region.h"

namespace moe_p2p::abi {

struct SignalHead {
  u64 abort;         // 0, or 1 + the rank that failed: all waits end
  u64 bell;          // platform::EventCount: waiters of this rank sleep on it
  u64 closed;        // 1 once this rank has closed its communicator
  u64 progress;      // of a rank on a GPU, for hosts of its node alone (csrc/moe/node/progress.h)
  u64 reserved[12];  // the words that follow start on a line of their own
};
static_assert(sizeof(SignalHead) == kLine, "shared between processes");

MOE_P2P_HD constexpr u64 come(u64 step) { return (step + 1) * kMaxParts; }

// Each clean of masks begins a round of steps, far beyond all that any rank has counted to: ranks
// that have missed steps agree again. Round r begins at step r << kRoundBit. Its first S steps are
// none of a call: their combine stands for "has cleaned" (docs/failure.md, "Masks").
inline constexpr i32 kRoundBit = 40;
inline constexpr u64 kMostRounds = u64{1} << (62 - kRoundBit);  // come() has 64 bits

// Both words of a part hold the low half of e + 1 above their value, so they may be stored in
// either order: on a device a fence between them would wait until the first has crossed the bus.
//
// Own bells: what is one part of few slots. Workers count nothing there; each rings for its slot,
// and the doorbell is rung for header and counts alone.
inline constexpr i32 kOwnBells = 16;  // most slots of such a part
MOE_P2P_HD constexpr u32 bell_tag_of(u32 tag) { return tag != 0 ? tag : 1u << 31; }

struct BellWords {
  u64 size;  // lines of the part
  u64 place;  // its first line, in the first part the slots with bells of their own instead; and from
              // kPartsBit on the number of the region's parts less one

  static constexpr i32 kPartsBit = 30;

  MOE_P2P_HD static constexpr BellWords make(u64 step, const RegionPart& part, i32 own_bells = 0) {
    const u64 tag = (step + 1) << 32;
    const u64 low = part.index == 0 ? static_cast<u64>(own_bells) : part.begin / kLine;
    return {tag | part.bytes / kLine,
            tag | static_cast<u64>(part.num_parts - 1) << kPartsBit | low};
  }
  MOE_P2P_HD constexpr u32 tag() const { return static_cast<u32>(size >> 32); }
  MOE_P2P_HD constexpr bool whole() const { return size >> 32 == place >> 32; }
  MOE_P2P_HD constexpr u64 bytes() const { return (size & 0xffffffff) * kLine; }
  MOE_P2P_HD constexpr u64 low() const { return place & ((1u << kPartsBit) - 1); }
  MOE_P2P_HD constexpr u64 begin(i32 part) const { return part == 0 ? 0 : low() * kLine; }
  MOE_P2P_HD constexpr i32 own_bells(i32 part) const {
    return part == 0 ? static_cast<i32>(low()) : 0;
  }
  MOE_P2P_HD constexpr u64 num_parts() const { return ((place & 0xffffffff) >> kPartsBit) + 1; }
};
struct Doorbell {
  BellWords part[kMaxParts];
};
static_assert(sizeof(Doorbell) == 64 && kMaxParts <= 4, "shared between processes and devices");

// Offsets in bytes from the start of a rank's signal memory.
struct Signals {
  u64 flags, doorbell, rung, bell_tags, slot_bells, gather_count, total_bytes;
  i32 world_size, num_nodes, steps_in_flight;

  MOE_P2P_HD static constexpr Signals make(const Shape& s) {
    const u64 slots = static_cast<u64>(s.steps_in_flight);
    Signals g{};
    g.world_size = s.world_size;
    g.num_nodes = s.num_nodes();
    g.steps_in_flight = s.steps_in_flight;
    g.flags = sizeof(SignalHead);
    g.doorbell = align_up(g.flags + 8 * kNumPhases * slots * static_cast<u64>(s.world_size), kLine);
    g.rung = align_up(
        g.doorbell + sizeof(Doorbell) * kNumPhases * slots * static_cast<u64>(s.num_nodes()),
        kLine);
    g.bell_tags = align_up(g.rung + 8 * kNumPhases * slots, kLine);
    g.slot_bells = g.bell_tags + kNumPhases * slots * tag_row_bytes(s.num_nodes());
    g.gather_count = align_up(
        g.slot_bells + 4 * kOwnBells * kNumPhases * slots * static_cast<u64>(s.num_nodes()), kLine);
    g.total_bytes = align_up(g.gather_count + 8 * slots * static_cast<u64>(s.num_nodes()), 4096);
    return g;
  }
  MOE_P2P_HD constexpr u64 flag(Phase phase, i32 slot, i32 source) const {
    return flags + 8 * ((static_cast<u64>(phase) * static_cast<u64>(steps_in_flight) +
                         static_cast<u64>(slot)) *
                            static_cast<u64>(world_size) +
                        static_cast<u64>(source));
  }
  MOE_P2P_HD constexpr u64 bell(Phase phase, i32 slot, i32 node) const {
    return doorbell +
           sizeof(Doorbell) * ((static_cast<u64>(phase) * static_cast<u64>(steps_in_flight) +
                                static_cast<u64>(slot)) *
                                   static_cast<u64>(num_nodes) +
                               static_cast<u64>(node));
  }
  // In both arrays row k is for phase k / steps_in_flight, slot k % steps_in_flight.
  MOE_P2P_HD constexpr u64 rung_word(Phase phase, i32 slot) const {
    return rung + 8 * (static_cast<u64>(phase) * static_cast<u64>(steps_in_flight) +
                       static_cast<u64>(slot));
  }
  MOE_P2P_HD constexpr u64 bell_tag(Phase phase, i32 slot, i32 node) const {
    return bell_tags + (rung_word(phase, slot) - rung) / 8 * tag_row_bytes(num_nodes) +
           4 * static_cast<u64>(node);
  }
  MOE_P2P_HD constexpr u64 slot_bell(Phase phase, i32 slot, i32 node, i32 index) const {
    const u64 row = (rung_word(phase, slot) - rung) / 8 * static_cast<u64>(num_nodes);
    return slot_bells + 4 * ((row + static_cast<u64>(node)) * kOwnBells + static_cast<u64>(index));
  }
  MOE_P2P_HD static constexpr u64 tag_row_bytes(i32 nodes) {
    return align_up(4 * static_cast<u64>(nodes), kLine);
  }
  MOE_P2P_HD constexpr u64 gathered(i32 slot, i32 node) const {
    return gather_count +
           8 * (static_cast<u64>(slot) * static_cast<u64>(num_nodes) + static_cast<u64>(node));
  }
};

}  // namespace moe_p2p::abi
