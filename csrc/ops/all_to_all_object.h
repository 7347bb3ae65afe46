// A communicator under a number, with the arguments of its ops checked and turned into the plain
// structs of moe/call.h.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "moe/all_to_all.h"
#include "moe/counters.h"
#include "moe/node/progress.h"
#include "ops/engine_object.h"

namespace moe_p2p::ops {

struct AllToAllObject {
  AllToAllObject(std::shared_ptr<EngineObject> on, const moe::AllToAllOptions& options,
                 std::optional<Tensor> with_masks, std::string with_settings)
      : engine(std::move(on)),
        masks(std::move(with_masks)),
        all_to_all(engine->engine(), &engine->proxy(), options),
        rank(options.rank),
        local_experts(all_to_all.plan().num_local_experts(rank)),
        communicator(options.communicator),
        settings(std::move(with_settings)) {}

  const moe::Plan& plan() const noexcept { return all_to_all.plan(); }
  int64_t hidden_dim() const noexcept { return plan().hidden_dim; }
  int64_t topk() const noexcept { return plan().shape.topk; }
  int64_t num_scales() const noexcept {
    return (hidden_dim() + abi::kScaleBlock - 1) / abi::kScaleBlock;
  }
  int64_t num_local_experts() const noexcept { return local_experts; }

  std::shared_ptr<EngineObject> engine;  // outlives all_to_all
  std::mutex in_use;                     // one caller at a time
  std::atomic<std::thread::id> caller;   // whose call runs; relaxed: only compared with oneself
  const std::optional<Tensor> masks;     // keeps options.masks alive
  moe::AllToAll all_to_all;
  const int rank;
  const int64_t local_experts;
  int device = -1;  // CUDA ordinal; -1: host memory
  const uint32_t communicator;
  const std::string settings;    // communicator_settings.h
  bool releases_oldest = false;  // moe::AllToAll::release_oldest()
};

ObjectTable<AllToAllObject>& communicators();

// Throws the error that broke one of these. Skips those that are in a call of another thread: that
// call will throw it.
void check(const std::vector<int64_t>& comms);

// The communicator while one call runs. Throws Error{kInvalidArgument} when another call is
// running: the order of calls would differ between ranks.
class Caller {
 public:
  explicit Caller(int64_t comm);
  ~Caller() { object_->caller.store({}, std::memory_order_relaxed); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  AllToAllObject* operator->() const noexcept { return object_.get(); }
  AllToAllObject& operator*() const noexcept { return *object_; }

 private:
  std::shared_ptr<AllToAllObject> object_;
  std::unique_lock<std::mutex> lock_;
  const OnDevice on_device_;
};

// Arguments of a dispatch. The tensors must outlive the struct made of them.
struct DispatchArguments {
  const Tensor& x;
  const std::optional<Tensor>& scales;
  const std::vector<Tensor>& extras;
  const Tensor& topk_idx;
  const std::optional<Tensor>& topk_weights;
  const std::optional<Tensor>& num_tokens;
  int64_t num_tokens_host;  // used without num_tokens; -1: all rows
  int64_t max_tokens;
  const moe::DispatchOptions& options;
};
moe::DispatchSend dispatch_send_from(AllToAllObject& comm, const DispatchArguments& arguments,
                                     const Tensor& handle);

// How received rows and what goes with them are laid out. The one list of these shapes in C++, for
// calls that make them and calls that check them; new_outputs in moe_p2p/moe/dispatched.py is
// Python's, and tests/moe/test_ops.py compares the two.
struct Layout {
  // Throws Error{kInvalidArgument} when the capacity is out of range.
  Layout(const AllToAllObject& comm, const moe::DispatchOptions& options, int64_t capacity);

  const moe::DispatchOptions options;
  const int64_t capacity, experts, ranks, topk;
  const int64_t num_rows;

  // Rows of `width` values each.
  Sizes of_rows(int64_t width) const {
    return options.rows().apart ? Sizes{experts, capacity, width} : Sizes{capacity, width};
  }
  // Column scales: from one scale of a row to the next.
  int64_t scale_stride() const { return (capacity + 3) / 4 * 4; }
  Sizes row_weights() const {
    return options.rows().per_token ? Sizes{num_rows, topk} : Sizes{num_rows};
  }
  Sizes row_topk() const { return {num_rows, topk}; }
  Sizes counts() const { return {experts}; }
  Sizes offsets() const { return {(options.rows().per_token ? ranks : experts) + 1}; }
  Sizes source() const { return {num_rows, 2}; }
  Sizes ranges() const { return {experts, ranks}; }
  Sizes wait_ticks() const { return {ranks}; }
};

struct DispatchOutputs {
  const Tensor& x;
  const std::optional<Tensor>& scales;
  const std::vector<Tensor>& extras;
  const Tensor& row_weights;
  const Tensor& counts;
  const Tensor& offsets;
  const std::optional<Tensor>& source;
  const std::optional<Tensor>& ranges;
  const std::optional<Tensor>& wait_ticks;
  const std::optional<Tensor>& row_topk;
};
// Throws unless given outputs fit; what is made for a call does.
void check_outputs(const AllToAllObject& comm, const Layout& layout,
                   const DispatchOutputs& outputs);
moe::DispatchRecv dispatch_recv_from(const AllToAllObject& comm, const Layout& layout,
                                     const DispatchOutputs& outputs, const moe::Handle& handle);

// Counters that it raises as rows arrive, held by at most num_sms multiprocessors meanwhile.
void fill_ready(const AllToAllObject& comm, const Layout& layout, const Tensor& counters,
                int64_t num_sms, moe::DispatchRecv& recv);

inline const std::optional<Tensor> kNoTensor;
struct CombineArguments {
  const Tensor& y;
  const std::optional<Tensor>& row_weights;
  const std::optional<Tensor>& row_scalars;
  const std::optional<Tensor>& topk_weights;
  ScalarType out_dtype;
  int64_t max_tokens;  // of the dispatch
  abi::SumOrder order{};
  abi::Partials partials{};
  abi::RowLayout layout{};  // of y, as moe::CombineSend has it
  // Counters of rows of y, [E_local, n] or [E_local * n] of int32 or uint32; null: y is complete.
  const std::optional<Tensor>& ready = kNoTensor;
  const std::optional<Tensor>& ready_base = kNoTensor;
  int64_t ready_rows = 0, ready_want = 0, num_sms = 0;
};
moe::CombineSend combine_send_from(AllToAllObject& comm, const CombineArguments& arguments,
                                   const Tensor& handle);
struct CombineOutputs {
  const Tensor& out;
  const std::optional<Tensor>& out_scalars;
  const std::vector<Tensor>& bias;
  const std::optional<Tensor>& wait_ticks;
  abi::SumOrder order{};
  const Tensor* topk_idx = nullptr;  // unless kRanks
  abi::Partials partials{};
};
moe::CombineRecv combine_recv_from(AllToAllObject& comm, const CombineOutputs& outputs,
                                   const moe::Handle& handle);

// The handle as the calls above mutate it.
moe::Handle handle_from(const Tensor& handle);

}  // namespace moe_p2p::ops
