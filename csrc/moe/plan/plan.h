// Sizes and offsets from the user's numbers: pure, checked here once, used by the allocator, the
// kernels, `python -m moe_p2p plan` and the docs. Throws Error{kInvalidArgument} with what, the
// value and the limit.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/abi/handle.h"
#include "kernels/abi/region.h"
#include "kernels/abi/signal.h"

namespace moe_p2p::moe {

// The user's numbers; equal on all ranks.
struct PlanInput {
  int64_t world_size = 0;
  int64_t ranks_per_node = 0;
  int64_t num_experts = 0;
  int64_t hidden_dim = 0;
  int64_t topk = 0;
  int64_t max_tokens = 0;    // per rank and call
  int64_t chunk_tokens = 0;  // per step; a larger call runs as several steps
  int64_t steps_in_flight = 2;
  int64_t payload_item_bytes = 2;    // of the widest payload type that will be dispatched
  int64_t combine_item_bytes = 2;    // of the widest type that will be combined
  int64_t combine_rows = 1;          // of a token, that a rank may send back one by one
  int64_t extra_bytes = 0;           // per token, the parts rounded up to 16 each
  int64_t part_bytes = 0;            // abi::Shape's
  std::vector<int64_t> expert_rank;  // [E] owner of each expert; empty: equal blocks
};

// A rank's board, behind its signal words and regions: values of gather_counts (moe/host/gather.h)
// and farewells (exchange.h). Offsets in bytes. It begins with u64 words [N] of gather_counts.
struct BoardLayout {
  uint64_t farewell_out;  // u64 [N] to the partner on each other node
  uint64_t farewell_in;   // u64 [N] from them
  uint64_t left;          // u64 [N] moe::Left of each partner, for the ranks of the own node
  uint64_t rows;          // [2][N], each an int32 count and as many values
  uint64_t row_bytes;     // from one to the next
  uint64_t total_bytes;
  uint64_t max_values;

  static BoardLayout make(const abi::Shape& shape);
};

struct Plan {
  abi::Shape shape;
  abi::Regions regions;
  abi::Signals signals;
  BoardLayout board;
  int64_t hidden_dim;
  int64_t max_tokens;
  std::vector<int32_t> expert_rank;   // [E]
  std::vector<int32_t> expert_local;  // [E] position among its owner's experts, by ascending id

  int num_local_experts(int rank) const;
  int64_t num_chunks(int64_t max_tokens_of_call) const;
  // The most slots of a source in a chunk of such a call; at least 1.
  int64_t num_slots(int64_t max_tokens_of_call) const;
  abi::HandleLayout handle_layout(int64_t num_rows, int64_t max_tokens_of_call) const;
  // Every region by name and its bytes for all steps, for people and for the allocator's check.
  std::vector<std::pair<std::string, uint64_t>> table() const;
};

// Throws Error{kInvalidArgument} with the reason and a number that fits.
void check_ranks_per_node(int64_t ranks);

Plan make_plan(const PlanInput& input);

}  // namespace moe_p2p::moe
