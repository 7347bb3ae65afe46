// Where everything lies: regions, slots, headers, handles. The one description used by the planner,
// the host kernels and the device kernels, so it compiles under g++ and NVRTC and includes nothing.
//
//   W ranks, L ranks per node, N = W / L nodes, rank = node * L + local
//   M tokens per step (slot capacity), K top-k, S steps in flight, H hidden size
//
// A *step* is one dispatch and one combine. Step e uses step slot e mod S of every region.
// docs/protocol.md tells the story; this file is the letter.
#pragma once

#if defined(__CUDACC_RTC__)
#define MOE_P2P_HD __host__ __device__ inline
namespace moe_p2p::abi {
using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
}  // namespace moe_p2p::abi
#else
#include <cstdint>
#if defined(__CUDACC__)
#define MOE_P2P_HD __host__ __device__ inline
#else
#define MOE_P2P_HD inline
#endif
namespace moe_p2p::abi {
using i32 = std::int32_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
}  // namespace moe_p2p::abi
#endif

namespace moe_p2p::abi {

inline constexpr i32 kMaxTopk = 32;
inline constexpr i32 kMaxExperts = 32768;    // expert ids travel in 16 bits, one value means "none"
inline constexpr i32 kMaxRanksPerNode = 64;  // a set of local ranks is one 64-bit word
inline constexpr i32 kMaxExtras = 8;
inline constexpr u16 kNoExpert = kMaxExperts;
// A warp's store must cover whole 128-byte lines to use NVLink fully.
inline constexpr u64 kLine = 128;
inline constexpr i32 kScaleBlock = 128;  // values that share one fp8 scale

MOE_P2P_HD constexpr u64 align_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

// kWeights: weights that a source tells with combine, because it did not know them at dispatch.
enum class Phase : i32 { kDispatch = 0, kCombine = 1, kWeights = 2 };
inline constexpr i32 kNumPhases = 3;

enum class DType : i32 { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kFloat8E4M3 = 3 };

// How received rows lie: those of each expert in room of its own, those of all experts one after the
// other, or one row for each (source token, receiving rank), source after source.
enum class RowLayout : i32 { kPadded = 0, kGrouped = 1, kByRank = 2 };

// What a quantizing dispatch delivers as scales; on the wire they are fp32 always.
//   kPowerOfTwo: fp32, rounded up to a power of two; kUe8m0: its exponent byte, four in an i32
enum class ScaleFormat : i32 { kFloat32 = 0, kPowerOfTwo = 1, kUe8m0 = 2 };

MOE_P2P_HD constexpr u64 item_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2;
}

// Fixed when the communicator is made, equal on all ranks (checked by name at construction).
struct Shape {
  i32 world_size;
  i32 ranks_per_node;
  i32 num_experts;
  i32 max_local_experts;  // of the rank that owns most
  i32 topk;
  i32 chunk_tokens;     // M
  i32 steps_in_flight;  // S
  i32 part_bytes;  // between nodes, the least that leaves before the rest; 0: a region is whole
  u64 max_token_bytes;    // payload + scales + extras of one token, each part 16-byte aligned
  u64 max_partial_bytes;  // one combined row, with its K scalars

  MOE_P2P_HD constexpr i32 num_nodes() const { return world_size / ranks_per_node; }
  MOE_P2P_HD constexpr i32 num_other_nodes() const { return num_nodes() - 1; }
};

// --- slots -----------------------------------------------------------------------------------

// A slot describes itself: SlotHead, then K expert ids (u16, global, kNoExpert = none), K positions
// (u32: how many earlier tokens of this source, in the whole call, name that expert, or in kByRank go
// to the rank that owns it; with the counts in the header this is the row), K fp32 weights, padded to
// a line; then payload, scales and extras, each 16-byte aligned.
struct SlotHead {
  u32 step;   // low 32 bits of step + 1: a stale slot cannot pass for a new one
  u32 token;  // row at the source
};
static_assert(sizeof(SlotHead) == 8, "slots travel between machines");

MOE_P2P_HD constexpr u64 expert_ids_offset() { return sizeof(SlotHead); }
MOE_P2P_HD constexpr u64 positions_offset(i32 topk) {
  return align_up(expert_ids_offset() + 2 * static_cast<u64>(topk), 4);
}
MOE_P2P_HD constexpr u64 weights_offset(i32 topk) {
  return positions_offset(topk) + 4 * static_cast<u64>(topk);
}
// A whole line, so that the payload begins on one: a warp's store then covers whole lines.
MOE_P2P_HD constexpr u64 slot_head_bytes(i32 topk) {
  return align_up(weights_offset(topk) + 4 * static_cast<u64>(topk), kLine);
}
static_assert(slot_head_bytes(8) == 128 && slot_head_bytes(12) == 128, "one line for K up to 12");

// The parts of one token in this call, in slot order: payload, scales, extras.
struct TokenParts {
  i32 num_parts;
  u64 bytes[2 + kMaxExtras];   // as the caller's row holds them
  u64 offset[2 + kMaxExtras];  // from the start of the slot
  u64 slot_bytes;              // stride of slots
};

MOE_P2P_HD constexpr u64 slot_bytes(i32 topk, u64 token_bytes) {
  return align_up(slot_head_bytes(topk) + token_bytes, kLine);
}

// --- regions ---------------------------------------------------------------------------------

enum RegionFlags : u32 {
  kEmpty = 1u << 0,    // this half of the step carries nothing (see docs/protocol.md, solo calls)
  kScalars = 1u << 1,  // combine rows are followed by K fp32 scalars
  kRowsByRank = 1u << 2,  // positions count the tokens for a rank, not for an expert
  kOpaque = 1u << 3,      // what follows the payload may hold any word, so slots have flags
  kDTypeShift = 8,        // payload type, 4 bits
};

// Every region of every phase starts with one, and it travels in the same write as the slots.
struct RegionHeader {
  u64 step;        // step + 1; stored last inside a node, where it is the flag of the counts
  u32 num_tokens;  // slots that follow
  u32 flags;       // RegionFlags
  u64 slot_bytes;  // stride the sender used
  // On GPUs, where rows flag themselves: step + 1 in the upper halves of both, below it num_tokens and
  // told_shape(), so that readers need not wait for the whole header and its flag.
  u64 told[2];
  u64 reserved[11];
};
static_assert(sizeof(RegionHeader) == kLine, "regions travel between machines");

MOE_P2P_HD constexpr u32 told_shape(u32 flags, u64 slot_bytes) {
  return flags | static_cast<u32>(slot_bytes / kLine) << 16;
}

// A dispatch region: header, expert counts, slots. The counts are those of the whole call (all its
// chunks), so a receiver can place rows before the last chunk is there.
//   inbox:           counts[max_local_experts + 1], of the receiving rank; room for 64 bits each, in
//                    which GPUs put them below step + 1 where rows flag themselves
//   outbox, landing: counts[L][max_local_experts + 1], of every rank of the receiving node
// The last count of a rank is that of the tokens for it, whichever of its experts they name. GPUs
// write it in calls by rank, which alone read it.
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

// Between nodes a region of slots leaves in parts, each as soon as it is written: `part_slots` slots
// each, the header and what else is in front of the slots with the first. Which part a slot is in
// follows from its number and the stride alone, so that who waits for it need not know how many there are.
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

// Weights of a source's tokens: header, then [M][K] fp32, those of a token at the slot that it has in
// the inbox of that rank or the outbox for that node. `num_slots` of them travel.
MOE_P2P_HD constexpr u64 weights_bytes(const Shape& s, i32 num_slots) {
  return align_up(sizeof(RegionHeader) + 4 * static_cast<u64>(num_slots) * static_cast<u64>(s.topk),
                  kLine);
}
MOE_P2P_HD constexpr u64 weights_bytes(const Shape& s) { return weights_bytes(s, s.chunk_tokens); }

// u32 per slot or row, low half of step + 1, so that a device starts on the first one to come. Apart
// from the slots, whose places depend on the call: a word must always be the same word.
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
  u64 gather;           // [N-1][L] written by own-node expert ranks, read by who adds them up: the
                        // last of them on hosts, this rank on GPUs
  u64 gather_flags;     // [N-1][L] on GPUs, a flag for each row of it
  u64 combine_outbox;   // [N-1]   written by who adds them up, read by this rank's NICs
  u64 combine_landing;  // [N-1]   written by NICs, read by this rank
  u64 weights_inbox;    // [L]     written by own-node sources, read by this rank
  u64 weights_outbox;   // [N-1]   written by this rank, read by its NICs
  u64 weights_landing;  // [N-1]   written by NICs, read by every rank of this node
  u64 step_bytes;
  u64 total_bytes;  // S * step_bytes
};

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
  r.total_bytes = at * static_cast<u64>(s.steps_in_flight);
  return r;
}

// Position of `node` among the nodes other than `own` (node != own).
MOE_P2P_HD constexpr i32 other_index(i32 node, i32 own) { return node < own ? node : node - 1; }
// The inverse.
MOE_P2P_HD constexpr i32 other_node(i32 index, i32 own) { return index < own ? index : index + 1; }

// --- handle ----------------------------------------------------------------------------------

// What a dispatch leaves behind for its combine: one int32 tensor. C chunks, T rows at the source, M slots of
// each source in a chunk: chunk_tokens, or fewer where max_tokens of the call is less.
//   meta        HandleMeta
//   slot_counts [C][W]         slots received from each source
//   slot_rows   [C][W][M][K]   row of the output; -1 = not an expert of this rank. In kByRank the row
//                              is at the first k of this rank, and -1 at its others
//   slot_ranks  [C][W][M][2]   bits of the own-node ranks that hold a partial (other-node sources)
//   send_slots  [T][L + N]     slot of token t at own-node rank l, then in outbox of node n; -1 = none
struct HandleMeta {
  static constexpr u32 kMagic = 0x4d503270;
  u32 magic;
  u32 communicator;
  u64 first_step;
  i32 num_chunks;
  i32 num_tokens;     // valid rows of x
  i32 num_rows;       // T: rows of x
  u32 state;          // HandleState
  u64 combined_step;  // on GPUs, for the receiving half of a combine: first_step, or steps of its own
  i32 num_slots;      // M
  i32 padding;
  i64 reserved[2];
};
enum HandleState : u32 { kSent = 1, kReceived = 2, kCombineSent = 3, kCombined = 4, kReleased = 5 };
static_assert(sizeof(HandleMeta) == 64, "16 int32 words");

struct HandleLayout {
  u64 slot_counts, slot_rows, slot_ranks, send_slots, total;  // in int32 words

  MOE_P2P_HD static constexpr HandleLayout make(const Shape& s, i64 num_rows, i64 num_chunks,
                                                i64 num_slots) {
    const u64 chunks = static_cast<u64>(num_chunks);
    const u64 sources = chunks * static_cast<u64>(s.world_size);
    const u64 slots = sources * static_cast<u64>(num_slots);
    HandleLayout h{};
    h.slot_counts = sizeof(HandleMeta) / 4;
    h.slot_rows = h.slot_counts + sources;
    h.slot_ranks = align_up(h.slot_rows + slots * static_cast<u64>(s.topk), 2);
    h.send_slots = h.slot_ranks + 2 * slots;
    h.total = h.send_slots +
              static_cast<u64>(num_rows) * static_cast<u64>(s.ranks_per_node + s.num_nodes());
    return h;
  }
};

}  // namespace moe_p2p::abi
