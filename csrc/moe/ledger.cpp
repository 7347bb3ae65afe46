#include "moe/ledger.h"

#include <algorithm>

#include "base/log.h"
#include "base/mutation.h"

namespace moe_p2p::moe {

template <typename Visit>
void Ledger::each_in_the_way(int64_t num_steps, uint64_t capture, Visit&& visit) const {
  const uint64_t next = counts_apart(capture) ? captured_steps_ : steps_;
  const uint64_t last = next + static_cast<uint64_t>(num_steps) - 1;
  const auto look_at = [&](const OpenCall& open) {
    if (open.holds && (releases_ || open.capture == capture) &&
        last >= open.first_step + static_cast<uint64_t>(steps_in_flight_))
      visit(open);
  };
  if (releases_ || capture == 0)
    for (const OpenCall& open : eager_) look_at(open);
  if ((releases_ || capture != 0) && num_held_ > 0)
    for (const auto& [handle, open] : captured_) look_at(open);
}

std::vector<OpenCall> Ledger::to_release(int64_t num_steps, uint64_t capture) const {
  std::vector<OpenCall> calls;
  if (!releases_) return calls;
  each_in_the_way(num_steps, capture, [&](const OpenCall& open) {
    if (!open.solo && open.stage != Stage::kCombineSent) calls.push_back(open);
  });
  std::ranges::sort(calls, {}, &OpenCall::first_step);
  return calls;
}

void Ledger::check_room(int64_t num_steps, uint64_t capture) {
  if (MOE_P2P_MUTATED(kReuseSlotEarly)) return;
  std::vector<uint64_t> steps;
  each_in_the_way(num_steps, capture,
                  [&](const OpenCall& open) { steps.push_back(open.first_step); });
  if (capture == 0 && replays_close_ && !releases_) {
    std::erase_if(eager_, [&](const OpenCall& open) {
      return std::ranges::find(steps, open.first_step) != steps.end();
    });
    return;
  }
  if (steps.empty()) return;
  const uint64_t oldest = *std::ranges::min_element(steps);
  const uint64_t next = counts_apart(capture) ? captured_steps_ : steps_;
  throw base::Error(
      base::Code::kInvalidArgument,
      base::concat("the dispatch of step ", oldest, " is still open; ", next - oldest - 1,
                   " have begun after it, and this call begins ", num_steps,
                   ": with steps_in_flight ", steps_in_flight_, " at most ", steps_in_flight_ - 1,
                   " further steps may begin while a dispatch is open; combine or release that "
                   "dispatch first"));
}

const OpenCall* Ledger::find(const int32_t* handle, Stage stage, uint64_t capture) const {
  const auto captured = captured_.find(handle);
  const bool was_captured = captured != captured_.end() && captured->second.stage >= stage;
  if (capture != 0 && was_captured) return &captured->second;
  // Newest first: a dropped handle's memory may belong to another handle now.
  const auto found = std::find_if(eager_.rbegin(), eager_.rend(), [&](const OpenCall& open) {
    return open.handle == handle && open.stage == stage;
  });
  if (found != eager_.rend()) return &*found;
  return was_captured ? &captured->second : nullptr;
}

// Several solo dispatches may name no step at all: handle addresses distinguish their combines.
const OpenCall* Ledger::find_named(uint64_t step, const int32_t* handle, Stage stage) const {
  const OpenCall* found = nullptr;
  for (const OpenCall& open : eager_)
    if (open.named_step == step && open.stage == stage &&
        (found == nullptr || found->handle != handle))
      found = &open;
  return found;
}

bool Ledger::waits_to_be_received(const int32_t* handle) const {
  const auto waits = [&](const OpenCall& open) {
    return open.handle == handle && open.stage == Stage::kDispatchSent;
  };
  const auto captured = captured_.find(handle);
  return std::ranges::any_of(eager_, waits) ||
         (captured != captured_.end() && waits(captured->second));
}

void Ledger::forget_captured(const int32_t* handle) {
  const auto found = captured_.find(handle);
  if (found == captured_.end()) return;
  num_held_ -= found->second.holds;
  captured_.erase(found);
}

void Ledger::keep_captured(const OpenCall& call) {
  forget_captured(call.handle);
  num_held_ += call.holds;
  captured_.emplace(call.handle, call);
}

void Ledger::record(const OpenCall* before, OpenCall call, uint64_t capture, bool opens,
                    bool stays) {
  call.holds = stays;
  if (!stays) call.owner.reset();
  if (opens) {
    call.first_step = steps_of(capture);
    steps_of(capture) += static_cast<uint64_t>(call.num_steps);
  }
  if (before && before->capture != 0) {
    const OpenCall& kept = captured_.at(before->handle);
    if (capture != kept.capture && !releases_) call.holds = kept.holds;
    call.capture = kept.capture;
    call.stage = std::max(call.stage, kept.stage);
    return keep_captured(call);
  }
  const bool dispatches = !before && call.stage != Stage::kCombineSent;
  if (before) eager_.erase(eager_.begin() + (before - eager_.data()));
  call.capture = capture;
  if (capture != 0) {
    replays_close_ = replays_close_ || !dispatches;
    if (dispatches || stays) keep_captured(call);
    return;
  }
  if (dispatches) forget_captured(call.handle);
  if (stays) eager_.push_back(std::move(call));
}

}  // namespace moe_p2p::moe
