// Where a token lies in its slot: head, expert ids, positions, weights, payload, scales, extras.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

// A slot describes itself: SlotHead, then K expert ids (u16, global, kNoExpert = none), K positions
// (i32: how many earlier tokens of this source, in the whole call, name that expert, or where rows
// are per token, go to the rank that owns it; with the counts in the header this is the row), K
// fp32 weights, padded to a line; then payload, scales and extras, each 16-byte aligned.
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
// The words of a slot, or of a copy of its head. All code that builds or reads a slot uses these.
template <typename Byte>
MOE_P2P_HD auto* slot_head(Byte* slot) {
  return values_at<SlotHead>(slot);
}
template <typename Byte>
MOE_P2P_HD auto* slot_expert_ids(Byte* slot) {
  return values_at<u16>(slot, expert_ids_offset());
}
template <typename Byte>
MOE_P2P_HD auto* slot_positions(Byte* slot, i32 topk) {
  return values_at<i32>(slot, positions_offset(topk));
}
template <typename Byte>
MOE_P2P_HD auto* slot_weights(Byte* slot, i32 topk) {
  return values_at<float>(slot, weights_offset(topk));
}
// The same in kernels, which are compiled for one K.
template <i32 Topk, typename Byte>
MOE_P2P_HD auto* slot_positions(Byte* slot) {
  constexpr u64 kOffset = positions_offset(Topk);
  return values_at<i32>(slot, kOffset);
}
template <i32 Topk, typename Byte>
MOE_P2P_HD auto* slot_weights(Byte* slot) {
  constexpr u64 kOffset = weights_offset(Topk);
  return values_at<float>(slot, kOffset);
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

}  // namespace moe_p2p::abi
