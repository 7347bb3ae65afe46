// Carries out the calls of an AllToAll: on the CPU (host/backend.h), or with kernels of a GPU
// (device/backend.h). An AllToAll has one, chosen by the memory of its tensors.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/recorder.h"
#include "moe/call.h"
#include "moe/ledger.h"
#include "moe/plan/step.h"
#include "provider/provider.h"

namespace moe_p2p::moe {

class Backend {
 public:
  virtual ~Backend() = default;

  // Either half of a call, or both; null leaves a half out. Bad input throws
  // Error{kInvalidArgument} before anything is sent. What breaks the communicator is latched
  // (node/waits.h).
  virtual void dispatch(const DispatchSend* send, const DispatchRecv* recv) = 0;
  virtual void combine(const CombineSend* send, const CombineRecv* recv) = 0;
  // Closes the step of a paired dispatch that gets no combine.
  virtual void release(Handle handle, const platform::Stream& stream) = 0;

  // Takes masked ranks back, for the communicators of one node: begins a round of steps.
  virtual void clean_masks(uint64_t round, const platform::Stream& stream) = 0;

  // Throws what has failed since the call that caused it returned. Neither latches nor waits.
  virtual void check() const = 0;
  virtual bool failed() const noexcept = 0;  // a kernel has reported something
  // The last step of each step slot whose combine this rank has handed in. If a neighbour is gone
  // and has not handed in its part, the step is left out: nobody rings its doorbell. A rank that
  // closes waits until these are sent.
  virtual std::vector<Step> last_steps() const = 0;

  // What sums have lacked, where that is counted.
  virtual Lost lost() const noexcept = 0;

  // As TransferEngine::record(), of calls on a host; null on a GPU.
  virtual std::unique_ptr<base::Recording> record(std::unique_ptr<base::Recording>) {
    return nullptr;
  }

  // Which calls are open.
  virtual Ledger& ledger() noexcept = 0;

  // This rank's regions, where NICs read and write them.
  virtual std::optional<provider::MemorySpan> regions() const = 0;
  // The regions of the rank with our local index on another node, where they are mapped here.
  virtual std::optional<provider::MemorySpan> mapped_regions(int node) const = 0;
};

}  // namespace moe_p2p::moe
