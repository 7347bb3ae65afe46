// Shared by all host kernels: the layout of a token, its routing, headers and signals.
#include "moe/host/kernels.h"

#include <algorithm>

namespace moe_p2p::moe {

using abi::DType;
using abi::Phase;
using abi::RegionHeader;
using base::Code;

namespace {

const char* dtype_name(uint32_t flags) {
  constexpr const char* kNames[] = {"bfloat16",      "float16",        "float32",
                                    "float8_e4m3fn", "10-bit integer", "16-bit block"};
  const uint32_t index = flags >> abi::kDTypeShift & 7;
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

// A header's flags as text, for errors.
std::string flags_text(uint32_t flags) {
  if (flags & abi::kEmpty) return "an empty half (a solo call or a release)";
  return base::concat(dtype_name(flags), flags & abi::kScalars ? " rows with scalars" : " rows",
                      flags & abi::kPerToken ? " by rank" : "");
}

int64_t expert_at(const DispatchSend& call, int64_t i) noexcept {
  return call.topk_is_int64 ? static_cast<const int64_t*>(call.topk_idx)[i]
                            : static_cast<const int32_t*>(call.topk_idx)[i];
}

}  // namespace

HostKernels::HostKernels(const Plan& plan, NodeMemory& memory, int num_threads, const Masks& masks)
    : plan_(plan),
      shape_(plan.shape),
      memory_(memory),
      masks_(masks),
      silent_(static_cast<size_t>(shape_.world_size)),
      empty_(abi::outbox_slots_offset(shape_) / sizeof(uint64_t)),
      pool_(num_threads) {}

void HostKernels::look_at_masks() {
  any_silent_ = false;
  for (int rank = 0; masks_.enabled() && rank < shape_.world_size; ++rank) {
    const bool is = rank != memory_.rank() && masks_.has(rank);
    silent_[static_cast<size_t>(rank)] = is;
    any_silent_ |= is;
  }
}

void HostKernels::begin_round(uint64_t round) noexcept {
  for (int rank = 0; rank < shape_.world_size; ++rank) masks_.remove(rank);
  look_at_masks();
  for (int l = 0; l < shape_.ranks_per_node; ++l) {
    std::atomic_ref(memory_.partial_inbox(l, 0, memory_.local()).cleaned)
        .store(round, std::memory_order_release);  // pairs with has_cleaned() there
    platform::notify_all(memory_.bell(l));
  }
}

bool HostKernels::has_cleaned(uint64_t round, int source) const noexcept {
  return std::atomic_ref(memory_.partial_inbox(memory_.local(), 0, source).cleaned)
             .load(std::memory_order_acquire) >= round;
}

int HostKernels::rank_of_column(int column) const noexcept {
  const int node = column - shape_.ranks_per_node;
  return node < 0 ? rank_of(memory_.node(), column) : rank_of(node, memory_.local());
}

// --- routing -----------------------------------------------------------------------------------

Routing HostKernels::route(const DispatchSend& call, int64_t num_chunks, const HandleView& handle) {
  look_at_masks();
  const int num_local = shape_.ranks_per_node;
  const auto width = static_cast<size_t>(num_local + shape_.num_nodes());
  const int64_t topk = shape_.topk;
  Routing routing;
  routing.experts.resize(static_cast<size_t>(call.num_tokens * topk));
  routing.positions.assign(routing.experts.size(), 0);
  routing.expert_counts.assign(static_cast<size_t>(shape_.num_experts), 0);
  routing.rank_counts.assign(static_cast<size_t>(shape_.world_size), 0);
  routing.num_slots.assign(static_cast<size_t>(num_chunks) * width, 0);
  std::vector<int64_t> last_token(static_cast<size_t>(shape_.num_experts), -1);
  std::vector<int64_t> last_of_rank(static_cast<size_t>(shape_.world_size), -1);
  for (int64_t t = 0; t < call.num_rows; ++t) {
    int32_t* slots = handle.send_slots(t);
    std::fill_n(slots, width, -1);
    if (t >= call.num_tokens) continue;
    int32_t* next = &routing.num_slots[static_cast<size_t>(t / shape_.chunk_tokens) * width];
    for (int64_t k = 0; k < topk; ++k) {
      const int64_t expert = expert_at(call, t * topk + k);
      MOE_P2P_CHECK(expert >= -1 && expert < shape_.num_experts, Code::kInvalidArgument,
                    "topk_idx[", t, ", ", k, "] is ", expert, ", must be -1 (none) or from 0 to ",
                    shape_.num_experts - 1);
      const auto i = static_cast<size_t>(t * topk + k);
      routing.experts[i] = -1;
      if (expert < 0) continue;
      const auto e = static_cast<size_t>(expert);
      MOE_P2P_CHECK(last_token[e] != t, Code::kInvalidArgument, "topk_idx[", t, "] names expert ",
                    expert, " twice");
      last_token[e] = t;
      const int rank = plan_.expert_rank[e];
      if (silent(rank)) continue;
      routing.experts[i] = static_cast<int32_t>(expert);
      const auto r = static_cast<size_t>(rank);
      if (last_of_rank[r] != t) ++routing.rank_counts[r];
      last_of_rank[r] = t;
      const int32_t earlier = routing.expert_counts[e]++;
      routing.positions[i] = call.options.rows().per_token ? routing.rank_counts[r] - 1 : earlier;
      const int node = rank / num_local;
      const int column = node == memory_.node() ? rank % num_local : num_local + node;
      if (slots[column] < 0) slots[column] = next[column]++;
    }
  }
  return routing;
}

// --- headers -----------------------------------------------------------------------------------

void HostKernels::fill_header(RegionHeader& header, Step step, uint32_t num_tokens, uint32_t flags,
                              uint64_t slot_bytes) const noexcept {
  header.step = step.word();
  header.describe(num_tokens, flags, slot_bytes);
}

void HostKernels::check_header(const RegionHeader& header, Step step, uint32_t flags,
                               uint64_t slot_bytes, int source, const char* phase,
                               int32_t num_slots) const {
  if (silent(source)) return;
  MOE_P2P_CHECK(header.step == step.word(), Code::kProtocol, "rank ", memory_.rank(), ": ", phase,
                " of step ", step.index, " found word ", header.step, " from rank ", source,
                ", expected ", step.word());
  MOE_P2P_CHECK(!abi::only_max_tokens_differ(header.flags, flags), Code::kProtocol, "rank ",
                memory_.rank(), ": ", phase, " of step ", step.index, ": ",
                other_max_tokens(source, header.flags >> abi::kMaxTokensShift, memory_.rank(),
                                 flags >> abi::kMaxTokensShift));
  MOE_P2P_CHECK(header.flags == flags, Code::kProtocol, "rank ", memory_.rank(), ": ", phase,
                " of step ", step.index, ": rank ", source, " sent ", flags_text(header.flags),
                ", this rank expects ", flags_text(flags),
                "; all ranks must make the same calls in the same order");
  MOE_P2P_CHECK(header.slot_bytes == slot_bytes, Code::kProtocol, "rank ", memory_.rank(), ": ",
                phase, " of step ", step.index, ": rank ", source, " sent slots of ",
                header.slot_bytes, " bytes, this rank expects ", slot_bytes,
                "; scales and extras must be alike on all ranks");
  const int32_t most = num_slots < 0 ? shape_.chunk_tokens : num_slots;
  MOE_P2P_CHECK(header.num_tokens <= static_cast<uint32_t>(most), Code::kProtocol, "rank ",
                memory_.rank(), ": ", phase, " of step ", step.index, ": rank ", source, " sent ",
                header.num_tokens, " slots, at most ", most, " fit");
}

void HostKernels::write_counts(RegionHeader& region, const Routing& routing, int first_rank,
                               int num_ranks) const noexcept {
  auto* counts = abi::behind_header<int32_t>(region_bytes(region));
  const int per_rank = abi::counts_per_rank(shape_.max_local_experts);
  for (size_t e = 0; e < plan_.expert_rank.size(); ++e) {
    const int at = plan_.expert_rank[e] - first_rank;
    if (at >= 0 && at < num_ranks)
      counts[at * per_rank + plan_.expert_local[e]] = routing.expert_counts[e];
  }
  for (int i = 0; i < num_ranks; ++i)
    counts[i * per_rank + shape_.max_local_experts] =
        routing.rank_counts[static_cast<size_t>(first_rank + i)];
}

// --- signals -----------------------------------------------------------------------------------

// release: pairs with the acquire in arrived() of the rank that waits.
void HostKernels::raise_flag(Step step, Phase phase, int local) noexcept {
  if (skips(rank_of(memory_.node(), local))) return;
  memory_.flag(local, phase, step.slot, memory_.rank())
      .store(step.flag(), std::memory_order_release);
  platform::notify_all(memory_.bell(local));
}

void HostKernels::ring(Step step, Phase phase, int gateway, int node, uint64_t front,
                       uint64_t stride, int32_t num_slots) noexcept {
  if (skips(rank_of(node, gateway))) return;
  for (int i = 0, num_parts = 1; i < num_parts; ++i) {
    const auto part = abi::RegionPart::make(shape_, front, stride, num_slots, i);
    num_parts = part.num_parts;
    memory_.ring(gateway, phase, step.slot, node, abi::BellWords::make(step.index, part), i,
                 step.index);
  }
  platform::notify_all(memory_.waker(gateway));
}

// As wait_flags() of kernels/device/wait.cuh.
bool HostKernels::flags_arrived(Step step, Phase phase, int node) const noexcept {
  const int num_flags = MOE_P2P_MUTATED(kFlagOfOneNic) ? 1 : memory_.flag_words();
  const uint64_t late = MOE_P2P_MUTATED(kFlagOfEarlierStep) ? abi::kMaxParts : 0;
  for (int part = 0; part < abi::kMaxParts; ++part) {
    uint64_t flag = 0;
    for (int nic = 0; nic < num_flags; ++nic) {
      // acquire: what that NIC wrote of the part is visible (provider.h, sentence 4).
      flag =
          memory_.arrival_flag(phase, step.slot, node, part, nic).load(std::memory_order_acquire);
      if (flag + late < abi::arrival_flag(step.index, part, false)) return false;
    }
    if (flag + late >= abi::come(step.index)) return true;
  }
  return true;
}

bool HostKernels::arrived(Step step, Phase phase, int source) const noexcept {
  if (silent(source)) return true;
  if (const uint64_t round = step.index >> abi::kRoundBit;
      round > 0 &&
      step.index - (round << abi::kRoundBit) < static_cast<uint64_t>(shape_.steps_in_flight))
    return has_cleaned(round, source);
  const int node = source / shape_.ranks_per_node;
  const int local = source % shape_.ranks_per_node;
  // The word says so, too, and is up where a partner has closed (Waits::silent); flags come later.
  if (memory_.flag_words() > 0 && node != memory_.node() && local == memory_.local() &&
      phase != Phase::kWeights && flags_arrived(step, phase, node))
    return true;
  int keeper = memory_.local();  // local rank whose signal memory holds the flag
  if (node != memory_.node()) {
    if (phase != Phase::kCombine) {
      keeper = local;
    } else if (local != memory_.local()) {
      return true;  // the rank there with our local index sends that node's sum
    }
  }
  // acquire: pairs with raise_flag() and Exchange::publish_arrivals().
  return memory_.flag(keeper, phase, step.slot, source).load(std::memory_order_acquire) >=
         step.flag();
}

}  // namespace moe_p2p::moe
