#include "moe/plan/plan.h"

#include <algorithm>

#include "base/log.h"
#include "engine/imm_counter.h"
#include "kernels/abi/params.h"

namespace moe_p2p::moe {

using base::Code;

namespace {

void check_range(const char* name, int64_t value, int64_t low, int64_t high) {
  MOE_P2P_CHECK(value >= low && value <= high, Code::kInvalidArgument, name, " is ", value,
                ", must be from ", low, " to ", high);
}

void check(const PlanInput& in) {
  check_range("world_size", in.world_size, 1, engine::ImmKey::kMaxSources);
  check_ranks_per_node(in.ranks_per_node);
  MOE_P2P_CHECK(in.world_size % in.ranks_per_node == 0, Code::kInvalidArgument, "world_size ",
                in.world_size, " is not a multiple of ranks_per_node ", in.ranks_per_node);
  check_range("num_experts", in.num_experts, 1, abi::kMaxExperts);
  check_range("topk", in.topk, 1, abi::kMaxTopk);
  check_range("max_tokens", in.max_tokens, 1, 1 << 24);
  check_range("chunk_tokens", in.chunk_tokens, 1, 1 << 20);
  check_range("steps_in_flight", in.steps_in_flight, 2, 16);
  check_range("hidden_dim", in.hidden_dim, 1, 1 << 20);
  check_range("extra_bytes", in.extra_bytes, 0, 1 << 20);
  check_range("part_bytes", in.part_bytes, 0, 1 << 30);
  check_range("combine_rows", in.combine_rows, 1, abi::kMaxTopk);
  for (const auto& [name, bytes] :
       {std::pair{"payload", in.payload_item_bytes}, std::pair{"combine", in.combine_item_bytes}})
    MOE_P2P_CHECK(bytes == 1 || bytes == 2 || bytes == 4, Code::kInvalidArgument, name,
                  " item size is ", bytes, " bytes, must be 1, 2 or 4");
}

// Fills plan.expert_rank and plan.expert_local.
void place_experts(const PlanInput& in, Plan& plan) {
  if (in.expert_rank.empty()) {
    MOE_P2P_CHECK(in.num_experts % in.world_size == 0, Code::kInvalidArgument, "num_experts ",
                  in.num_experts, " is not a multiple of world_size ", in.world_size,
                  "; pass expert_rank, the owner of each expert");
  } else {
    MOE_P2P_CHECK(static_cast<int64_t>(in.expert_rank.size()) == in.num_experts,
                  Code::kInvalidArgument, "expert_rank has ", in.expert_rank.size(),
                  " entries for num_experts ", in.num_experts);
  }
  std::vector<int32_t> next(static_cast<size_t>(in.world_size), 0);
  for (int64_t e = 0; e < in.num_experts; ++e) {
    const int64_t rank = in.expert_rank.empty() ? e / (in.num_experts / in.world_size)
                                                : in.expert_rank[static_cast<size_t>(e)];
    MOE_P2P_CHECK(rank >= 0 && rank < in.world_size, Code::kInvalidArgument, "expert_rank[", e,
                  "] is ", rank, ", must be from 0 to ", in.world_size - 1);
    plan.expert_rank.push_back(static_cast<int32_t>(rank));
    plan.expert_local.push_back(next[static_cast<size_t>(rank)]++);
  }
  plan.shape.max_local_experts = *std::max_element(next.begin(), next.end());
}

}  // namespace

// Refuses, for one, a whole NVLink domain of 72 GPUs, which is more than a node.
void check_ranks_per_node(int64_t ranks) {
  MOE_P2P_CHECK(ranks >= 1, Code::kInvalidArgument, "ranks_per_node is ", ranks,
                ", must be from 1 to ", abi::kMaxRanksPerNode);
  int64_t fits = abi::kMaxRanksPerNode;
  while (ranks % fits != 0) --fits;
  MOE_P2P_CHECK(ranks <= abi::kMaxRanksPerNode, Code::kInvalidArgument, "a node of ", ranks,
                " ranks is too large: a set of its ranks is a word of ", abi::kMaxRanksPerNode,
                " bits, in shared memory and on the wire; with ranks_per_node=", fits, " it is ",
                ranks / fits, " nodes, with NICs between them");
}

Plan make_plan(const PlanInput& in) {
  check(in);
  Plan plan{};
  place_experts(in, plan);
  const auto payload = static_cast<uint64_t>(in.hidden_dim * in.payload_item_bytes);
  MOE_P2P_CHECK(payload % 16 == 0, Code::kInvalidArgument, "hidden_dim ", in.hidden_dim, " of ",
                in.payload_item_bytes, "-byte values is ", payload,
                " bytes a token, must be a multiple of 16");
  // Any type may be quantized; a row of few values is then larger by its scale.
  const auto hidden = static_cast<uint64_t>(in.hidden_dim);
  const uint64_t fp8 = abi::align_up(hidden, 16) +
                       abi::align_up(4 * ((hidden + abi::kScaleBlock - 1) / abi::kScaleBlock), 16);
  plan.hidden_dim = in.hidden_dim;
  plan.max_tokens = in.max_tokens;
  abi::Shape& s = plan.shape;
  s.world_size = static_cast<int32_t>(in.world_size);
  s.ranks_per_node = static_cast<int32_t>(in.ranks_per_node);
  s.num_experts = static_cast<int32_t>(in.num_experts);
  s.topk = static_cast<int32_t>(in.topk);
  s.chunk_tokens = static_cast<int32_t>(in.chunk_tokens);
  s.steps_in_flight = static_cast<int32_t>(in.steps_in_flight);
  s.part_bytes = in.world_size > in.ranks_per_node ? static_cast<int32_t>(in.part_bytes) : 0;
  s.max_token_bytes = std::max(payload, fp8) + static_cast<uint64_t>(in.extra_bytes);
  s.max_partial_bytes =
      static_cast<uint64_t>(in.combine_rows) *
          abi::align_up(static_cast<uint64_t>(in.hidden_dim * in.combine_item_bytes), 16) +
      4 * static_cast<uint64_t>(in.topk);
  plan.regions = abi::make_regions(s);
  plan.signals = abi::Signals::make(s);
  plan.board = BoardLayout::make(s);
  return plan;
}

BoardLayout BoardLayout::make(const abi::Shape& shape) {
  const auto nodes = static_cast<uint64_t>(shape.num_nodes());
  BoardLayout g{};
  // Counts of every expert, of every rank, and a few numbers more.
  g.max_values =
      static_cast<uint64_t>(shape.num_experts) + static_cast<uint64_t>(shape.world_size) + 16;
  // Partners write the words of farewell_in; other words have their own lines.
  const uint64_t words = abi::align_up(8 * nodes, abi::kLine);
  g.farewell_out = words;
  g.farewell_in = 2 * words;
  g.left = 3 * words;
  g.rows = 4 * words;
  g.row_bytes = abi::align_up(4 * (1 + g.max_values), abi::kLine);
  g.total_bytes = g.rows + 2 * nodes * g.row_bytes;
  return g;
}

int Plan::num_local_experts(int rank) const {
  return static_cast<int>(std::count(expert_rank.begin(), expert_rank.end(), rank));
}

int64_t Plan::num_chunks(int64_t max_tokens_of_call) const {
  MOE_P2P_CHECK(max_tokens_of_call >= 0 && max_tokens_of_call <= max_tokens, Code::kInvalidArgument,
                "max_tokens of this call is ", max_tokens_of_call,
                ", the communicator was made for at most ", max_tokens,
                "; raise max_tokens of its configuration");
  return std::max<int64_t>(1, (max_tokens_of_call + shape.chunk_tokens - 1) / shape.chunk_tokens);
}

int64_t Plan::num_slots(int64_t max_tokens_of_call) const {
  return std::clamp<int64_t>(max_tokens_of_call, 1, shape.chunk_tokens);
}

abi::HandleLayout Plan::handle_layout(int64_t num_rows, int64_t max_tokens_of_call) const {
  return abi::HandleLayout::make(shape, num_rows, num_chunks(max_tokens_of_call),
                                 num_slots(max_tokens_of_call));
}

std::vector<std::pair<std::string, uint64_t>> Plan::table() const {
  const auto steps = static_cast<uint64_t>(shape.steps_in_flight);
  return {{"inbox", steps * (regions.inbox_flags - regions.inbox)},
          {"inbox_flags", steps * (regions.outbox - regions.inbox_flags)},
          {"outbox", steps * (regions.landing - regions.outbox)},
          {"landing", steps * (regions.partial_inbox - regions.landing)},
          {"partial_inbox", steps * (regions.partial_flags - regions.partial_inbox)},
          {"partial_flags", steps * (regions.gather - regions.partial_flags)},
          {"gather", steps * (regions.gather_flags - regions.gather)},
          {"gather_flags", steps * (regions.combine_outbox - regions.gather_flags)},
          {"combine_outbox", steps * (regions.combine_landing - regions.combine_outbox)},
          {"combine_landing", steps * (regions.weights_inbox - regions.combine_landing)},
          {"weights_inbox", steps * (regions.weights_outbox - regions.weights_inbox)},
          {"weights_outbox", steps * (regions.weights_landing - regions.weights_outbox)},
          {"weights_landing", steps * (regions.step_bytes - regions.weights_landing)},
          {"arrivals", regions.total_bytes - steps * regions.step_bytes},
          {"signals", signals.total_bytes + board.total_bytes},
          {"device_state", abi::DeviceWords::make(shape).total_bytes}};
}

}  // namespace moe_p2p::moe
