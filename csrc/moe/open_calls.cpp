#include "moe/open_calls.h"

#include <algorithm>
#include <ranges>

#include "base/log.h"

namespace moe_p2p::moe {

void OpenCalls::check_room(int64_t num_steps, uint64_t capture) {
  const auto steps = static_cast<uint64_t>(steps_in_flight_);
  const uint64_t last = next_step(capture) + static_cast<uint64_t>(num_steps) - 1;
  const auto is_in_the_way = [&](const OpenCall& open) {
    return open.holds && open.capture == capture && last >= open.first_step + steps;
  };
  if (capture == 0 && replays_close_) {
    std::erase_if(eager_, is_in_the_way);
    return;
  }
  const bool refused = capture != 0
                           ? std::ranges::any_of(std::views::values(captured_), is_in_the_way)
                           : std::ranges::any_of(eager_, is_in_the_way);
  MOE_P2P_CHECK(!refused, base::Code::kInvalidArgument,
                "an earlier call is still open and this call needs ", num_steps,
                " of steps_in_flight ", steps, "; combine or release the earlier dispatch first");
}

const OpenCall* OpenCalls::find(const int32_t* handle, Stage stage, uint64_t capture) const {
  const auto captured = captured_.find(handle);
  const bool was_captured = captured != captured_.end() && captured->second.stage >= stage;
  if (capture != 0 && was_captured) return &captured->second;
  // The newest first: memory of a handle that was dropped may be that of another one now.
  const auto found = std::find_if(eager_.rbegin(), eager_.rend(), [&](const OpenCall& open) {
    return open.handle == handle && open.stage == stage;
  });
  if (found != eager_.rend()) return &*found;
  return was_captured ? &captured->second : nullptr;
}

bool OpenCalls::waits_to_be_received(const int32_t* handle) const {
  const auto waits = [&](const OpenCall& open) {
    return open.handle == handle && open.stage == Stage::kDispatchSent;
  };
  const auto captured = captured_.find(handle);
  return std::ranges::any_of(eager_, waits) ||
         (captured != captured_.end() && waits(captured->second));
}

void OpenCalls::launched(const OpenCall* before, OpenCall call, uint64_t capture, bool opens,
                         bool stays) {
  call.holds = stays;
  if (opens) {
    call.first_step = next_step(capture);
    next_step(capture) += static_cast<uint64_t>(call.num_steps);
  }
  if (before && before->capture != 0) {
    OpenCall& kept = captured_.at(before->handle);
    if (capture != kept.capture) call.holds = kept.holds;
    call.capture = kept.capture;
    call.stage = std::max(call.stage, kept.stage);
    kept = call;
    return;
  }
  const bool dispatches = !before && call.stage != Stage::kCombineSent;
  if (before) eager_.erase(eager_.begin() + (before - eager_.data()));
  call.capture = capture;
  if (capture != 0) {
    replays_close_ = replays_close_ || !dispatches;
    if (dispatches || stays) captured_[call.handle] = call;
    return;
  }
  if (dispatches) captured_.erase(call.handle);
  if (stays) eager_.push_back(call);
}

}  // namespace moe_p2p::moe
