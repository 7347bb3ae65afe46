// The calls of one rank on a GPU: fills the kernels' parameters (kernels/abi/params.h) and launches
// them on the caller's stream. Nothing here waits for the device; what a kernel has to tell comes
// back through the Fault, which every later call looks at. Capturable in CUDA graphs.
//
// Which steps a kernel opens is counted on the device. The host keeps account of the calls that hold
// some, by their handle's address, to tell paired from solo combines and to refuse what would wait
// for itself. A graph's replay opens and closes the same number, so it changes nothing here.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "kernels/abi/params.h"
#include "moe/calls.h"
#include "moe/device_grid.h"
#include "platform/cuda_context.h"

namespace moe_p2p::moe {

// What a dispatch kernel is compiled for.
struct DispatchVariant {
  abi::DType x_dtype{};  // of the caller's payload
  bool quantize = false;
  abi::ScaleFormat scale_format = abi::ScaleFormat::kFloat32;
  bool by_rank = false;

  auto operator<=>(const DispatchVariant&) const = default;
};

class DeviceKernels {
 public:
  DeviceKernels(const Plan& plan, const AllToAllOptions& options, const DeviceMemory& memory);
  // [L] signal memory of the node's ranks, as the device sees it; before the first call.
  void set_signals(const std::vector<uint64_t>& addresses);

  void set_dispatch(const DispatchVariant& variant, const DeviceKernel& kernel);
  // Compiled for (type of y, type of out).
  void set_combine(abi::DType y_dtype, abi::DType out_dtype, const DeviceKernel& kernel);

  // Either half or both (one kernel); null leaves a half out. They throw before anything is launched.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv, void* stream);
  void combine(const CombineSend* send, const CombineRecv* recv, void* stream);
  void release(Handle handle, void* stream);

  // What the first kernel that failed has to tell; null while none did.
  const abi::Fault* fault() const noexcept;
  // Of any fault but kAborted. `gone`: why the rank that was waited for will not come, if it is known.
  base::Error error_of(const abi::Fault& fault, const std::string& gone) const;

 private:
  using Key = std::pair<int, int>;  // types
  enum class Stage : uint8_t { kDispatchSent, kDispatched, kCombineSent };
  // A call that holds steps: a dispatch that was not received, a paired one that was not combined,
  // a combine that was not received. The halves that follow find here what they must agree with.
  struct Open {
    const int32_t* handle;
    uint64_t first_step;  // as the host counts them
    int64_t num_steps;
    bool solo;
    Stage stage;
    DispatchVariant variant{};  // of a dispatch
    Key key{};                  // of the kernel of a combine
    abi::TokenParts parts{};
    bool opaque = false;  // RegionFlags::kOpaque
    int32_t num_extras = 0;
    int32_t num_rows = 0;
    bool with_scalars = false;
  };
  using OpenCalls = std::vector<Open>;  // a handful, oldest first

  Open begin_dispatch(const DispatchSend& send) const;
  Open begin_combine(const CombineSend& send) const;
  OpenCalls::iterator find_open(Handle handle, Stage stage) noexcept;
  void check_room(int64_t num_steps) const;
  void check_half(int64_t num_steps) const;
  abi::DispatchParams params_of(const Open& call) const;
  void discard(const Open& call, void* stream) const;
  void fill(abi::DispatchParams& p, const DispatchSend& send) const;
  void fill(abi::DispatchParams& p, const DispatchRecv& recv) const;
  static void fill(abi::CombineParams& p, const CombineSend& send);
  static void fill(abi::CombineParams& p, const CombineRecv& recv);
  abi::Grid grid_of(const DeviceKernel& kernel, GridInput input) const;
  template <typename Params>
  void launch(const DeviceKernel& kernel, const Params& params, void* stream) const;

  const Plan& plan_;
  const DeviceMemory memory_;
  const platform::PrimaryContext context_;
  abi::DeviceComm comm_{};
  std::map<DispatchVariant, DeviceKernel> dispatch_kernels_;
  std::map<Key, DeviceKernel> combine_kernels_;
  OpenCalls open_;
  uint64_t next_step_ = 0;
};

}  // namespace moe_p2p::moe
