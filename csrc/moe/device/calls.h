// The calls of one rank on a GPU: fills the kernels' parameters (kernels/abi/params.h) and launches
// them on the caller's stream. Nothing here waits for the device; what a kernel has to tell comes
// back through the Fault, which every later call looks at. Capturable in CUDA graphs.
//
// Which steps a kernel opens, and whether a combine closes that of its dispatch, is decided on the device.
// Kernels of one communicator run one after the other: on streams that change by events
// (platform/stream_order.h); two graphs, or a graph and other calls, as their owner replays them.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "kernels/abi/params.h"
#include "moe/calls.h"
#include "moe/device/grid.h"
#include "moe/open_calls.h"
#include "platform/stream_order.h"

namespace moe_p2p::moe {

class DeviceKernels {
 public:
  DeviceKernels(const Plan& plan, const AllToAllOptions& options, const DeviceMemory& memory);
  // [L] signal memory of the node's ranks, as the device sees it; before the first call.
  void set_signals(const std::vector<uint64_t>& addresses);

  void set_dispatch(const DispatchVariant& variant, const DeviceKernel& kernel);
  // Compiled for (type of y, type of out).
  void set_combine(abi::DType y_dtype, abi::DType out_dtype, const DeviceKernel& kernel);

  // Either half or both (one kernel); null leaves a half out. They throw before anything is launched.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv, const platform::Stream& stream);
  void combine(const CombineSend* send, const CombineRecv* recv, const platform::Stream& stream);
  void release(Handle handle, const platform::Stream& stream);

  // What the first kernel that failed has to tell; null while none did.
  const abi::Fault* fault() const noexcept;
  // Of any fault but kAborted. Of a timeout, `gone`: why the rank that was waited for will not come, if it is
  // known; `progress`: what came of it so far.
  base::Error error_of(const abi::Fault& fault, const std::string& gone,
                       const std::string& progress) const;

 private:
  using Stage = OpenCall::Stage;
  std::string awaited(const abi::Fault& fault) const;
  // Where a call runs, and the capture that it is part of.
  struct Place {
    const platform::Stream& stream;
    uint64_t capture;

    explicit Place(const platform::Stream& s) : stream(s), capture(platform::capture_of(s)) {}
  };

  OpenCall begin_dispatch(const DispatchSend& send) const;
  OpenCall begin_combine(const CombineSend& send) const;
  void check_half(int64_t num_steps) const;
  abi::DispatchParams params_of(const OpenCall& call) const;
  void discard(const OpenCall& call, const Place& place);
  void fill(abi::DispatchParams& p, const DispatchSend& send) const;
  void fill(abi::DispatchParams& p, const DispatchRecv& recv) const;
  static void fill(abi::CombineParams& p, const CombineSend& send);
  static void fill(abi::CombineParams& p, const CombineRecv& recv);
  abi::Grid grid_of(const DeviceKernel& kernel, GridInput input) const;
  template <typename Params>
  void launch(const DeviceKernel& kernel, const Params& params, const Place& place);

  const Plan& plan_;
  const DeviceMemory memory_;
  const platform::PrimaryContext context_;
  abi::DeviceComm comm_{};
  std::map<DispatchVariant, DeviceKernel> dispatch_kernels_;
  std::map<CombineTypes, DeviceKernel> combine_kernels_;
  OpenCalls open_;
  platform::StreamOrder order_;
};

}  // namespace moe_p2p::moe
