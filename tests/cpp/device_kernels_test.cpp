// What the host decides about calls on a GPU: how many blocks, and what it refuses. Launches are
// recorded in place of the driver, so no kernel runs.
#include "moe/device/calls.h"

#include <doctest/doctest.h>

#include <cstring>
#include <optional>

#include "fake_driver.h"

namespace moe_p2p::test {
namespace {

using namespace moe;
using abi::DType;
using base::Code;

struct Launched {
  unsigned num_blocks, num_threads, shared_bytes;
  void* context;  // null: none was current
  union {
    abi::DispatchParams dispatch;
    abi::CombineParams combine;
  };
};
std::optional<Launched> launched;
uint64_t capture = 0;  // that all streams belong to

constexpr uint64_t kDispatchKernel = 1, kCombineKernel = 2;
constexpr int kDevice = 1;

void* current_context() {
  void* context = nullptr;
  if (platform::driver().context_pop(&context) == 0) platform::driver().context_push(context);
  return context;
}

int record_launch(const void* config, void* kernel, void** params, void**) {
  unsigned sizes[7];  // grid, block, shared bytes
  std::memcpy(sizes, config, sizeof sizes);
  Launched& l = launched.emplace();
  l.num_blocks = sizes[0], l.num_threads = sizes[3], l.shared_bytes = sizes[6];
  l.context = current_context();
  if (reinterpret_cast<uint64_t>(kernel) == kDispatchKernel)
    std::memcpy(&l.dispatch, params[0], sizeof l.dispatch);
  else
    std::memcpy(&l.combine, params[0], sizeof l.combine);
  return 0;
}

// The fake driver, but for launches, while it lives.
class RecordingDriver {
 public:
  RecordingDriver() {
    FakeDriver::install();
    before_ = &platform::driver();
    table_ = *before_;
    table_.launch = record_launch;
    table_.capture_info = [](void*, int* status, uint64_t* id, void**, void**, size_t*) {
      *status = capture != 0 ? platform::kIsCapturing : 0;
      *id = capture;
      return 0;
    };
    table_.event_record = [](void*, void*) { return 0; };
    platform::set_driver_for_tests(&table_);
  }
  ~RecordingDriver() {
    platform::set_driver_for_tests(before_);
    capture = 0;
  }

 private:
  const platform::DriverTable* before_;
  platform::DriverTable table_;
};

// The error of step(), and nothing launched.
template <typename Step>
Code refused(Step&& step) {
  launched.reset();
  try {
    step();
  } catch (const base::Error& error) {
    CHECK(!launched);
    return error.code();
  }
  return Code::kOk;
}

AllToAllOptions options() {
  AllToAllOptions made;
  made.rank = 1;
  made.device = true;
  return made;
}

// One rank of 2 nodes of 2, chunks of 8 tokens, calls of up to 40.
class Rank {
 public:
  explicit Rank(int64_t steps_in_flight = 2, int num_sms = 0)
      : plan(make_plan({.world_size = 4,
                        .ranks_per_node = 2,
                        .num_experts = 8,
                        .hidden_dim = 64,
                        .topk = 2,
                        .max_tokens = 40,
                        .chunk_tokens = 8,
                        .steps_in_flight = steps_in_flight,
                        .expert_rank = {}})),
        kernels(plan, options(),
                {.ordinal = kDevice,
                 .data = {64, 128},
                 .peer_data = {0, 0},
                 .fault = &fault,
                 .num_sms = num_sms}),
        words_(static_cast<size_t>(abi::HandleLayout::make(plan.shape, 40, 5, 8).total)) {
    DeviceKernel kernel{.handle = kDispatchKernel,
                        .num_threads = 448,
                        .shared_bytes = 5000,
                        .max_send_blocks = 100,
                        .max_recv_blocks = 100,
                        .max_copy_blocks = 50,
                        .max_resident_blocks = 132,
                        .max_slot_bytes = 1 << 20};
    kernels.set_dispatch({.x_dtype = DType::kBFloat16}, kernel);
    kernel.handle = kCombineKernel;
    kernels.set_combine(DType::kBFloat16, DType::kBFloat16, kernel);
  }

  DispatchSend send(int64_t max_tokens, int which = 0, bool solo = false) {
    DispatchSend call;
    call.x_dtype = DType::kBFloat16;
    call.num_rows = call.num_tokens = 3;
    call.max_tokens = max_tokens;
    call.options.solo = solo;
    call.handle = handle(which);
    return call;
  }
  DispatchRecv recv(int which = 0) {
    DispatchRecv call;
    call.handle = handle(which);
    call.capacity = 40;
    call.x_dtype = DType::kBFloat16;
    return call;
  }
  CombineSend combine_send(int64_t max_tokens, int which = 0) {
    return {.handle = handle(which),
            .y_dtype = DType::kBFloat16,
            .out_dtype = DType::kBFloat16,
            .max_tokens = max_tokens};
  }
  CombineRecv combine_recv(int which = 0) {
    return {.handle = handle(which), .out_dtype = DType::kBFloat16};
  }
  void dispatch(int64_t max_tokens, int which = 0, bool solo = false) {
    const auto sent = send(max_tokens, which, solo);
    const auto received = recv(which);
    kernels.dispatch(&sent, &received, {});
  }
  void combine(int64_t max_tokens, int which = 0) {
    const auto sent = combine_send(max_tokens, which);
    const auto received = combine_recv(which);
    kernels.combine(&sent, &received, {});
  }
  Handle handle(int which) {
    return {words_.data() + which * 16, static_cast<int64_t>(words_.size()) - which * 16};
  }

  const RecordingDriver driver;
  abi::Fault fault{};
  const Plan plan;
  DeviceKernels kernels;

 private:
  std::vector<int32_t> words_;
};

constexpr DeviceKernel kWide{.num_send_workers = 4,
                             .num_recv_workers = 2,
                             .max_send_blocks = 50,
                             .max_recv_blocks = 60,
                             .max_copy_blocks = 30,
                             .max_resident_blocks = 130};

TEST_CASE("device grid: a worker for each item, as far as more blocks help") {
  const abi::Grid few = choose_grid(kWide, {.send_items = 9, .recv_items = 3});
  CHECK(few.num_send_blocks == 3);
  CHECK(few.num_recv_blocks == 2);
  const abi::Grid many = choose_grid(kWide, {.send_items = 1000, .recv_items = 1000});
  CHECK(many.num_send_blocks == 50);
  CHECK(many.num_recv_blocks == 60);
  const abi::Grid half = choose_grid(kWide, {.recv_items = 1000});
  CHECK(half.num_send_blocks == 0);
  CHECK(half.num_recv_blocks == 60);
}

TEST_CASE("device grid: the whole of it stays within num_sms, and each half has a block") {
  for (int num_sms = 1; num_sms < 130; ++num_sms)
    for (int relay = 0; relay < 2; ++relay)
      for (const int64_t send : {0, 5, 1000})
        for (const int64_t recv : {0, 5, 1000}) {
          CAPTURE(num_sms);
          CAPTURE(relay);
          CAPTURE(send);
          CAPTURE(recv);
          const abi::Grid grid = choose_grid(
              kWide,
              {.send_items = send, .recv_items = recv, .relay_blocks = relay, .num_sms = num_sms});
          CHECK((grid.num_send_blocks > 0) == (send > 0));
          CHECK((grid.num_recv_blocks > 0) == (recv > 0));
          const int least = relay + (send > 0) + (recv > 0);
          CHECK(relay + grid.num_send_blocks + grid.num_recv_blocks <= std::max(num_sms, least));
        }
  // What one half does not need, the other gets.
  const abi::Grid grid = choose_grid(kWide, {.send_items = 5, .recv_items = 1000, .num_sms = 20});
  CHECK(grid.num_send_blocks == 2);
  CHECK(grid.num_recv_blocks == 18);
}

TEST_CASE("device grid: senders that only copy leave blocks to the receivers") {
  const GridInput sums{.send_items = 1000, .recv_items = 1000, .num_sms = 22};
  GridInput copies = sums;
  copies.copies = true;
  CHECK(choose_grid(kWide, sums).num_send_blocks == 10);
  CHECK(choose_grid(kWide, copies).num_send_blocks == 7);
  CHECK(choose_grid(kWide, copies).num_recv_blocks == 15);
}

TEST_CASE("device grid: a call fits on the device at once") {
  DeviceKernel kernel = kWide;
  kernel.max_resident_blocks = 70;
  const abi::Grid grid =
      choose_grid(kernel, {.send_items = 1000, .recv_items = 1000, .relay_blocks = 1});
  CHECK(1 + grid.num_send_blocks + grid.num_recv_blocks == 70);
  CHECK(grid.num_send_blocks == 31);  // 50 of 110
}

// What rank 1 (nodes of 2, two steps in flight) waited for from `source` in step 6.
abi::Fault late(abi::Phase phase, int source, uint64_t expected, uint64_t got) {
  abi::Fault fault{};
  fault.raised = abi::kTimedOut;
  fault.phase = static_cast<int32_t>(phase);
  fault.source = source;
  fault.step = 6;
  fault.expected = expected;
  fault.got = got;
  return fault;
}
std::string word_of(const Rank& rank, const abi::Fault& fault) {
  const base::Error error = rank.kernels.error_of(fault, "", "");
  CHECK(error.code() == Code::kTimeout);
  const std::string text = error.what(), head = "waiting for rank 0: ";
  const auto begin = text.find("waiting for rank ") + head.size();
  return text.substr(begin, text.find(" (expected word") - begin);
}

TEST_CASE("device calls: a timeout names the word that was waited for") {
  using abi::Phase;
  const Rank rank;
  const uint64_t word = 7, parts = 6 * abi::kMaxParts;  // of step 6
  CHECK(word_of(rank, late(Phase::kDispatch, 3, parts + 3, parts + 1)) ==
        "arrival of part 2, 1 parts arrived");
  CHECK(word_of(rank, late(Phase::kCombine, 2, abi::come(6), abi::come(4))) ==
        "arrival of the last part, 0 parts arrived");
  CHECK(word_of(rank, late(Phase::kDispatch, 0, word, word - 2)) == "header or slot flag");
  CHECK(word_of(rank, late(Phase::kDispatch, 0, word, word - 4)) == "slot flag");
  CHECK(word_of(rank, late(Phase::kDispatch, 0, word, 0)) == "header or slot");
  CHECK(word_of(rank, late(Phase::kCombine, 0, word, word - 4)) == "row flag");
  CHECK(word_of(rank, late(Phase::kCombine, 0, word, 0)) == "row");
  CHECK(word_of(rank, late(Phase::kWeights, 0, word, word - 2)) == "header of its weights");
  CHECK(word_of(rank, late(Phase::kDispatch, 1, 2 * word, 0)) ==
        "word of its own blocks, header or slot");
}

TEST_CASE("device calls: a timeout says how much came, and that a rank that is gone is dead") {
  const Rank rank;
  const base::Error error =
      rank.kernels.error_of(late(abi::Phase::kDispatch, 3, 25, 0),
                            "rank 1 has closed its communicator", ", 1 of 2 immediates came");
  CHECK(error.code() == Code::kPeerDead);
  CHECK(std::string(error.what())
            .find("got 0), 1 of 2 immediates came; rank 1 has closed its communicator") !=
        std::string::npos);
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
    rank.kernels.combine(&send, &recv, {});
    return launched->combine.grid.num_send_blocks;
  };
  const float number = 1.0f;
  CombineSend send = rank.combine_send(8);
  CHECK(send_blocks(send) == 3);  // 50 of 150, of all but one that relays
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

TEST_CASE("device calls: what would wait for a step that the caller holds is refused") {
  Rank rank;
  rank.dispatch(8, 0);
  CHECK(refused([&] { rank.dispatch(40, 1); }) == Code::kInvalidArgument);
  rank.dispatch(8, 1);
  CHECK(refused([&] { rank.dispatch(8, 2); }) == Code::kInvalidArgument);
  CHECK(refused([&] { rank.combine(8, 2); }) == Code::kInvalidArgument);  // solo
  rank.kernels.release(rank.handle(0), {});
  CHECK(launched->combine.empty == 1);
  rank.combine(8, 1);
  rank.dispatch(40, 2);
  launched.reset();
  rank.kernels.release(rank.handle(2), {});
  CHECK(!launched);  // a solo dispatch holds nothing
}

TEST_CASE("device calls: halves are received once, and agree") {
  Rank rank(4);
  auto sent = rank.send(16);
  auto received = rank.recv();
  CHECK(refused([&] { rank.kernels.dispatch(nullptr, &received, {}); }) == Code::kInvalidArgument);
  rank.kernels.dispatch(&sent, nullptr, {});
  CHECK(launched->dispatch.grid.num_recv_blocks == 0);
  CHECK(refused([&] { rank.combine(16); }) == Code::kInvalidArgument);  // not received
  received.x_dtype = DType::kFloat32;
  CHECK(refused([&] { rank.kernels.dispatch(nullptr, &received, {}); }) == Code::kInvalidArgument);
  received.x_dtype = DType::kBFloat16;
  rank.kernels.dispatch(nullptr, &received, {});
  CHECK(launched->dispatch.solo == 1);
  CHECK(launched->dispatch.num_chunks == 2);
  CHECK(launched->dispatch.num_rows == 3);
  CHECK(refused([&] { rank.kernels.dispatch(nullptr, &received, {}); }) == Code::kInvalidArgument);

  float scalars[2] = {};
  auto partials = rank.combine_send(16);
  partials.row_scalars = scalars;
  auto sums = rank.combine_recv();
  sums.out_scalars = scalars;
  CHECK(refused([&] { rank.kernels.combine(nullptr, &sums, {}); }) == Code::kInvalidArgument);
  rank.kernels.combine(&partials, nullptr, {});
  CHECK(launched->combine.with_scalars == 1);
  rank.kernels.combine(nullptr, &sums, {});
  CHECK(launched->combine.with_scalars == 1);
  auto whole = rank.send(40);
  CHECK(refused([&] { rank.kernels.dispatch(&whole, nullptr, {}); }) ==
        Code::kInvalidArgument);  // five chunks, four steps
}

TEST_CASE("device calls: types that were not compiled are refused") {
  Rank rank;
  auto sent = rank.send(8);
  sent.options.quantize = true;
  CHECK(refused([&] { rank.kernels.dispatch(&sent, nullptr, {}); }) == Code::kUnavailable);
  rank.dispatch(8);
  auto partials = rank.combine_send(8);
  partials.y_dtype = DType::kFloat32;
  const auto sums = rank.combine_recv();
  CHECK(refused([&] { rank.kernels.combine(&partials, &sums, {}); }) == Code::kUnavailable);
  // The refused one has not closed the step.
  CHECK(refused([&] { rank.dispatch(40, 1); }) == Code::kInvalidArgument);
  rank.combine(8);
  rank.dispatch(40, 1);
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
  rank.kernels.dispatch(&sent, nullptr, {});
  capture = 0;
  CHECK(refused([&] { rank.combine(8); }) == Code::kInvalidArgument);  // not received
  for (int replay = 0; replay < 3; ++replay) {
    rank.kernels.dispatch(nullptr, &received, {});
    CHECK(launched->dispatch.num_rows == 3);
    rank.combine(8);
  }
  capture = 2;  // another graph
  const auto partials = rank.combine_send(8);
  const auto sums = rank.combine_recv();
  rank.kernels.dispatch(nullptr, &received, {});
  rank.kernels.combine(&partials, nullptr, {});
  capture = 0;
  for (int replay = 0; replay < 3; ++replay) rank.kernels.combine(nullptr, &sums, {});
  // Whoever takes the handle for a call of his own is counted again.
  rank.dispatch(8, 0);
  rank.combine(8, 0);
  CHECK(refused([&] { rank.kernels.combine(nullptr, &sums, {}); }) == Code::kInvalidArgument);
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
