// The calls of one rank on a GPU: fills the kernels' parameters (kernels/abi/params.h) and launches
// them on the caller's stream. Nothing here waits for the device; what a kernel has to tell comes
// back through the Fault, which every later call looks at. Capturable in CUDA graphs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/abi/params.h"
#include "moe/all_to_all.h"

namespace moe_p2p::moe {

struct DeviceMemory {
  std::vector<uint64_t> data;   // [L] regions of each rank of the node, zeroed, as mapped here
  uint64_t state = 0;           // abi::DeviceState on this device, zeroed
  uint64_t expert_rank = 0;     // i32 [E] on this device
  uint64_t expert_local = 0;    // i32 [E]
  abi::Fault* fault = nullptr;  // pinned host memory, zeroed
  uint64_t fault_device = 0;    // the same as the device sees it
  int num_sms = 0;              // blocks that may be resident; 0: as many as help
};

class DeviceKernels {
 public:
  DeviceKernels(const Plan& plan, const AllToAllOptions& options, const DeviceMemory& memory);

  struct Kernel {
    uint64_t handle = 0;
    unsigned num_threads = 0;
    int num_token_blocks = 1;  // most blocks of the half that works on own tokens
    int num_slot_blocks = 1;   // and of the half that works on received slots
  };
  // Compiled for (payload type of the caller, quantize) and for (type of y, type of out).
  void set_dispatch(abi::DType x_dtype, bool quantize, Kernel kernel);
  void set_combine(abi::DType y_dtype, abi::DType out_dtype, Kernel kernel);

  // Either half or both (one kernel); null leaves a half out.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv, void* stream);
  void combine(const CombineSend* send, const CombineRecv* recv, void* stream);
  void release(Handle handle, void* stream);

  // Throws what a kernel had to tell: Error{kTimeout}, {kInvalidArgument}, {kProtocol}.
  void check_fault() const;

 private:
  struct Sent {
    std::pair<int, bool> key;
    int32_t num_rows;
  };
  Kernel find_combine(abi::DType y_dtype, abi::DType out_dtype) const;
  unsigned blocks(int64_t items, int64_t most) const noexcept;
  void open_step();
  Sent take_sent(Handle handle);

  const Plan& plan_;
  const DeviceMemory memory_;
  abi::DeviceComm comm_{};
  std::map<std::pair<int, bool>, Kernel> dispatch_;
  std::map<std::pair<int, int>, Kernel> combine_;
  // The halves of a call must agree; the receive half finds here what its send half was compiled for.
  std::map<const int32_t*, Sent> sent_dispatches_;
  int num_open_ = 0;  // dispatches without their combine
};

}  // namespace moe_p2p::moe
