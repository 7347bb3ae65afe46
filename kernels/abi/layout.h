// Layouts of received rows, a line each: all that ops, hosts and kernels have to know of a layout.
// They ask for a fact and name no layout; where the rows of one lie is decided in
// csrc/moe/host/dispatch.cpp (place) and in kernels/dispatch/placement.cuh. Python has the same
// lines in moe_p2p/moe/layouts.py, and tests/moe/test_layouts.py compares them.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

// Numbers of DispatchOptions. Each expert's rows in space of their own, all experts' rows one after
// the other, or one row for each (source token, receiving rank), source after source.
enum class RowLayout : i32 { kPadded = 0, kGrouped = 1, kByRank = 2 };

struct LayoutFacts {
  const char* name;
  RowLayout kernel;  // the first of the layouts that share a dispatch kernel
  bool apart;        // rows are [E_local, capacity], else [capacity]
  // A row is a token of this rank, with K weights and expert ids, and offsets are of sources. Else
  // it is of one (token, expert), and offsets are of experts.
  bool per_token;

  // Experts follow each other in one room: they can be aligned, and dropped at its end.
  MOE_P2P_HD constexpr bool packs_experts() const { return !apart && !per_token; }
};

inline constexpr i32 kNumLayouts = 3;
// Not an array: kernels would carry it.
MOE_P2P_HD constexpr LayoutFacts facts_of(RowLayout layout) {
  switch (layout) {
    case RowLayout::kPadded: return {"padded", RowLayout::kPadded, true, false};
    case RowLayout::kGrouped: return {"grouped", RowLayout::kPadded, false, false};
    case RowLayout::kByRank: return {"by_rank", RowLayout::kByRank, false, true};
  }
  return {};
}
// The name of the first layout with this fact, for error texts.
MOE_P2P_HD constexpr const char* layout_with(bool LayoutFacts::* fact) {
  for (i32 i = 0; i < kNumLayouts; ++i)
    if (const LayoutFacts each = facts_of(static_cast<RowLayout>(i)); each.*fact) return each.name;
  return "";
}

}  // namespace moe_p2p::abi
