// Calls on a GPU that a later half or combine belongs to, by their handle's address: what the host has to
// know of them so that halves agree, and so that it can refuse what would wait for itself. Which step a
// kernel opens or closes is decided on the device (kernels/device/steps.cuh).
//
// Calls that are captured run whenever their graph is replayed, without the host. So they stay known until
// another dispatch takes their handle, and only calls of the same capture are held against each other.
// Where a graph closes dispatches that it does not hold, no call is refused any more for being too many:
// the host cannot know how many are open.
#pragma once

#include <cstdint>
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
  bool by_rank = false;

  auto operator<=>(const DispatchVariant&) const = default;
};
using CombineTypes = std::pair<int, int>;  // what a combine kernel is compiled for: of y, of out

// A dispatch that was not received, a paired one that was not combined, a combine that was not received.
// The halves that follow find here what they must agree with.
struct OpenCall {
  enum class Stage : uint8_t { kDispatchSent, kDispatched, kCombineSent };

  const int32_t* handle;
  int64_t num_steps;
  bool solo;
  Stage stage;
  DispatchVariant variant{};  // of a dispatch
  CombineTypes types{};       // of a combine
  abi::TokenParts parts{};
  bool opaque = false;  // RegionFlags::kOpaque
  int32_t num_extras = 0;
  int32_t num_rows = 0;
  bool with_scalars = false;
  uint64_t capture = 0;     // platform::capture_of
  uint64_t first_step = 0;  // as counted here, apart for captures
  bool holds = true;        // its step, as far as this capture, or the host, has come
};

class OpenCalls {
 public:
  using Stage = OpenCall::Stage;

  explicit OpenCalls(int64_t steps_in_flight) : steps_in_flight_(steps_in_flight) {}

  // The steps of this call must not come to wait for one that the caller himself holds open. Throws.
  void check_room(int64_t num_steps, uint64_t capture);
  // The newest of this handle that waits for what follows `stage`, or null.
  const OpenCall* find(const int32_t* handle, Stage stage, uint64_t capture) const;
  bool waits_to_be_received(const int32_t* handle) const;

  // A call of `capture` has been launched: it takes the place of `before`, which find() has returned, if
  // any. `opens`: steps of its own. `stays`: another one belongs to it.
  void launched(const OpenCall* before, OpenCall call, uint64_t capture, bool opens, bool stays);

 private:
  uint64_t& next_step(uint64_t capture) { return capture != 0 ? captured_steps_ : steps_; }

  const int64_t steps_in_flight_;
  std::vector<OpenCall> eager_;  // a handful, oldest first
  std::unordered_map<const int32_t*, OpenCall> captured_;
  uint64_t steps_ = 0, captured_steps_ = 0;
  bool replays_close_ = false;  // dispatches that were not captured with what closes them
};

}  // namespace moe_p2p::moe
