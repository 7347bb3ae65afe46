// Which calls on a GPU the host refuses, or releases older ones for.
#include <doctest/doctest.h>

#include "device_rank.h"

namespace moe_p2p::test {
namespace {

TEST_CASE("device calls: what would wait for a step that the caller holds is refused") {
  Rank rank;
  rank.dispatch(8, 0);
  CHECK(refused([&] { rank.dispatch(40, 1); }) == Code::kInvalidArgument);
  rank.dispatch(8, 1);
  CHECK(refused([&] { rank.dispatch(8, 2); }) == Code::kInvalidArgument);
  CHECK(refused([&] { rank.combine(8, 2); }) == Code::kInvalidArgument);  // solo
  rank.backend.release(rank.handle(0), {});
  CHECK(launched->combine.empty == 1);
  rank.combine(8, 1);
  rank.dispatch(40, 2);
  launched.reset();
  rank.backend.release(rank.handle(2), {});
  CHECK(!launched);  // a solo dispatch holds nothing
}

TEST_CASE("device calls: halves are received once, and agree") {
  Rank rank(4);
  auto sent = rank.send(16);
  auto received = rank.recv();
  CHECK(refused([&] { rank.backend.dispatch(nullptr, &received); }) == Code::kInvalidArgument);
  rank.backend.dispatch(&sent, nullptr);
  CHECK(launched->dispatch.grid.num_recv_blocks == 0);
  CHECK(refused([&] { rank.combine(16); }) == Code::kInvalidArgument);  // not received
  received.x_dtype = DType::kFloat32;
  CHECK(refused([&] { rank.backend.dispatch(nullptr, &received); }) == Code::kInvalidArgument);
  received.x_dtype = DType::kBFloat16;
  rank.backend.dispatch(nullptr, &received);
  CHECK(launched->dispatch.solo == 1);
  CHECK(launched->dispatch.num_chunks == 2);
  CHECK(launched->dispatch.num_rows == 3);
  CHECK(refused([&] { rank.backend.dispatch(nullptr, &received); }) == Code::kInvalidArgument);

  float scalars[2] = {};
  auto partials = rank.combine_send(16);
  partials.row_scalars = scalars;
  auto sums = rank.combine_recv();
  sums.out_scalars = scalars;
  CHECK(refused([&] { rank.backend.combine(nullptr, &sums); }) == Code::kInvalidArgument);
  rank.backend.combine(&partials, nullptr);
  CHECK(launched->combine.with_scalars == 1);
  rank.backend.combine(nullptr, &sums);
  CHECK(launched->combine.with_scalars == 1);
  auto whole = rank.send(40);
  CHECK(refused([&] { rank.backend.dispatch(&whole, nullptr); }) ==
        Code::kInvalidArgument);  // five chunks, four steps
}

TEST_CASE("device calls: the oldest dispatch is released where its step is needed") {
  Rank rank;
  rank.backend.ledger().release_oldest();
  const auto launches = [&](auto&& call) {
    num_launched = 0;
    call();
    return num_launched;
  };
  CHECK(launches([&] { rank.dispatch(8, 0); }) == 1);
  CHECK(launches([&] { rank.dispatch(8, 1); }) == 1);
  CHECK(launches([&] { rank.dispatch(8, 2); }) == 2);  // and a release of 0
  CHECK(launched->dispatch.handle == reinterpret_cast<uint64_t>(rank.handle(2).words));
  CHECK(launches([&] { rank.combine(8, 0); }) == 2);  // opens a step: 1 is released
  CHECK(launches([&] { rank.combine(8, 2); }) == 1);  // closes its own
  CHECK(launches([&] { rank.dispatch(40, 3); }) == 1);
  const auto sent = rank.send(8, 0);
  rank.backend.dispatch(&sent, nullptr);
  rank.dispatch(8, 1);
  CHECK(launches([&] { rank.dispatch(8, 2); }) == 3);  // 0 is received and released
  CHECK(refused([&] { rank.combine(8, 0); }) == Code::kOk);
}

TEST_CASE("device calls: a capture counts as one run where the oldest dispatch is released") {
  Rank rank;
  rank.backend.ledger().release_oldest();
  capture = 1;
  rank.dispatch(8, 0);
  rank.dispatch(8, 1);
  capture = 0;
  num_launched = 0;
  rank.dispatch(8, 2);
  CHECK(num_launched == 2);  // 0 is released, once
  rank.dispatch(8, 3);
  CHECK(num_launched == 4);
  rank.combine(8, 2);
  rank.combine(8, 3);
  num_launched = 0;
  for (int i = 0; i < 3; ++i) rank.combine(8, 0);  // steps of their own
  CHECK(num_launched == 3);
}

// A graph is replayed without the host: what it holds is neither open nor closed for eager calls.

TEST_CASE("device calls: a captured dispatch may be combined again and again") {
  Rank rank;
  capture = 1;
  rank.dispatch(8, 0);
  capture = 0;
  for (int replay = 0; replay < 5; ++replay) rank.combine(8, 0);
  rank.dispatch(8, 1);
  rank.dispatch(8, 2);  // nothing of the graph is in the way
  CHECK(refused([&] { rank.dispatch(8, 3); }) == Code::kInvalidArgument);
}

TEST_CASE("device calls: a captured combine closes dispatches that the host does not count") {
  Rank rank;
  rank.dispatch(8, 0);
  capture = 1;
  rank.combine(8, 0);
  capture = 0;
  for (int replay = 0; replay < 5; ++replay) rank.dispatch(8, replay);
}

TEST_CASE("device calls: halves in graphs are received as often as they are replayed") {
  Rank rank;
  capture = 1;
  const auto sent = rank.send(8);
  const auto received = rank.recv();
  rank.backend.dispatch(&sent, nullptr);
  capture = 0;
  CHECK(refused([&] { rank.combine(8); }) == Code::kInvalidArgument);  // not received
  for (int replay = 0; replay < 3; ++replay) {
    rank.backend.dispatch(nullptr, &received);
    CHECK(launched->dispatch.num_rows == 3);
    rank.combine(8);
  }
  capture = 2;  // another graph
  const auto partials = rank.combine_send(8);
  const auto sums = rank.combine_recv();
  rank.backend.dispatch(nullptr, &received);
  rank.backend.combine(&partials, nullptr);
  capture = 0;
  for (int replay = 0; replay < 3; ++replay) rank.backend.combine(nullptr, &sums);
  // Whoever takes the handle for a call of his own is counted again.
  rank.dispatch(8, 0);
  rank.combine(8, 0);
  CHECK(refused([&] { rank.backend.combine(nullptr, &sums); }) == Code::kInvalidArgument);
}

TEST_CASE("device calls: what would wait for itself within a graph is refused") {
  Rank rank;
  capture = 1;
  rank.dispatch(8, 0);
  rank.dispatch(8, 1);
  CHECK(refused([&] { rank.dispatch(8, 2); }) == Code::kInvalidArgument);
  rank.combine(8, 0);
  rank.dispatch(8, 2);
  capture = 2;
  rank.dispatch(8, 3);  // its graph may be replayed after what closes those
}

}  // namespace
}  // namespace moe_p2p::test
