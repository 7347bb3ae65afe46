// One rank of GPU tensors whose launches are recorded in place of the driver, so no kernel runs.
#pragma once

#include <doctest/doctest.h>

#include <cstring>
#include <optional>
#include <vector>

#include "fake_driver.h"
#include "fake_driver_memory.h"
#include "kernels/abi/handle.h"
#include "moe/device/backend.h"

namespace moe_p2p::test {

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
inline std::optional<Launched> launched;
inline int num_launched = 0;
inline uint64_t capture = 0;  // that all streams belong to

inline constexpr uint64_t kDispatchKernel = 1, kCombineKernel = 2;
inline constexpr int kDevice = 1;

inline int record_launch(const void* config, void* kernel, void** params, void**) {
  unsigned sizes[7];  // grid, block, shared bytes
  std::memcpy(sizes, config, sizeof sizes);
  Launched& l = launched.emplace();
  ++num_launched;
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

inline AllToAllOptions device_options() {
  AllToAllOptions made;
  made.rank = 1;
  made.device = true;
  return made;
}

inline DeviceMemory device_memory(abi::Fault& fault, int num_sms) {
  return {.ordinal = kDevice,
          .data = {64, 128},
          .peer_data = {0, 0},
          .fault = &fault,
          .num_sms = num_sms};
}

inline Plan plan_of_rank(int64_t steps_in_flight = 2) {
  return make_plan({.world_size = 4,
                    .ranks_per_node = 2,
                    .num_experts = 8,
                    .hidden_dim = 64,
                    .topk = 2,
                    .max_tokens = 40,
                    .chunk_tokens = 8,
                    .steps_in_flight = steps_in_flight,
                    .expert_rank = {}});
}

// One rank of 2 nodes of 2, chunks of 8 tokens, calls of up to 40.
class Rank {
 public:
  explicit Rank(int64_t steps_in_flight = 2, int num_sms = 0)
      : plan(plan_of_rank(steps_in_flight)),
        neighbour(plan, 0, false),
        memory(plan, 1, false),
        waits(plan, options, memory, masks, engine),
        backend(plan, options, device_memory(fault, num_sms), waits),
        words_(static_cast<size_t>(abi::HandleLayout::make(plan.shape, 40, 5, 8).total)) {
    memory.attach({{neighbour.name(), engine.waker_name()}, {memory.name(), engine.waker_name()}});
    DeviceKernel kernel{.handle = kDispatchKernel,
                        .num_threads = 448,
                        .shared_bytes = 5000,
                        .max_send_blocks = 100,
                        .max_recv_blocks = 100,
                        .max_copy_blocks = 50,
                        .max_away_blocks = 25,
                        .max_resident_blocks = 132,
                        .max_slot_bytes = 1 << 20};
    backend.set_dispatch({.x_dtype = DType::kBFloat16}, kernel);
    kernel.handle = kCombineKernel;
    backend.set_combine({DType::kBFloat16, DType::kBFloat16}, kernel);
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
    backend.dispatch(&sent, &received);
  }
  void combine(int64_t max_tokens, int which = 0) {
    const auto sent = combine_send(max_tokens, which);
    const auto received = combine_recv(which);
    backend.combine(&sent, &received);
  }
  Handle handle(int which) {
    return {words_.data() + which * 16, static_cast<int64_t>(words_.size()) - which * 16};
  }

  const RecordingDriver driver;
  abi::Fault fault{};
  const AllToAllOptions options = device_options();
  const Plan plan;
  const Masks masks{nullptr};
  engine::TransferEngine engine{engine::EngineOptions{}};
  NodeMemory neighbour, memory;
  Waits waits;
  DeviceBackend backend;

 private:
  std::vector<int32_t> words_;
};

}  // namespace moe_p2p::test
