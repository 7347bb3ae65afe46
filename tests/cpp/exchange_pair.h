// Two Exchanges by themselves, whose threads the test turns, and which it rings as kernels would.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "engine_pair.h"
#include "moe/node/exchange.h"

namespace moe_p2p::moe::exchange_test {

using abi::Phase;
using base::Code;

inline constexpr uint32_t kCommunicator = 5;

inline Plan two_nodes() {
  return make_plan({.world_size = 2,
                    .ranks_per_node = 1,
                    .num_experts = 2,
                    .hidden_dim = 8,
                    .topk = 1,
                    .max_tokens = 4,
                    .chunk_tokens = 4,
                    .expert_rank = {}});
}

// Two ranks, a node each, with two NICs each. The test turns their threads.
class Pair {
 public:
  explicit Pair(bool device, bool with_masks = false) : engines_(network, {2, 2}) {
    for (int rank = 0; rank < 2; ++rank) {
      memory_.push_back(std::make_unique<NodeMemory>(plan_, rank));
      const auto data = memory_.back()->data();
      handles_.push_back(engine(rank).register_memory({data.data(), data.size()}));
      boards_.push_back(engine(rank).register_memory(
          {memory(rank).board(kLocal), static_cast<size_t>(plan_.board.total_bytes)}));
    }
    for (int rank = 0; rank < 2; ++rank) {
      const auto name = engine(rank).waker_name();
      memory_[static_cast<size_t>(rank)]->attach({{memory(rank).name(), name}});
      const auto r = static_cast<size_t>(rank);
      const auto* region = engine(rank).resolve(engine(1 - rank).descriptor(handles_[1 - r]));
      const auto* board = engine(rank).resolve(engine(1 - rank).descriptor(boards_[1 - r]));
      exchanges_.push_back(std::make_unique<Exchange>(
          plan_, memory(rank), engine(rank), handles_[r], boards_[r], kCommunicator,
          std::vector<Exchange::Remote>{{1 - rank, region, board, 2}},
          Masks(with_masks ? masks_[r].data() : nullptr), device));
      engine(rank).imm_table().set_sink(kCommunicator, exchanges_.back().get());
    }
  }

  Exchange& exchange(int rank) { return *exchanges_[static_cast<size_t>(rank)]; }
  abi::Doorbell& bell(int rank, Phase phase, uint64_t step) {
    return memory(rank).doorbell(kLocal, phase, static_cast<int>(step % 2), 1 - rank);
  }
  // Parts of a line.
  void ring(int rank, Phase phase, uint64_t step, uint64_t part = 0, uint64_t num_parts = 1) {
    memory(rank).ring(kLocal, phase, static_cast<int>(step % 2), 1 - rank,
                      abi::BellWords::make(step, {.index = static_cast<int32_t>(part),
                                                  .num_parts = static_cast<int32_t>(num_parts),
                                                  .num_slots = 0,
                                                  .begin = abi::kLine * part,
                                                  .bytes = abi::kLine}),
                      static_cast<int>(part), step);
  }
  // Of a dispatch whose slots have bells of their own.
  void ring_own(int rank, uint64_t step, int num_slots) {
    memory(rank).ring(
        kLocal, Phase::kDispatch, static_cast<int>(step % 2), 1 - rank,
        abi::BellWords::make(
            step,
            {.index = 0, .num_parts = 1, .num_slots = num_slots, .begin = 0, .bytes = abi::kLine},
            num_slots),
        0, step);
  }
  void ring_slot(int rank, uint64_t step, int slot) {
    memory(rank)
        .slot_bell(kLocal, Phase::kDispatch, static_cast<int>(step % 2), 1 - rank, slot)
        .store(abi::bell_tag_of(static_cast<uint32_t>(step + 1)));
  }
  NodeMemory::Word rung(int rank, Phase phase, uint64_t step) {
    return memory(rank).rung(kLocal, phase, static_cast<int>(step % 2));
  }
  std::atomic_ref<uint32_t> tag(int rank, Phase phase, uint64_t step) {
    return memory(rank).bell_tag(kLocal, phase, static_cast<int>(step % 2), 1 - rank);
  }
  // Of what the other rank sends.
  uint64_t flag(int rank, Phase phase, uint64_t step) {
    return memory(rank).flag(kLocal, phase, static_cast<int>(step % 2), 1 - rank).load();
  }
  void turn(int times = 1) {
    for (int i = 0; i < times; ++i)
      for (int rank = 0; rank < 2; ++rank) {
        proxy::ProxyTask* const task = &exchange(rank);
        proxy::ProxyThread::turn(engine(rank), {&task, 1});
      }
  }
  // Writes of all NICs of a rank.
  size_t num_posted(int rank) {
    const auto first = static_cast<size_t>(2 * rank);
    return network.nic(first).posted().size() + network.nic(first + 1).posted().size();
  }
  void fail_next(int rank) {
    network.nic(static_cast<size_t>(2 * rank)).fail_next(1, {Code::kPeerDead, 7});
  }
  // Nothing that this rank posts completes.
  void hold(int rank, bool held) {
    for (size_t nic : {0, 1}) network.nic(static_cast<size_t>(2 * rank) + nic).hold(held);
  }
  // What a rank knows of the other one.
  Left left(int rank) { return Left{memory(rank).left(kLocal, 1 - rank).load()}; }
  // Rank 0 is asked to, and hears. Writes of the probe.
  size_t probe() {
    const size_t before = num_posted(0);
    exchange(0).probe(1);
    turn(100);
    return num_posted(0) - before;
  }

  // Who has said on a node that its ranks are to stop, plus 1.
  uint64_t aborted(int rank) { return memory(rank).head(kLocal).abort; }
  engine::TransferEngine& engine(int rank) { return engines_[static_cast<size_t>(rank)]; }

  test::FakeNetwork network;

 private:
  static constexpr int kLocal = 0;

  NodeMemory& memory(int rank) { return *memory_[static_cast<size_t>(rank)]; }

  const Plan plan_ = two_nodes();
  std::vector<std::unique_ptr<NodeMemory>> memory_;
  test::Engines engines_;
  std::vector<const engine::MemoryHandle*> handles_, boards_;
  std::array<std::array<int32_t, 2>, 2> masks_{};
  std::vector<std::unique_ptr<Exchange>> exchanges_;
};

}  // namespace moe_p2p::moe::exchange_test
