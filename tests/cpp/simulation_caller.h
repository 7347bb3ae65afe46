// The calls of one rank of a simulation: what it does next of the program, and what it checks.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <vector>

#include "moe/all_to_all.h"
#include "moe/host/backend.h"
#include "simulation_program.h"

namespace moe_p2p::simulation {

using moe::CombineCall;
using moe::DispatchCall;

// Values are small integers, so that every sum is exact in fp32 and there is one right answer.
inline constexpr int kHidden = 4;
inline constexpr uint32_t kCommunicator = 5;

inline float payload(size_t call, int rank, int64_t token, int column) {
  return static_cast<float>((call * 7 + static_cast<size_t>(rank) * 13 +
                             static_cast<size_t>(token) * 3 + static_cast<size_t>(column)) %
                                61 +
                            1);
}
inline float expert_factor(int expert) { return static_cast<float>(expert % 29 + 1); }

struct Buffers {
  std::vector<int32_t> handle, counts, offsets, source;
  std::vector<float> x, rows, row_weights, y, out;
};

inline engine::EngineOptions engine_options(const World& world, uint64_t seed) {
  engine::EngineOptions engine;
  engine.num_nics = world.num_nics;
  engine.settings =
      base::concat("ring_kib=16,channels=64,seed=", seed, world.flags ? ",ordered=1" : "",
                   world.nic_settings.empty() ? "" : ",", world.nic_settings);
  return engine;
}

inline moe::AllToAllOptions call_options(const World& world, int rank, uint32_t communicator,
                                         std::vector<int32_t>& masks) {
  moe::AllToAllOptions options;
  options.plan = {.world_size = world.num_nodes * world.ranks_per_node,
                  .ranks_per_node = world.ranks_per_node,
                  .num_experts = world.num_nodes * world.ranks_per_node * world.experts_per_rank,
                  .hidden_dim = kHidden,
                  .topk = world.topk,
                  .max_tokens = int64_t{world.patience > 0 ? 1 : 3 * world.steps_in_flight} *
                                world.chunk_tokens,
                  .chunk_tokens = world.chunk_tokens,
                  .steps_in_flight = world.steps_in_flight,
                  .payload_item_bytes = 4,
                  .combine_item_bytes = 4,
                  .extra_bytes = 0,
                  .part_bytes = world.part_bytes,
                  .expert_rank = {}};
  if (world.flags) options.arrival_flags = moe::ArrivalFlags::kWrite;
  options.rank = rank;
  options.communicator = communicator;
  if (world.patience > 0) options.masks = masks.data();
  return options;
}

// One rank's calls on one communicator.
class Caller {
 public:
  Caller(const World& world, const Program& program, int rank, moe::AllToAll& all_to_all,
         const std::vector<int32_t>& masks)
      : world_(world),
        program_(program),
        rank_(rank),
        all_to_all_(all_to_all),
        masks_(masks),
        buffers_(program.calls.size()) {}

  // Ranks that have not arrived where this one waits.
  std::vector<int> missing() {
    std::vector<int> ranks;
    if (!dispatch_ && !combine_) return ranks;
    for (int source = 0; source < world_.num_nodes * world_.ranks_per_node; ++source)
      if (!all_to_all_.host().context().kernels.arrived(pending().step, pending().phase, source))
        ranks.push_back(source);
    return ranks;
  }
  // What its call waits for.
  moe::Pending pending() const { return dispatch_ ? dispatch_->pending() : combine_->pending(); }

  // Does what the item allows now. True when it completed.
  bool perform(const Item& item) {
    const moe::HostContext& context = all_to_all_.host().context();
    Buffers& b = buffers_[item.call];
    switch (item.action) {
      case Action::kDispatchSend:
        if (!dispatch_) dispatch_.emplace(context, dispatch_send(item.call, b));
        // A solo call of many chunks cannot finish its send half alone.
        return dispatch_->advance_send() || program_.calls[item.call].kind == Kind::kSolo;
      case Action::kDispatchRecv:
        if (!dispatch_->advance_recv(dispatch_recv(b))) return false;
        dispatch_.reset();
        check_rows(item.call, b);
        return true;
      case Action::kCombineSend:
        if (!combine_) combine_.emplace(context, combine_send(item.call, b));
        return combine_->advance_send() || program_.calls[item.call].kind == Kind::kSolo;
      case Action::kCombineRecv:
        if (!combine_->advance_recv(combine_recv(item.call, b))) return false;
        combine_.reset();
        check_sums(item.call, b);
        return true;
      case Action::kRelease:
        all_to_all_.release({b.handle.data(), static_cast<int64_t>(b.handle.size())});
        return true;
      case Action::kClean: all_to_all_.clean_masks(); return true;
      case Action::kChange: break;  // of its process (simulation_member.h)
    }
    return false;
  }

  uint64_t tokens_checked() const { return tokens_checked_; }

 private:
  bool masked(int rank) const { return masks_[static_cast<size_t>(rank)] != 0; }

  moe::DispatchSend dispatch_send(size_t c, Buffers& b) {
    const Call& call = program_.calls[c];
    const auto r = static_cast<size_t>(rank_);
    const int64_t tokens = call.num_tokens[r];
    b.handle.assign(static_cast<size_t>(all_to_all_.handle_words(tokens, call.max_tokens)), -7);
    for (int64_t t = 0; t < tokens; ++t)
      for (int i = 0; i < kHidden; ++i) b.x.push_back(payload(c, rank_, t, i));
    moe::DispatchSend send;
    send.x = b.x.data();
    send.x_dtype = abi::DType::kFloat32;
    send.topk_idx = call.topk[r].data();
    send.topk_is_int64 = false;
    send.topk_weights = call.late_weights ? nullptr : call.weights[r].data();
    send.num_rows = send.num_tokens = tokens;
    send.max_tokens = call.max_tokens;
    send.options.solo = call.kind == Kind::kSolo;
    send.handle = {b.handle.data(), static_cast<int64_t>(b.handle.size())};
    const auto rows = static_cast<size_t>(capacity() * world_.experts_per_rank);
    b.rows.assign(rows * kHidden, -1.0f);
    b.row_weights.assign(rows, -1.0f);
    b.source.assign(2 * rows, -9);
    b.counts.assign(static_cast<size_t>(world_.experts_per_rank), -1);
    b.offsets.assign(b.counts.size() + 1, -1);
    return send;
  }

  int64_t capacity() const {
    return all_to_all_.plan().max_tokens * all_to_all_.plan().shape.world_size;
  }

  moe::DispatchRecv dispatch_recv(Buffers& b) const {
    moe::DispatchRecv recv;
    recv.handle = {b.handle.data(), static_cast<int64_t>(b.handle.size())};
    recv.capacity = capacity();
    recv.x_dtype = abi::DType::kFloat32;
    recv.x = b.rows.data();
    recv.row_weights = b.row_weights.data();
    recv.counts = b.counts.data();
    recv.offsets = b.offsets.data();
    recv.source = b.source.data();
    return recv;
  }

  moe::CombineSend combine_send(size_t c, Buffers& b) {
    const Call& call = program_.calls[c];
    b.y.assign(b.rows.size(), std::numeric_limits<float>::quiet_NaN());
    for (int e = 0; e < world_.experts_per_rank; ++e) {
      const auto first = static_cast<size_t>(b.offsets[static_cast<size_t>(e)]) * kHidden;
      const auto count = static_cast<size_t>(b.counts[static_cast<size_t>(e)]) * kHidden;
      for (size_t i = first; i < first + count; ++i)
        b.y[i] = b.rows[i] * expert_factor(rank_ * world_.experts_per_rank + e);
    }
    moe::CombineSend send;
    send.handle = {b.handle.data(), static_cast<int64_t>(b.handle.size())};
    send.y = b.y.data();
    send.y_dtype = send.out_dtype = abi::DType::kFloat32;
    send.y_rows = static_cast<int64_t>(b.y.size() / kHidden);
    if (call.late_weights) {
      static const float none = 0;  // null would mean that none are given
      const auto& weights = call.weights[static_cast<size_t>(rank_)];
      send.topk_weights = weights.empty() ? &none : weights.data();
      send.num_rows = call.num_tokens[static_cast<size_t>(rank_)];
    } else {
      send.row_weights = b.row_weights.data();
    }
    return send;
  }

  moe::CombineRecv combine_recv(size_t c, Buffers& b) const {
    const auto tokens = program_.calls[c].num_tokens[static_cast<size_t>(rank_)];
    if (b.out.empty()) b.out.assign(static_cast<size_t>(tokens) * kHidden, -1.0f);
    return {.handle = {b.handle.data(), static_cast<int64_t>(b.handle.size())},
            .num_rows = tokens,
            .out = b.out.data(),
            .out_dtype = abi::DType::kFloat32};
  }

  // Rows of an expert: by source rank, then token; each once, with its own payload and weight.
  void check_rows(size_t c, const Buffers& b) {
    const Call& call = program_.calls[c];
    const int num_ranks = all_to_all_.plan().shape.world_size;
    for (int e = 0; e < world_.experts_per_rank; ++e) {
      auto row = static_cast<size_t>(b.offsets[static_cast<size_t>(e)]);
      const size_t end = row + static_cast<size_t>(b.counts[static_cast<size_t>(e)]);
      for (int source = 0; source < num_ranks; ++source) {
        const auto s = static_cast<size_t>(source);
        if (masked(source) && (row == end || b.source[2 * row] != source)) continue;
        for (size_t i = 0; i < call.topk[s].size(); ++i) {
          if (call.topk[s][i] != rank_ * world_.experts_per_rank + e) continue;
          const auto token = static_cast<int64_t>(i) / world_.topk;
          bool right = row < end && b.source[2 * row] == source && b.source[2 * row + 1] == token &&
                       b.row_weights[row] == (call.late_weights ? 1.0f : call.weights[s][i]);
          for (int h = 0; right && h < kHidden; ++h)
            right = b.rows[row * kHidden + static_cast<size_t>(h)] == payload(c, source, token, h);
          MOE_P2P_CHECK(right, base::Code::kProtocol, "rank ", rank_, " call ", c, ": token ",
                        token, " of rank ", source, " is not in row ", row, " of local expert ", e);
          ++row;
          ++tokens_checked_;
        }
      }
      MOE_P2P_CHECK(row == end, base::Code::kProtocol, "rank ", rank_, " call ", c,
                    ": local expert ", e, " has ", end - row, " rows too many");
    }
  }

  void check_sums(size_t c, const Buffers& b) const {
    const Call& call = program_.calls[c];
    const auto r = static_cast<size_t>(rank_);
    for (int64_t t = 0; t < call.num_tokens[r]; ++t) {
      float want = 0;                 // for a payload of 1: what must be there,
      std::map<int, float> may_lack;  // and what comes from masked ranks, all of it or nothing
      for (int k = 0; k < world_.topk; ++k) {
        const auto i = static_cast<size_t>(t * world_.topk + k);
        if (call.topk[r][i] < 0) continue;
        const int owner = call.topk[r][i] / world_.experts_per_rank;
        const float part = call.weights[r][i] * expert_factor(call.topk[r][i]);
        (masked(owner) ? may_lack[owner] : want) += part;
      }
      std::vector<float> right{want};
      for (const auto& [owner, part] : may_lack)
        for (size_t i = right.size(); i-- > 0;) right.push_back(right[i] + part);
      const float* got = &b.out[static_cast<size_t>(t * kHidden)];
      const bool found = std::any_of(right.begin(), right.end(), [&](float sum) {
        bool same = true;
        for (int h = 0; h < kHidden; ++h) same = same && got[h] == sum * payload(c, rank_, t, h);
        return same;
      });
      MOE_P2P_CHECK(found, base::Code::kProtocol, "rank ", rank_, " call ", c, " token ", t,
                    ": sum begins with ", got[0], ", should with ", want * payload(c, rank_, t, 0));
    }
  }

  const World& world_;
  const Program& program_;
  const int rank_;
  moe::AllToAll& all_to_all_;
  const std::vector<int32_t>& masks_;
  std::vector<Buffers> buffers_;
  std::optional<DispatchCall> dispatch_;
  std::optional<CombineCall> combine_;
  uint64_t tokens_checked_ = 0;
};

}  // namespace moe_p2p::simulation
