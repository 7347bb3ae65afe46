#include "moe/device_kernels.h"

#include <algorithm>
#include <atomic>

#include "base/log.h"
#include "moe/token_parts.h"
#include "platform/cuda.h"

namespace moe_p2p::moe {

using abi::DType;
using base::Code;

namespace {

uint64_t address(const void* p) noexcept { return reinterpret_cast<uint64_t>(p); }

}  // namespace

DeviceKernels::DeviceKernels(const Plan& plan, const AllToAllOptions& options,
                             const DeviceMemory& memory)
    : plan_(plan), memory_(memory) {
  MOE_P2P_CHECK(plan.shape.num_nodes() == 1, Code::kUnavailable,
                "GPU tensors need ranks_per_node equal to world_size ", plan.shape.world_size,
                ", it is ", plan.shape.ranks_per_node, "; between nodes use host tensors");
  MOE_P2P_CHECK(memory.data.size() == static_cast<size_t>(plan.shape.ranks_per_node) &&
                    memory.data.size() <= abi::kMaxDomainRanks,
                Code::kInvalidArgument, memory.data.size(), " ranks' memory for ",
                plan.shape.ranks_per_node, " ranks of a node");
  std::copy(memory.data.begin(), memory.data.end(), comm_.data);
  comm_.state = memory.state;
  comm_.fault = memory.fault_device;
  comm_.expert_rank = memory.expert_rank;
  comm_.expert_local = memory.expert_local;
  comm_.timeout_ns = static_cast<uint64_t>(std::chrono::nanoseconds(options.timeout).count());
  comm_.regions = plan.regions;
  comm_.rank = options.rank;
  comm_.num_local_experts = plan.num_local_experts(options.rank);
  comm_.communicator = options.communicator;
}

void DeviceKernels::set_dispatch(DType x_dtype, bool quantize, Kernel kernel) {
  dispatch_[{static_cast<int>(x_dtype), quantize}] = kernel;
}

void DeviceKernels::set_combine(DType y_dtype, DType out_dtype, Kernel kernel) {
  combine_[{static_cast<int>(y_dtype), static_cast<int>(out_dtype)}] = kernel;
}

DeviceKernels::Kernel DeviceKernels::find_combine(DType y_dtype, DType out_dtype) const {
  const auto found = combine_.find({static_cast<int>(y_dtype), static_cast<int>(out_dtype)});
  MOE_P2P_CHECK(
      found != combine_.end(), Code::kUnavailable,
      "combine is not compiled for these types; make the same call once outside torch.compile");
  return found->second;
}

unsigned DeviceKernels::blocks(int64_t items, int64_t most) const noexcept {
  if (memory_.num_sms > 0) most = std::min<int64_t>(most, memory_.num_sms);
  return static_cast<unsigned>(std::clamp<int64_t>(items, 1, most));
}

void DeviceKernels::check_fault() const {
  auto* fault = memory_.fault;
  // acquire: pairs with raise_fault() of the device.
  if (std::atomic_ref(fault->complete).load(std::memory_order_acquire) == 0) return;
  const char* phase = fault->phase == 0 ? "dispatch" : "combine";
  switch (fault->raised) {
    case abi::kTimedOut:
      throw base::Error(Code::kTimeout,
                        base::concat("rank ", comm_.rank, ": ", phase, " of step ", fault->step,
                                     " timed out waiting for rank ", fault->source,
                                     ": expected word ", fault->expected, ", got ", fault->got));
    case abi::kCapacity:
      throw base::Error(Code::kResourceExhausted,
                        base::concat("rank ", comm_.rank, ": step ", fault->step, ": local expert ",
                                     fault->source, " needs ", fault->got, " rows, capacity is ",
                                     fault->expected));
    case abi::kBadExpert:
      throw base::Error(
          Code::kInvalidArgument,
          base::concat("rank ", comm_.rank, ": step ", fault->step, ": topk_idx of token ",
                       fault->expected, " names expert ", static_cast<int64_t>(fault->got),
                       ", must be -1 (none) or from 0 to ", plan_.shape.num_experts - 1));
    case abi::kTooManyTokens:
      throw base::Error(
          Code::kInvalidArgument,
          base::concat("rank ", comm_.rank, ": step ", fault->step, ": num_tokens is ",
                       static_cast<int64_t>(fault->got), ", at most ", fault->expected, " fit"));
    default:
      throw base::Error(
          Code::kProtocol,
          base::concat("rank ", comm_.rank, ": ", phase, " of step ", fault->step, ": rank ",
                       fault->source, " sent rows of another type or size (", fault->got,
                       " bytes a slot, expected ", fault->expected,
                       "); all ranks must make the same calls"));
  }
}

void DeviceKernels::open_step() {
  MOE_P2P_CHECK(num_open_ < plan_.shape.steps_in_flight, Code::kInvalidArgument, num_open_,
                " dispatches are open and steps_in_flight is ", plan_.shape.steps_in_flight,
                "; combine or release earlier ones first");
  ++num_open_;
}

DeviceKernels::Sent DeviceKernels::take_sent(Handle handle) {
  const auto found = sent_dispatches_.find(handle.words);
  MOE_P2P_CHECK(found != sent_dispatches_.end(), Code::kInvalidArgument,
                "dispatch_recv: this handle has no dispatch_send waiting");
  const Sent sent = found->second;
  sent_dispatches_.erase(found);
  return sent;
}

void DeviceKernels::dispatch(const DispatchSend* send, const DispatchRecv* recv, void* stream) {
  check_fault();
  abi::DispatchParams p{};
  p.comm = comm_;
  const Sent sent = send ? Sent{{static_cast<int>(send->x_dtype), send->quantize},
                                static_cast<int32_t>(send->num_rows)}
                         : take_sent(recv->handle);
  const auto found = dispatch_.find(sent.key);
  MOE_P2P_CHECK(
      found != dispatch_.end(), Code::kUnavailable,
      "dispatch is not compiled for this type; make the same call once outside torch.compile");
  const Kernel kernel = found->second;
  p.num_rows = sent.num_rows;
  if (send) {
    MOE_P2P_CHECK(
        send->num_rows <= plan_.shape.chunk_tokens && send->max_tokens <= plan_.shape.chunk_tokens,
        Code::kInvalidArgument,
        "a GPU dispatch takes up to chunk_tokens = ", plan_.shape.chunk_tokens, " rows, x has ",
        send->num_rows, " and max_tokens is ", send->max_tokens);
    p.parts = send_parts(plan_, *send);
    p.x = address(send->x);
    p.scales = address(send->scales);
    p.topk_idx = address(send->topk_idx);
    p.topk_weights = address(send->topk_weights);
    p.num_tokens = address(send->device_num_tokens);
    p.num_tokens_is_int64 = send->num_tokens_is_int64;
    p.num_tokens_host = static_cast<int32_t>(send->num_tokens);
    p.topk_is_int64 = send->topk_is_int64;
    p.num_extras = static_cast<int32_t>(send->extras.size());
    for (size_t i = 0; i < send->extras.size(); ++i)
      p.extras[i] = {address(send->extras[i].data), send->extras[i].row_bytes};
    p.handle = address(send->handle.words);
    p.num_send_blocks = static_cast<int32_t>(blocks(send->num_rows, kernel.num_token_blocks));
  }
  unsigned num_recv_blocks = 0;
  if (recv) {
    if (!send) {
      p.parts = recv_parts(plan_, *recv);
      p.num_extras = static_cast<int32_t>(recv->extras.size());
      p.handle = address(recv->handle.words);
    }
    p.out_x = address(recv->x);
    p.out_scales = address(recv->scales);
    for (size_t i = 0; i < recv->extras.size(); ++i)
      p.out_extras[i] = {address(recv->extras[i].data), recv->extras[i].row_bytes};
    p.row_weights = address(recv->row_weights);
    p.counts = address(recv->counts);
    p.offsets = address(recv->offsets);
    p.source = address(recv->source);
    p.grouped = recv->grouped;
    p.zero_padding = recv->zero_padding;
    p.capacity = recv->capacity;
    p.alignment = recv->alignment;
    num_recv_blocks =
        blocks(int64_t{plan_.shape.chunk_tokens} * plan_.shape.world_size, kernel.num_slot_blocks);
  }
  if (send) open_step();
  platform::launch_kernel({.kernel = kernel.handle,
                           .num_blocks = static_cast<unsigned>(p.num_send_blocks) + num_recv_blocks,
                           .num_threads = kernel.num_threads,
                           .stream = stream,
                           .overlap_previous = true},
                          &p);
  if (send && !recv) sent_dispatches_[send->handle.words] = sent;
}

void DeviceKernels::combine(const CombineSend* send, const CombineRecv* recv, void* stream) {
  check_fault();
  abi::CombineParams p{};
  p.comm = comm_;
  const bool scalars = send ? send->row_scalars != nullptr : recv->out_scalars != nullptr;
  const DType out_dtype = send ? send->out_dtype : recv->out_dtype;
  p.stride = partial_stride(plan_, out_dtype, scalars);
  check_partial(plan_, out_dtype, scalars);
  const Kernel kernel = find_combine(send ? send->y_dtype : out_dtype, out_dtype);
  unsigned num_recv_blocks = 0;
  if (send) {
    p.handle = address(send->handle.words);
    p.y = address(send->y);
    p.row_weights = address(send->row_weights);
    p.row_scalars = address(send->row_scalars);
    p.num_send_blocks = static_cast<int32_t>(
        blocks(int64_t{plan_.shape.chunk_tokens} * plan_.shape.world_size, kernel.num_slot_blocks));
  }
  if (recv) {
    p.handle = address(recv->handle.words);
    p.out = address(recv->out);
    p.out_scalars = address(recv->out_scalars);
    num_recv_blocks = blocks(plan_.shape.chunk_tokens, kernel.num_token_blocks);
  }
  platform::launch_kernel({.kernel = kernel.handle,
                           .num_blocks = static_cast<unsigned>(p.num_send_blocks) + num_recv_blocks,
                           .num_threads = kernel.num_threads,
                           .stream = stream,
                           .overlap_previous = true},
                          &p);
  if (recv && num_open_ > 0) --num_open_;
}

void DeviceKernels::release(Handle handle, void* stream) {
  check_fault();
  MOE_P2P_CHECK(!combine_.empty(), Code::kUnavailable,
                "no combine kernel is compiled for this communicator");
  abi::CombineParams p{};
  p.comm = comm_;
  p.handle = address(handle.words);
  p.num_send_blocks = 1;
  p.empty = 1;
  const Kernel kernel = combine_.begin()->second;
  platform::launch_kernel({.kernel = kernel.handle,
                           .num_blocks = 2,
                           .num_threads = kernel.num_threads,
                           .stream = stream,
                           .overlap_previous = true},
                          &p);
  if (num_open_ > 0) --num_open_;
}

}  // namespace moe_p2p::moe
