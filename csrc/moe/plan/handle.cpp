// Checks of a handle's contents. Called by host calls; kernels of a GPU trust their handle.
#include "moe/plan/handle.h"

#include <algorithm>
#include <bit>

namespace moe_p2p::moe {

using base::Code;

namespace {

constexpr const char* kOverwritten = "; the handle was overwritten after its dispatch";

}  // namespace

HandleView HandleView::open(const abi::Shape& shape, uint32_t communicator, Handle handle) {
  const auto* meta = reinterpret_cast<const abi::HandleMeta*>(handle.words);
  MOE_P2P_CHECK(handle.words && handle.num_words * 4 >= static_cast<int64_t>(sizeof *meta) &&
                    meta->magic == abi::HandleMeta::kMagic,
                Code::kInvalidArgument,
                "handle was not made by a dispatch; pass what a dispatch returned");
  MOE_P2P_CHECK(meta->communicator == communicator, Code::kInvalidArgument,
                "handle belongs to communicator ", meta->communicator, ", this one is ",
                communicator, "; pass it to the object that made the dispatch");
  MOE_P2P_CHECK(meta->num_chunks >= 1 && meta->num_slots >= 1 &&
                    meta->num_slots <= shape.chunk_tokens && meta->num_tokens >= 0 &&
                    meta->num_tokens <= meta->num_rows && meta->state <= abi::kReleased,
                Code::kInvalidArgument, "handle is of ", meta->num_tokens, " tokens in ",
                meta->num_rows, " rows, ", meta->num_chunks, " chunks and ", meta->num_slots,
                " slots, state ", meta->state, kOverwritten);
  // Checked before the layout is computed: sizes of 2^31 chunks need not fit 64 bits.
  const int64_t chunk_slots = int64_t{shape.world_size} * meta->num_slots;
  MOE_P2P_CHECK(meta->num_chunks <= handle.num_words / chunk_slots, Code::kInvalidArgument,
                "handle has ", handle.num_words, " words, too few for its ", meta->num_chunks,
                " chunks; pass it whole, as dispatch returned it");
  return create(shape, handle, meta->num_rows, meta->num_chunks, meta->num_slots);
}

void HandleView::check_contents(int rank, int64_t y_rows) const {
  const abi::Shape& shape = *shape_;
  const int node = rank / shape.ranks_per_node;
  int32_t first = 0, last = -1;  // rows of y
  for (int64_t chunk = 0; chunk < meta().num_chunks; ++chunk)
    for (int source = 0; source < shape.world_size; ++source) {
      const int64_t count = slot_count(chunk, source);
      MOE_P2P_CHECK(count >= 0 && count <= num_slots_, Code::kInvalidArgument, "handle has ", count,
                    " slots of rank ", source, " in chunk ", chunk, ", must have 0 to ", num_slots_,
                    kOverwritten);
      for (int64_t slot = 0; slot < count; ++slot) {
        const auto [low, high] = std::minmax_element(slot_rows(chunk, source, slot),
                                                     slot_rows(chunk, source, slot) + shape.topk);
        first = std::min(first, *low);
        last = std::max(last, *high);
        if (source / shape.ranks_per_node == node) continue;  // no rank adds up for its own node
        const auto num_ranks = static_cast<int>(std::bit_width(slot_ranks(chunk, source, slot)));
        MOE_P2P_CHECK(num_ranks <= shape.ranks_per_node, Code::kInvalidArgument,
                      "handle names rank ", num_ranks - 1, " of this node for slot ", slot,
                      " of rank ", source, ", must be from 0 to ", shape.ranks_per_node - 1,
                      kOverwritten);
      }
    }
  MOE_P2P_CHECK(first >= -1, Code::kInvalidArgument, "handle has put a token into row ", first,
                ", must be from -1 (none)", kOverwritten);
  MOE_P2P_CHECK(last < y_rows, Code::kInvalidArgument, "y has ", y_rows,
                " rows, this dispatch has put a token into row ", last,
                "; pass all rows that it returned (or the handle was overwritten)");
  const int num_columns = shape.ranks_per_node + shape.num_nodes();
  for (int64_t token = 0; token < meta().num_rows; ++token) {
    const int32_t* slots = send_slots(token);
    int num_sent = 0;
    for (int c = 0; c < num_columns; ++c) {
      MOE_P2P_CHECK(slots[c] >= -1 && slots[c] < num_slots_, Code::kInvalidArgument,
                    "handle has sent token ", token, " to slot ", slots[c],
                    ", must be from -1 (none) to ", num_slots_ - 1, kOverwritten);
      num_sent += slots[c] >= 0;
    }
    MOE_P2P_CHECK(num_sent <= shape.topk, Code::kInvalidArgument, "handle has sent token ", token,
                  " to ", num_sent, " ranks and nodes, must be at most topk ", shape.topk,
                  kOverwritten);
  }
}

}  // namespace moe_p2p::moe
