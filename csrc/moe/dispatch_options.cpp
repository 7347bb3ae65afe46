#include "moe/dispatch_options.h"

#include "base/log.h"

namespace moe_p2p::moe {

namespace {

constexpr int kScaleFormatShift = 2;  // above the layout
enum Flags : int64_t {
  kQuantize = 1 << 4,
  kColumnScales = 1 << 5,
  kZeroPadding = 1 << 6,
  kSolo = 1 << 7,
  kWithSource = 1 << 8,
  kWithRanges = 1 << 9,
  kWithWaitTicks = 1 << 10,
  kCopyTopk = 1 << 11,
};
constexpr int kAlignmentShift = 12;
constexpr int64_t kDrop = int64_t{1} << 43;                // above the alignment
constexpr int kSumOrderShift = 44;                         // above the alignment; of a combine only
constexpr int kPartialsShift = 46;                         // likewise
constexpr int64_t kMaxAlignment = (int64_t{1} << 31) - 1;  // rows are numbered in 32 bits

}  // namespace

DispatchOptions dispatch_options_from(int64_t number) {
  const auto layout = static_cast<abi::RowLayout>(number & kLayoutMask);
  const abi::LayoutFacts facts = abi::facts_of(layout);
  const auto scale_format = static_cast<abi::ScaleFormat>(number >> kScaleFormatShift & 3);
  const int64_t alignment = (number & (kDrop - 1)) >> kAlignmentShift;
  const bool drop = (number & kDrop) != 0;
  const auto has = [&](Flags flag) { return (number & flag) != 0; };
  MOE_P2P_CHECK(facts.name && scale_format <= abi::ScaleFormat::kUe8m0 && alignment >= 1 &&
                    alignment <= kMaxAlignment &&
                    (has(kQuantize) || scale_format == abi::ScaleFormat::kFloat32) &&
                    (!has(kWithRanges) || facts.apart) && (!drop || facts.packs_experts()) &&
                    number >> kSumOrderShift == 0,
                base::Code::kInvalidArgument, "options is ", number,
                ", must be the number of a moe_p2p.DispatchOptions");
  return {.layout = layout,
          .scale_format = scale_format,
          .quantize = has(kQuantize),
          .column_scales = has(kColumnScales),
          .zero_padding = has(kZeroPadding),
          .solo = has(kSolo),
          .with_source = has(kWithSource),
          .with_ranges = has(kWithRanges),
          .with_wait_ticks = has(kWithWaitTicks),
          .copy_topk = has(kCopyTopk),
          .drop = drop,
          .alignment = alignment};
}

abi::RowLayout layout_from(int64_t number) {
  const auto layout = static_cast<abi::RowLayout>(number & kLayoutMask);
  MOE_P2P_CHECK(abi::facts_of(layout).name, base::Code::kInvalidArgument, "options is ", number,
                ", its lowest two bits are no layout");
  return layout;
}

abi::SumOrder sum_order_from(int64_t number) {
  const auto order = static_cast<abi::SumOrder>(number >> kSumOrderShift & 3);
  // A token has one row per token at a rank, which is the sum already.
  const bool per_token = abi::facts_of(layout_from(number)).per_token;
  return order == abi::SumOrder::kRows && per_token ? abi::SumOrder::kTopk : order;
}

abi::Partials partials_from(int64_t number) { return partials_of(number >> kPartialsShift); }

abi::Partials partials_of(int64_t partials) {
  MOE_P2P_CHECK(
      partials >= 0 && partials <= static_cast<int64_t>(abi::Partials::kBlock16),
      base::Code::kInvalidArgument, "partials is ", partials,
      ", must be from 0 to 3: of the result's type, int10, int10 between nodes, or block16");
  return static_cast<abi::Partials>(partials);
}

}  // namespace moe_p2p::moe
