#include "ops/communicator_settings.h"

#include <initializer_list>
#include <limits>
#include <string_view>

#include "base/log.h"
#include "ops/engine_object.h"
#include "provider/settings.h"

namespace moe_p2p::ops {

using base::Code;

namespace {

constexpr uint64_t kMost = std::numeric_limits<int64_t>::max();

constexpr struct {
  std::string_view key;
  int64_t moe::PlanInput::* field;
} kPlanFields[] = {
    {"world_size", &moe::PlanInput::world_size},
    {"ranks_per_node", &moe::PlanInput::ranks_per_node},
    {"num_experts", &moe::PlanInput::num_experts},
    {"hidden_dim", &moe::PlanInput::hidden_dim},
    {"topk", &moe::PlanInput::topk},
    {"max_tokens", &moe::PlanInput::max_tokens},
    {"chunk_tokens", &moe::PlanInput::chunk_tokens},
    {"steps_in_flight", &moe::PlanInput::steps_in_flight},
    {"payload_item_bytes", &moe::PlanInput::payload_item_bytes},
    {"combine_item_bytes", &moe::PlanInput::combine_item_bytes},
    {"combine_rows", &moe::PlanInput::combine_rows},
    {"extra_bytes", &moe::PlanInput::extra_bytes},
    {"part_bytes", &moe::PlanInput::part_bytes},
};

provider::Settings parse(const std::string& text) {
  return {"communicator",
          text,
          {"world_size",
           "ranks_per_node",
           "num_experts",
           "hidden_dim",
           "topk",
           "max_tokens",
           "chunk_tokens",
           "steps_in_flight",
           "payload_item_bytes",
           "combine_item_bytes",
           "combine_rows",
           "extra_bytes",
           "part_bytes",
           "expert_rank",
           "rank",
           "communicator",
           "tag",
           "timeout_s",
           "wait",
           "num_threads",
           "on_device",
           "arrival_flags",
           "fixed_masks",
           "poison"}};
}

moe::PlanInput plan_input(const provider::Settings& settings) {
  moe::PlanInput input;
  for (const auto& [key, field] : kPlanFields)
    input.*field =
        static_cast<int64_t>(settings.integer(key, static_cast<uint64_t>(input.*field), 0, kMost));
  input.expert_rank = settings.integers("expert_rank");
  return input;
}

}  // namespace

moe::PlanInput plan_input_from(const std::string& settings) { return plan_input(parse(settings)); }

moe::AllToAllOptions communicator_options_from(const std::string& text) {
  const provider::Settings settings = parse(text);
  const moe::PlanInput plan = plan_input(settings);
  const auto rank = static_cast<int64_t>(settings.integer("rank", 0, 0, kMost));
  MOE_P2P_CHECK(rank < plan.world_size, Code::kInvalidArgument, "rank is ", rank,
                ", must be from 0 to ", plan.world_size - 1);
  const auto communicator = settings.integer("communicator", 0, 0, kMost);
  MOE_P2P_CHECK(communicator < engine::ImmKey::kMaxCommunicators, Code::kResourceExhausted,
                "this engine has no communicator number left after ", communicator,
                "; make another engine");
  constexpr double kAny = std::numeric_limits<double>::max();  // timeout_from() checks the range
  const std::string way =
      settings.word("arrival_flags", "auto", {"auto", "write", "gdrcopy", "relay"});
  return {.plan = plan,
          .rank = static_cast<int>(rank),
          .communicator = static_cast<uint32_t>(communicator),
          .tag = settings.integer("tag", 0, 0, kMost),
          .wait = wait_policy(settings.text("wait", "sleep")),
          .timeout = timeout_from(settings.real("timeout_s", 30.0, -kAny, kAny)),
          .num_threads = static_cast<int>(settings.integer("num_threads", 1, 1, 1024)),
          .device = settings.integer("on_device", 0, 0, 1) != 0,
          .masks = nullptr,
          .fixed_masks = settings.integer("fixed_masks", 0, 0, 1) != 0,
          .poison = settings.integer("poison", 0, 0, 1) != 0,
          .arrival_flags = way == "write"     ? moe::ArrivalFlags::kWrite
                           : way == "gdrcopy" ? moe::ArrivalFlags::kGdrCopy
                           : way == "relay"   ? moe::ArrivalFlags::kRelay
                                              : moe::ArrivalFlags::kAuto};
}

}  // namespace moe_p2p::ops
