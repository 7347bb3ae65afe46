// Where slots lie in a region, and regions in a rank's memory.
#pragma once

#include "kernels/abi/layout.h"
#include "kernels/abi/slot.h"

namespace moe_p2p::abi {

enum RegionFlags : u32 {
  kEmpty = 1u << 0,     // this half of the step carries nothing (see docs/protocol.md, solo calls)
  kScalars = 1u << 1,   // combine rows are followed by K fp32 scalars
  kPerToken = 1u << 2,  // positions count the tokens for a rank, not for an expert
  kOpaque = 1u << 3,    // what follows the payload may hold any word, so slots have flags
  kDTypeShift = 4,      // payload type, 3 bits
  // max_tokens of the call, of dispatches; 25 bits, as it is at most 2^24. Readers compare all bits
  // with their own call's.
  kMaxTokensShift = 7,
};

// What the rows of a call are, as its headers name it.
MOE_P2P_HD constexpr u32 dtype_flags(DType dtype) { return static_cast<u32>(dtype) << kDTypeShift; }
MOE_P2P_HD constexpr u32 dispatch_flags(DType dtype, RowLayout layout, i32 max_tokens) {
  return dtype_flags(dtype) | (facts_of(layout).per_token ? static_cast<u32>(kPerToken) : 0) |
         static_cast<u32>(max_tokens) << kMaxTokensShift;
}
// Whether the flags of two dispatches differ in max_tokens alone.
MOE_P2P_HD constexpr bool only_max_tokens_differ(u32 a, u32 b) {
  return a != b && (a ^ b) << (32 - kMaxTokensShift) == 0;
}
MOE_P2P_HD constexpr u32 combine_flags(DType dtype, bool scalars) {
  return dtype_flags(dtype) | (scalars ? static_cast<u32>(kScalars) : 0);
}

// Every region of every phase starts with a header, which travels in the same write as the slots.
struct RegionHeader {
  u64 step;        // step + 1; stored last inside a node, where it is the flag of the counts
  u32 num_tokens;  // slots that follow
  u32 flags;       // RegionFlags
  u64 slot_bytes;  // stride the sender used
  // On GPUs, where rows flag themselves: step + 1 in the upper halves of both, below it
  // announced_size() and flags, so that readers need not wait for the whole header and its flag.
  u64 announced[2];
  // In partial_inbox of step slot 0: the last round that its writer has begun to clean for, and
  // that it has cleaned for (kernels/clean.cu). The host uses the second one only.
  u64 cleaning, cleaned;
  u64 reserved[9];

  // Sets all words but step and announced, which are stored last where they are flags.
  MOE_P2P_HD constexpr void describe(u32 tokens, u32 region_flags, u64 stride) {
    num_tokens = tokens;
    flags = region_flags;
    slot_bytes = stride;
  }
};
static_assert(sizeof(RegionHeader) == kLine, "regions travel between machines");

// A region's header, and what lies behind it: counts in dispatch, weights in kWeights.
template <typename Byte>
MOE_P2P_HD auto* region_header(Byte* region) {
  return values_at<RegionHeader>(region);
}
template <typename T, typename Byte>
MOE_P2P_HD auto* behind_header(Byte* region) {
  return values_at<T>(region, sizeof(RegionHeader));
}

// Steps whose rows flag themselves are short: 16 bits hold their tokens.
MOE_P2P_HD constexpr u32 announced_size(u32 num_tokens, u64 slot_bytes) {
  return num_tokens | static_cast<u32>(slot_bytes / kLine) << 16;
}

// A dispatch region: header, expert counts, slots. The counts cover the whole call (all its
// chunks), so a receiver can place rows before the last chunk arrives.
//   inbox:           counts[max_local_experts + 1], of the receiving rank; room for 64 bits each,
//                    in which GPUs put them below step + 1 where rows flag themselves
//   outbox, landing: counts[L][max_local_experts + 1], of every rank of the receiving node
// The last count of a rank is the number of tokens for it, whichever of its experts they name. GPUs
// write it in calls by rank, the only ones that read it.
MOE_P2P_HD constexpr i32 counts_per_rank(i32 max_local_experts) { return max_local_experts + 1; }
MOE_P2P_HD constexpr u64 counts_bytes(i32 num_ranks, i32 max_local_experts) {
  return align_up(
      4 * static_cast<u64>(num_ranks) * static_cast<u64>(counts_per_rank(max_local_experts)),
      kLine);
}
MOE_P2P_HD constexpr u64 inbox_slots_offset(const Shape& s) {
  return sizeof(RegionHeader) + counts_bytes(2, s.max_local_experts);
}
MOE_P2P_HD constexpr u64 outbox_slots_offset(const Shape& s) {
  return sizeof(RegionHeader) + counts_bytes(s.ranks_per_node, s.max_local_experts);
}
MOE_P2P_HD constexpr u64 combine_slots_offset() { return sizeof(RegionHeader); }

// Bytes of each region; all multiples of kLine.
MOE_P2P_HD constexpr u64 inbox_bytes(const Shape& s) {
  return inbox_slots_offset(s) +
         static_cast<u64>(s.chunk_tokens) * slot_bytes(s.topk, s.max_token_bytes);
}
MOE_P2P_HD constexpr u64 outbox_bytes(const Shape& s) {
  return outbox_slots_offset(s) +
         static_cast<u64>(s.chunk_tokens) * slot_bytes(s.topk, s.max_token_bytes);
}
MOE_P2P_HD constexpr u64 partial_bytes(const Shape& s) {
  return combine_slots_offset() +
         static_cast<u64>(s.chunk_tokens) * align_up(s.max_partial_bytes, kLine);
}

// Between nodes a region of slots leaves in parts, each as soon as it is written: `part_slots`
// slots each, the header and what else is in front of the slots with the first. Which part a slot
// is in follows from its number and the stride alone, so the receiver need not know how many slots
// there are.
inline constexpr i32 kMaxParts = 4;
MOE_P2P_HD constexpr i32 part_slots(const Shape& s, u64 stride) {
  if (s.part_bytes == 0 || stride == 0) return s.chunk_tokens;
  const i32 least = (s.chunk_tokens + kMaxParts - 1) / kMaxParts;
  const u32 each = static_cast<u32>(stride);  // a slot is far below 4 GiB
  const i32 wanted = static_cast<i32>((static_cast<u32>(s.part_bytes) + each - 1) / each);
  return wanted > least ? wanted : least;
}
struct RegionPart {
  i32 index, num_parts;
  i32 num_slots;     // in it
  u64 begin, bytes;  // in the region

  // Part `index` of a region whose `num_slots` slots begin at `front`.
  MOE_P2P_HD static constexpr RegionPart make(const Shape& s, u64 front, u64 stride, i32 num_slots,
                                              i32 index) {
    const i32 each = part_slots(s, stride);
    const i32 num_parts = num_slots > each ? (num_slots + each - 1) / each : 1;
    const i32 first = index * each;
    const i32 count = num_slots - first < each ? num_slots - first : each;
    const u64 begin = index == 0 ? 0 : front + static_cast<u64>(first) * stride;
    return {index, num_parts, count, begin,
            front + static_cast<u64>(first + count) * stride - begin};
  }
};

// Weights of a source's tokens: header, then [M][K] fp32: a token's K weights lie at its slot
// number in the inbox of that rank or the outbox for that node. `num_slots` slots travel. There is
// room for twice as much: kernels/combine/weights.cuh, kTaggedWeights.
MOE_P2P_HD constexpr u64 weights_bytes(const Shape& s, i32 num_slots) {
  return align_up(sizeof(RegionHeader) + 4 * static_cast<u64>(num_slots) * static_cast<u64>(s.topk),
                  kLine);
}
MOE_P2P_HD constexpr u64 weights_bytes(const Shape& s) {
  return weights_bytes(s, 2 * s.chunk_tokens);
}

// u32 per slot or row, low half of step + 1, so that a device starts on the first to arrive. Flags
// lie apart from the slots, whose places depend on the call: a flag must always be the same word.
MOE_P2P_HD constexpr u64 flags_bytes(const Shape& s) {
  return align_up(4 * static_cast<u64>(s.chunk_tokens), kLine);
}

// Offsets in a rank's data memory of step slot 0; add slot * step_bytes. Order: dispatch, combine,
// weights.
struct Regions {
  u64 inbox;            // [L]     written by own-node sources, read by this rank
  u64 inbox_flags;      // [L]     a flag for each slot of it
  u64 outbox;           // [N-1]   written by this rank, read by its NICs
  u64 landing;          // [N-1]   written by NICs, read by every rank of this node
  u64 partial_inbox;    // [L]     written by own-node expert ranks, read by this rank
  u64 partial_flags;    // [L]     a flag for each row of it
  u64 gather;           // [N-1][L] written by own-node expert ranks, read by the one that adds: the
                        // last of them on hosts, this rank on GPUs
  u64 gather_flags;     // [N-1][L] on GPUs, a flag for each row of it
  u64 combine_outbox;   // [N-1]   written by the one that adds, read by this rank's NICs
  u64 combine_landing;  // [N-1]   written by NICs, read by this rank
  u64 weights_inbox;    // [L]     written by own-node sources, read by this rank
  u64 weights_outbox;   // [N-1]   written by this rank, read by its NICs
  u64 weights_landing;  // [N-1]   written by NICs, read by every rank of this node
  u64 step_bytes;
  u64 arrivals;  // arrival flags of all steps, at S * step_bytes; none without other nodes
  u64 total_bytes;
};

// Arrival flags (docs/protocol.md, section 7): u64 [2][S][N-1][kMaxParts][kMaxRails], stored by the
// sender's NICs behind their share of a part, or by this rank's proxy; read by this rank alone.
// Dispatch and combine; weights have none.
inline constexpr i32 kMaxRails = 8;        // NICs of a rank
inline constexpr u64 kMappedPage = 65536;  // of GPU memory that a CPU maps
MOE_P2P_HD constexpr u64 arrival_flags_bytes(const Shape& s) {
  return 8 * 2 * static_cast<u64>(s.steps_in_flight) * static_cast<u64>(s.num_other_nodes()) *
         kMaxParts * kMaxRails;
}
// Where the flags of a part from another node lie, from `Regions::arrivals` on.
MOE_P2P_HD constexpr u64 arrival_flags_at(const Shape& s, Phase phase, i32 slot, i32 other,
                                          i32 part) {
  const i32 lane =
      (static_cast<i32>(phase) * s.steps_in_flight + slot) * s.num_other_nodes() + other;
  return 8 * static_cast<u64>(lane * kMaxParts + part) * kMaxRails;
}
// The value for a part of a step; grows with both. The last part's is come(step).
MOE_P2P_HD constexpr u64 arrival_flag(u64 step, i32 part, bool is_last) {
  return step * kMaxParts + (is_last ? static_cast<u64>(kMaxParts) : static_cast<u64>(part) + 1);
}

MOE_P2P_HD constexpr Regions make_regions(const Shape& s) {
  const u64 local = static_cast<u64>(s.ranks_per_node);
  const u64 others = static_cast<u64>(s.num_other_nodes());
  Regions r{};
  u64 at = 0;
  r.inbox = at, at += local * inbox_bytes(s);
  r.inbox_flags = at, at += local * flags_bytes(s);
  r.outbox = at, at += others * outbox_bytes(s);
  r.landing = at, at += others * outbox_bytes(s);
  r.partial_inbox = at, at += local * partial_bytes(s);
  r.partial_flags = at, at += local * flags_bytes(s);
  r.gather = at, at += others * local * partial_bytes(s);
  r.gather_flags = at, at += others * local * flags_bytes(s);
  r.combine_outbox = at, at += others * partial_bytes(s);
  r.combine_landing = at, at += others * partial_bytes(s);
  r.weights_inbox = at, at += local * weights_bytes(s);
  r.weights_outbox = at, at += others * weights_bytes(s);
  r.weights_landing = at, at += others * weights_bytes(s);
  r.step_bytes = at;
  r.arrivals = at * static_cast<u64>(s.steps_in_flight);
  if (others > 0) r.arrivals = align_up(r.arrivals, kMappedPage);
  r.total_bytes = r.arrivals;
  if (others > 0) r.total_bytes += align_up(arrival_flags_bytes(s), kMappedPage);
  return r;
}

// The same in lines, with the lines of each kind of region, for kernels that are not compiled for
// M.
struct Places {
  u32 inbox, inbox_flags, outbox, landing, partial_inbox, partial_flags, gather, gather_flags;
  u32 combine_outbox, combine_landing, weights_inbox, weights_outbox, weights_landing;
  u32 step;
  u32 inbox_lines, outbox_lines, partial_lines, flags_lines, weights_lines;
  i32 chunk_tokens;

  MOE_P2P_HD static constexpr u32 lines(u64 bytes) { return static_cast<u32>(bytes / kLine); }
  MOE_P2P_HD static constexpr Places make(const Shape& s) {
    const Regions r = make_regions(s);
    return {.inbox = lines(r.inbox),
            .inbox_flags = lines(r.inbox_flags),
            .outbox = lines(r.outbox),
            .landing = lines(r.landing),
            .partial_inbox = lines(r.partial_inbox),
            .partial_flags = lines(r.partial_flags),
            .gather = lines(r.gather),
            .gather_flags = lines(r.gather_flags),
            .combine_outbox = lines(r.combine_outbox),
            .combine_landing = lines(r.combine_landing),
            .weights_inbox = lines(r.weights_inbox),
            .weights_outbox = lines(r.weights_outbox),
            .weights_landing = lines(r.weights_landing),
            .step = lines(r.step_bytes),
            .inbox_lines = lines(inbox_bytes(s)),
            .outbox_lines = lines(outbox_bytes(s)),
            .partial_lines = lines(partial_bytes(s)),
            .flags_lines = lines(flags_bytes(s)),
            .weights_lines = lines(weights_bytes(s)),
            .chunk_tokens = s.chunk_tokens};
  }
};

// Returns the position of `node` among the nodes other than `own` (node != own).
MOE_P2P_HD constexpr i32 other_index(i32 node, i32 own) { return node < own ? node : node - 1; }
// The inverse.
MOE_P2P_HD constexpr i32 other_node(i32 index, i32 own) { return index < own ? index : index + 1; }

}  // namespace moe_p2p::abi
