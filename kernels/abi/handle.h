// What a dispatch leaves behind for its combine.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

// One int32 tensor. C chunks, T rows at the source, M slots of each source in a chunk:
// chunk_tokens, or fewer where max_tokens of the call is less.
//   meta        HandleMeta
//   slot_counts [C][W]         slots received from each source
//   slot_rows   [C][W][M][K]   row of the output; -1 = not an expert of this rank. A row per token
//                              is at the first k of this rank, and -1 at its others
//   slot_ranks  [C][W][M][2]   bits of the own-node ranks that hold a partial (other-node sources)
//   send_slots  [T][L + N]     slot of token t at own-node rank l, then in the outbox of node n;
//                              -1 = none
struct HandleMeta {
  static constexpr u32 kMagic = 0x4d503270;
  u32 magic;
  u32 communicator;
  u64 first_step;
  i32 num_chunks;
  i32 num_tokens;     // valid rows of x
  i32 num_rows;       // T: rows of x
  u32 state;          // HandleState
  u64 combined_step;  // on GPUs, for a combine's receiving half: first_step, or a step of its own
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
