// Open calls of this rank: a dispatch that was not received, a paired one that was not combined, a
// combine that was not received. The following half finds here what it must agree with. A call that
// would wait for a step that its own caller holds open is refused, or the oldest dispatches are
// released for it. Used by both backends. When a step ends is decided elsewhere: hosts see it
// arrive (host/calls.h, StepRing); on GPUs kernels do, which also decide what they open and close
// (kernels/device/steps.cuh).
//
// Captured calls run whenever their graph is replayed, without the host. So they stay known until
// another dispatch takes their handle, and are checked only against calls of the same capture. Once
// a graph closes dispatches that it does not hold, no call is refused for being too many: the host
// cannot know how many are open. Where the oldest are released, a captured call counts as if it ran
// once, and so does the release that it may cause.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/abi/params.h"

namespace moe_p2p::moe {

// What a dispatch kernel is compiled for.
struct DispatchVariant {
  abi::DType x_dtype{};  // of the caller's payload
  bool quantize = false;
  abi::ScaleFormat scale_format = abi::ScaleFormat::kFloat32;
  abi::RowLayout layout{};  // LayoutFacts::kernel
  uint64_t x_bytes = 0;     // DispatchSend's
  bool plain = false;       // is_plain() (moe/device/plain.h)
  bool is_short = false;    // for short calls, where others go in bulk (DeviceKernel::max_tokens)
  bool ready = false;       // of a receiving half that raises counters

  auto operator<=>(const DispatchVariant&) const = default;
};
// What a combine kernel is compiled for.
struct CombineVariant {
  abi::DType y_dtype{}, out_dtype{};
  bool by_topk = false;  // SumOrder::kTopk or kRows
  abi::Partials partials{};
  bool plain = false;
  bool ready = false;  // for rows that are written meanwhile
  bool is_short = false;

  auto operator<=>(const CombineVariant&) const = default;
};

struct OpenCall {
  enum class Stage : uint8_t { kDispatchSent, kDispatched, kCombineSent };

  const int32_t*
      handle;  // address of its words; on hosts only for a sent half: else it may be a copy
  int64_t num_steps;
  int32_t num_slots = 0;   // HandleMeta's
  int32_t max_tokens = 0;  // of a dispatch
  bool solo;
  Stage stage;
  DispatchVariant variant{};  // of a dispatch
  CombineVariant sum{};       // of a combine
  abi::SumOrder order{};
  abi::TokenParts parts{};
  bool opaque = false;  // RegionFlags::kOpaque
  int32_t num_extras = 0;
  int32_t num_rows = 0;
  int64_t y_rows = 0;  // of a combine
  bool with_scalars = false;
  std::shared_ptr<const void>
      owner{};              // of the handle's words, as long as a release would read them
  uint64_t capture = 0;     // platform::capture_of
  uint64_t first_step = 0;  // as counted here; of a paired combine, its dispatch's
  uint64_t named_step = 0;  // on hosts: named by the handle
  bool holds = true;        // its step is open, as far as this capture, or the host, knows
};

class Ledger {
 public:
  using Stage = OpenCall::Stage;

  explicit Ledger(int64_t steps_in_flight) : steps_in_flight_(steps_in_flight) {}
  // Releases the oldest dispatches; without it a call without room is refused.
  void release_oldest() noexcept { releases_ = true; }
  bool releases() const noexcept { return releases_; }

  // Dispatches to release before a call of so many steps, oldest first.
  std::vector<OpenCall> to_release(int64_t num_steps, uint64_t capture = 0) const;
  // Throws Error{kInvalidArgument} when a step of this call would wait for one that the caller
  // itself holds open.
  void check_room(int64_t num_steps, uint64_t capture = 0);
  // Forgets what was called outside of captures; the next call opens step `next`.
  void restart(uint64_t next) {
    eager_.clear();
    steps_ = next;
  }
  // The first step of the next call.
  uint64_t next_step() const noexcept { return steps_; }

  // Returns the newest call of this handle that waits for what follows `stage`, or null.
  const OpenCall* find(const int32_t* handle, Stage stage, uint64_t capture) const;
  // The same on hosts, where handles may be copied between the calls: found by the step they name.
  const OpenCall* find_named(uint64_t step, const int32_t* handle, Stage stage) const;
  bool waits_to_be_received(const int32_t* handle) const;

  // Records a sent call of `capture`, which replaces `before`, the result of find(), if any.
  // `opens`: it opens steps. `stays`: another call follows it.
  void record(const OpenCall* before, OpenCall call, uint64_t capture, bool opens, bool stays);

 private:
  uint64_t& steps_of(uint64_t capture) { return counts_apart(capture) ? captured_steps_ : steps_; }
  bool counts_apart(uint64_t capture) const { return capture != 0 && !releases_; }
  void keep_captured(const OpenCall& call);
  void forget_captured(const int32_t* handle);
  template <typename Visit>
  void each_in_the_way(int64_t num_steps, uint64_t capture, Visit&& visit) const;

  int64_t steps_in_flight_;
  bool releases_ = false;
  std::vector<OpenCall> eager_;  // a handful, oldest first
  std::unordered_map<const int32_t*, OpenCall> captured_;
  int64_t num_held_ = 0;  // calls in eager_ with a step; captured ones may be thousands
  uint64_t steps_ = 0, captured_steps_ = 0;
  bool replays_close_ = false;  // dispatches that were not captured with the call that closes them
};

}  // namespace moe_p2p::moe
