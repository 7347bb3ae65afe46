// What the host makes of calls on a GPU.
#include "moe/device/backend.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <iterator>
#include <thread>

#include "device_rank.h"
#include "moe/all_to_all.h"

namespace moe_p2p::test {
namespace {

int num_threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

TEST_CASE("device calls: one chunk is paired, a grid for each half") {
  Rank rank;
  rank.dispatch(8);
  CHECK(launched->dispatch.solo == 0);
  CHECK(launched->dispatch.num_chunks == 1);
  CHECK(launched->dispatch.grid.num_send_blocks ==
        25);  // eight for each of three rows, one for headers
  CHECK(launched->dispatch.grid.num_recv_blocks == 32);
  CHECK(launched->num_blocks == 1 + 25 + 32);  // one relays
  CHECK(launched->num_threads == 448);
  CHECK(launched->shared_bytes == 5000);
}

TEST_CASE("device calls: rows that need no sum are sent by fewer blocks") {
  Rank rank(2, 10);
  const auto send_blocks = [&](const CombineSend& send) {
    rank.dispatch(8);
    const auto recv = rank.combine_recv();
    rank.backend.combine(&send, &recv);
    return launched->combine.grid.num_send_blocks;
  };
  const float number = 1.0f;
  CombineSend send = rank.combine_send(8);
  CHECK(send_blocks(send) == 3);  // 50 of 150, of all but one that relays
  send.layout = abi::RowLayout::kByRank;
  CHECK(send_blocks(send) == 1);  // 25 of 125
  send.row_weights = &number;
  CHECK(send_blocks(send) == 4);  // 100 of 200
  send.row_weights = nullptr;
  send.row_scalars = &number;
  CHECK(send_blocks(send) == 4);
}

TEST_CASE("device calls: the device is the communicator's, whatever is current in the thread") {
  Rank rank;
  const platform::PrimaryContext here(kDevice), elsewhere(0);
  const void* const before = current_context();
  rank.dispatch(8);
  CHECK(launched->context == here.get());
  CHECK(current_context() == before);
  const platform::ContextGuard guard(elsewhere);
  rank.combine(8);
  CHECK(launched->context == here.get());
  CHECK(current_context() == elsewhere.get());
}

TEST_CASE("device calls: several chunks are solo") {
  Rank rank;
  rank.dispatch(40);
  CHECK(launched->dispatch.solo == 1);
  CHECK(launched->dispatch.num_chunks == 5);
  rank.combine(40);
  CHECK(launched->combine.num_chunks == 5);
  for (int i = 0; i < 5; ++i) rank.dispatch(8, 0, true);  // nothing stays open
  CHECK(launched->dispatch.solo == 1);
}

TEST_CASE("device calls: a plain call runs on the plain kernel, where there is one") {
  Rank rank;
  const auto threads_of = [&](auto&& call) {
    call();
    return launched->num_threads;
  };
  const auto plain = [&] { return threads_of([&] { rank.dispatch(8); }); };
  CHECK(plain() == 448);
  rank.combine(8);
  DispatchVariant dispatch{.x_dtype = DType::kBFloat16, .plain = true};
  rank.backend.set_dispatch(dispatch, {.handle = kDispatchKernel,
                                       .num_threads = 96,
                                       .max_resident_blocks = 200,
                                       .max_slot_bytes = 1 << 20});
  rank.backend.set_combine(
      {DType::kBFloat16, DType::kBFloat16, false, {}, true},
      {.handle = kCombineKernel, .num_threads = 32, .max_resident_blocks = 200});
  CHECK(plain() == 96);
  CHECK(threads_of([&] { rank.combine(8); }) == 32);
  CHECK(threads_of([&] { rank.dispatch(8, 0, true); }) == 448);  // solo
  CHECK(threads_of([&] { rank.dispatch(40); }) == 448);          // chunks
  CHECK(threads_of([&] { rank.combine(40); }) != 32);
}

TEST_CASE("device calls: a short call runs on the kernel for short calls, where there is one") {
  Rank rank;
  const auto threads_of = [](auto&& call) {
    call();
    return launched->num_threads;
  };
  DeviceKernel kernel{.handle = kDispatchKernel,
                      .num_threads = 96,
                      .max_send_blocks = 100,
                      .max_recv_blocks = 100,
                      .max_resident_blocks = 200,
                      .max_slot_bytes = 1 << 20,
                      .max_tokens = 4};
  rank.backend.set_dispatch({.x_dtype = DType::kBFloat16}, kernel);
  kernel.handle = kCombineKernel, kernel.num_threads = 32;
  rank.backend.set_combine({DType::kBFloat16, DType::kBFloat16}, kernel);
  for (const int64_t max_tokens : {8, 4, 5, 3, 40}) {
    const bool is_short = max_tokens <= 4;
    CHECK((threads_of([&] { rank.dispatch(max_tokens); }) == 96) == is_short);
    // A block for each slot of 4 ranks, and for each share of a token.
    if (is_short) CHECK(launched->dispatch.grid.num_recv_blocks == 4 * max_tokens);
    CHECK((threads_of([&] { rank.combine(max_tokens); }) == 32) == is_short);
    if (is_short) CHECK(launched->combine.grid.num_recv_blocks == 8 * max_tokens);
  }
  // Receiving halves are of the way of their sending halves.
  const auto sent = rank.send(4);
  const auto received = rank.recv();
  CHECK(threads_of([&] { rank.backend.dispatch(&sent, nullptr); }) == 96);
  CHECK(threads_of([&] { rank.backend.dispatch(nullptr, &received); }) == 96);
  const auto partials = rank.combine_send(4);
  const auto sums = rank.combine_recv();
  CHECK(threads_of([&] { rank.backend.combine(&partials, nullptr); }) == 32);
  CHECK(threads_of([&] { rank.backend.combine(nullptr, &sums); }) == 32);
  // A plain kernel takes the short calls that are plain, and no long one.
  kernel.num_threads = 64;
  rank.backend.set_combine({DType::kBFloat16, DType::kBFloat16, false, {}, true}, kernel);
  rank.dispatch(4);
  CHECK(threads_of([&] { rank.combine(4); }) == 64);
  rank.dispatch(8);
  CHECK(threads_of([&] { rank.combine(8); }) == 448);
}

TEST_CASE("device calls: types that were not compiled are refused") {
  Rank rank;
  auto sent = rank.send(8);
  sent.options.quantize = true;
  CHECK(refused([&] { rank.backend.dispatch(&sent, nullptr); }) == Code::kUnavailable);
  rank.dispatch(8);
  auto partials = rank.combine_send(8);
  partials.y_dtype = DType::kFloat32;
  const auto sums = rank.combine_recv();
  CHECK(refused([&] { rank.backend.combine(&partials, &sums); }) == Code::kUnavailable);
  // The refused one has not closed the step.
  CHECK(refused([&] { rank.dispatch(40, 1); }) == Code::kInvalidArgument);
  rank.combine(8);
  rank.dispatch(40, 1);
}

TEST_CASE("device calls: what a kernel reported ends the next call, and all after it") {
  Rank rank;
  rank.dispatch(8);
  CHECK(!rank.backend.failed());
  rank.fault.raised = abi::kBadExpert;
  rank.fault.expected = 2, rank.fault.got = 9;
  rank.fault.complete = 1;
  CHECK(rank.backend.failed());
  CHECK(!rank.waits.broken());
  CHECK(refused([&] { rank.combine(8); }) == Code::kInvalidArgument);
  REQUIRE(rank.waits.broken());
  CHECK(std::string(rank.waits.broken()->what()).find("topk_idx of token 2 names expert 9") !=
        std::string::npos);
  CHECK(rank.neighbour.head(0).abort == 2);  // 1 + this rank: neighbours stop waiting
}

TEST_CASE("device calls: a communicator of GPU tensors makes no threads for kernels of the host") {
  std::thread([] {}).join();  // TSan adds one of its own to the first
  const RecordingDriver driver;
  engine::TransferEngine engine{engine::EngineOptions{}};
  AllToAllOptions options;
  options.plan = {.world_size = 1,
                  .ranks_per_node = 1,
                  .num_experts = 8,
                  .hidden_dim = 64,
                  .topk = 2,
                  .max_tokens = 8,
                  .chunk_tokens = 8,
                  .expert_rank = {}};
  options.num_threads = 4;
  abi::Fault fault{};
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    options.device = on_device;
    const int before = num_threads();
    AllToAll all_to_all(engine, nullptr, options);
    if (on_device)
      all_to_all.use_device({.ordinal = kDevice, .data = {64}, .peer_data = {0}, .fault = &fault});
    CHECK(num_threads() - before == (on_device ? 0 : 3));  // the caller is the fourth
  }
}

}  // namespace
}  // namespace moe_p2p::test
