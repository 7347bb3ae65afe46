// Which calls are plain.
#include "moe/device/plain.h"

#include <doctest/doctest.h>

namespace moe_p2p::moe {
namespace {

// Whether a plain call is plain with this change.
template <typename Params>
bool plain_with(void (*change)(Params&)) {
  Params p{};
  p.num_chunks = 1;
  change(p);
  return is_plain(p);
}

TEST_CASE("plain calls: a dispatch that asks for anything rare is none") {
  const auto with = plain_with<abi::DispatchParams>;
  CHECK(with([](auto&) {}));
  CHECK(!with([](auto& p) { p.num_chunks = 2; }));
  CHECK(!with([](auto& p) { p.solo = 1; }));
  CHECK(!with([](auto& p) { p.opaque = 1; }));
  CHECK(!with([](auto& p) { p.num_extras = 1; }));
  CHECK(!with([](auto& p) { p.num_tokens.address = 64; }));
  CHECK(!with([](auto& p) { p.topk_copy.address = 64; }));
  CHECK(!with([](auto& p) { p.zero_padding = 1; }));
  CHECK(!with([](auto& p) { p.wait_ticks.address = 64; }));
  CHECK(with([](auto& p) { p.source.address = p.ranges.address = 64; }));
  CHECK(with([](auto& p) { p.grouped = 1, p.drop = 1; }));
}

TEST_CASE("plain calls: a combine that asks for anything rare is none") {
  const auto with = plain_with<abi::CombineParams>;
  CHECK(with([](auto&) {}));
  CHECK(!with([](auto& p) { p.num_chunks = 2; }));
  CHECK(!with([](auto& p) { p.empty = 1; }));
  CHECK(!with([](auto& p) { p.with_scalars = 1; }));
  CHECK(!with([](auto& p) { p.rows_apart = 1; }));
  CHECK(!with([](auto& p) { p.wait_ticks.address = 64; }));
  CHECK(with([](auto& p) { p.topk_weights.address = p.bias[0].address = 64; }));
}

}  // namespace
}  // namespace moe_p2p::moe
