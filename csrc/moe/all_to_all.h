// Dispatch and combine of one rank: the calls behind torch.ops.moe_p2p.*, on plain pointers.
//
// A call is one or more steps (docs/protocol.md). A *paired* dispatch of one chunk leaves its step
// open for the combine that follows. A *solo* call closes its steps itself: dispatches that need
// more than one chunk, those that ask for it, and combines whose handle's step is already closed.
// All ranks make the same calls in the same order with the same max_tokens, solo and types.
//
// One caller thread at a time per object. Bad input throws Error{kInvalidArgument} before anything
// is sent, and the object stays usable. Timeouts, dead peers and protocol errors break it: the story
// is latched and every later call throws it again. With options.masks a rank that does not come in
// time, or is gone, is left out instead, of that call and of all later ones.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "engine/transfer_engine.h"
#include "kernels/abi/params.h"
#include "moe/dispatch_options.h"
#include "moe/plan/plan.h"
#include "platform/stream_order.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::moe {

class DeviceKernels;
class HostKernels;
class StepRing;
struct Pending;

struct AllToAllOptions {
  PlanInput plan;
  int rank = 0;
  uint32_t communicator = 0;  // agreed by all ranks, unused so far on each rank's engine
  platform::WaitPolicy wait;
  std::chrono::milliseconds timeout{30'000};  // of every wait
  int num_threads = 1;                        // of the host kernels
  bool device =
      false;  // tensors are on a GPU; use_device() before address(), use_signals() after connect()
  // [W] words of moe/node/masks.h in host memory, which outlive the object. A rank that does not come, or
  // is gone, is then masked instead of breaking this one. null: no masks.
  int32_t* masks = nullptr;
};

// What a rank of options.device was given on its GPU; the caller keeps the memory until close().
struct DeviceMemory {
  int ordinal = 0;             // of the CUDA device
  std::vector<uint64_t> data;  // [L] regions of each rank of the node, zeroed, as mapped here
  std::vector<uint64_t>
      peer_data;                // [N] those of the rank with our local index; 0 = not mapped here
  uint64_t state = 0;           // abi::DeviceState and DeviceWords on this device, zeroed
  uint64_t expert_rank = 0;     // i32 [E] on this device
  uint64_t expert_local = 0;    // i32 [E]
  abi::Fault* fault = nullptr;  // pinned host memory, zeroed
  uint64_t fault_device = 0;    // the same as the device sees it
  int num_sms = 0;              // most blocks of a kernel; 0: as many as help
};

// Rows of opaque bytes that travel with the tokens.
struct ExtraPart {
  const void* data;  // [T, row_bytes] at the sender
  uint64_t row_bytes;
};
struct ExtraOutput {
  void* data;  // [rows, row_bytes] at the receiver
  uint64_t row_bytes;
};

struct Handle {
  int32_t* words;  // [handle_words(num_rows, max_tokens)]
  int64_t num_words;
};

struct DispatchSend {
  const void* x = nullptr;  // [T, H] of x_dtype, contiguous
  abi::DType x_dtype{};
  DispatchOptions options;
  const void* scales = nullptr;  // [T, scale_bytes] for x of fp8; null: fp8 without scales
  uint64_t scale_bytes = 0;      // of one token's given scales, a multiple of 4
  bool opaque_scales = false;    // they may hold any words: not ceil(H / 128) fp32 numbers
  std::vector<ExtraPart> extras;
  const void* topk_idx = nullptr;  // [T, K] int32 or int64, -1 = none
  bool topk_is_int64 = true;
  void* topk_copy = nullptr;  // on a GPU: as topk_idx, which the caller may then write over
  const float* topk_weights = nullptr;      // [T, K]; null: 1
  int64_t num_rows = 0;                     // T
  int64_t num_tokens = 0;                   // rows that count, <= T
  const void* device_num_tokens = nullptr;  // on a GPU: instead of num_tokens, read by the kernel
  bool num_tokens_is_int64 = false;
  int64_t max_tokens = 0;  // of any rank in this call; all ranks give the same
  Handle handle{};
  platform::Stream stream{};  // on a GPU: where the call runs
};

struct DispatchRecv {
  Handle handle{};
  DispatchOptions options;  // those of the sender, but for what lies only here: zeros and columns
  int64_t capacity = 0;     // padded: rows per expert, else rows in all
  abi::DType x_dtype{};     // of `x` below: the payload type on the wire
  void* x = nullptr;
  void* scales = nullptr;    // [rows, scale_bytes]; null when the dispatch has none
  uint64_t scale_bytes = 0;  // of one row: kUe8m0 4 * ceil(H / 512), else what travels
  // With column_scales the 4-byte scale i of row r of an expert lies at [i * scale_stride + r], and
  // those of the next expert begin after all of them.
  int64_t scale_stride = 0;
  std::vector<ExtraOutput> extras;
  float* row_weights = nullptr;  // [rows], by rank [rows, K]
  int32_t* counts = nullptr;     // [E_local] tokens of each expert
  int32_t* offsets =
      nullptr;  // [E_local + 1] first row of each expert, by rank [W + 1] of each source
  void* row_topk = nullptr;   // by rank: [rows, K] local expert ids, -1 = none of this rank
  bool topk_is_int64 = true;  // row_topk is
  // null: not wanted
  int32_t* source = nullptr;  // [rows, 2] source rank and its token
  int64_t* ranges = nullptr;  // [E_local, W] first row of that source there << 32 | number of rows
  int64_t* wait_ticks =
      nullptr;  // [W] how long each source was waited for: ns, on a GPU clock cycles
  platform::Stream stream{};
};

struct CombineSend {
  Handle handle{};
  const void* y = nullptr;  // [y_rows, H] of y_dtype, laid out as x was received
  abi::DType y_dtype{};
  int64_t y_rows = 0;
  const float* row_weights = nullptr;  // [y_rows]; null: plain sum
  // [y_rows]: returned to their (token, k), or [y_rows, K] by rank: all K added up; null: none
  const float* row_scalars = nullptr;
  bool scalars_by_rank = false;
  // [T, K] of this rank's tokens, which it tells with this call; null: row_weights
  const float* topk_weights = nullptr;
  int64_t num_rows = 0;    // T, with topk_weights
  abi::DType out_dtype{};  // of partial sums on the wire and of the result
  int64_t max_tokens = 0;  // on a GPU: that of the dispatch
  platform::Stream stream{};
};

struct CombineRecv {
  Handle handle{};
  int64_t num_rows = 0;  // T
  void* out = nullptr;   // [T, H]; rows past num_tokens become zero
  abi::DType out_dtype{};
  float* out_scalars = nullptr;   // [T, K]
  const void* bias[2]{};          // [T, H] of out_dtype, the first addends; null: none
  int64_t* wait_ticks = nullptr;  // as in dispatch
  platform::Stream stream{};
};

class AllToAll {
 public:
  // `proxy` is the thread that polls `engine`; null when the caller turns the loop (simulations).
  AllToAll(engine::TransferEngine& engine, proxy::ProxyThread* proxy,
           const AllToAllOptions& options);
  ~AllToAll();  // close()

  const Plan& plan() const noexcept;
  // What every other rank's connect() needs.
  base::Bytes address() const;
  // Addresses of all ranks, in rank order. Afterwards every rank may call dispatch once all ranks
  // have returned from connect() (the bootstrap's barrier).
  void connect(std::span<const base::Bytes> addresses);
  // Waits until all that this rank has sent arrived, says so to its partners and neighbours, and lets
  // go of everything. Idempotent.
  // For options.device: no kernel of it runs any more.
  void close() noexcept;

  // For options.device: the GPU's side of it. Calls then return once their kernels are launched.
  void use_device(const DeviceMemory& memory);
  DeviceKernels& device();
  // The node's signal memory as this process maps it, [L]; the GPU's addresses of it come back.
  std::vector<std::span<std::byte>> signals() const;
  void use_signals(const std::vector<uint64_t>& device_addresses);

  int64_t handle_words(int64_t num_rows, int64_t max_tokens) const;

  // Whole calls.
  void dispatch(const DispatchSend& send, const DispatchRecv& recv);
  void combine(const CombineSend& send, const CombineRecv& recv);
  // Halves: a send half returns as soon as its own work is done. For calls of at most
  // steps_in_flight chunks; larger ones must use the whole call.
  void dispatch_send(const DispatchSend& send);
  void dispatch_recv(const DispatchRecv& recv);
  void combine_send(const CombineSend& send);
  void combine_recv(const CombineRecv& recv);
  // Closes the step of a paired dispatch that gets no combine. All ranks release it.
  void release(Handle handle, const platform::Stream& stream = {});

  // The same number of values from every rank, [W, n] on each; waits for all ranks. On the host, with
  // or without options.device: what kernels do at that time does not matter.
  void gather_counts(std::span<const int32_t> values, std::span<int32_t> gathered);

  // Empty while the object is usable; else why it is not.
  std::string broken() const;
  // Throws that, as the next call would. Neither waits nor launches anything.
  void check();

  // For a simulation, which turns the loop itself and advances calls (moe/calls.h) one by one.
  struct Parts {
    StepRing& ring;
    HostKernels& kernels;
    proxy::ProxyTask* task;
  };
  Parts parts() noexcept;
  // Throws what ends the wait of a call for `pending`, once something does.
  void check(const Pending& pending) const;
  // The first half of close(), and whether it is done, which close() waits for where there is a proxy.
  void leave();
  bool has_left() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe_p2p::moe
