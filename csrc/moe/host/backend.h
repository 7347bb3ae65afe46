// The calls of one rank on the CPU: state machines (host/calls.h) that are advanced until they are
// done, with a wait between.
#pragma once

#include "moe/backend.h"
#include "moe/host/calls.h"
#include "moe/host/kernels.h"
#include "moe/node/waits.h"

namespace moe_p2p::moe {

class HostBackend final : public Backend {
 public:
  HostBackend(const Plan& plan, const AllToAllOptions& options, NodeMemory& memory,
              const Masks& masks, Waits& waits);

  // For halves of at most steps_in_flight chunks; larger calls must be whole.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv) override;
  void combine(const CombineSend* send, const CombineRecv* recv) override;
  void release(Handle handle, const platform::Stream& stream) override;
  void clean_masks(uint64_t round, const platform::Stream& stream) override;
  void check() const override {}  // host calls throw their own errors
  bool failed() const noexcept override { return false; }
  std::vector<Step> last_steps() const override;
  Ledger& ledger() noexcept override { return ledger_; }
  std::optional<provider::MemorySpan> regions() const override;
  std::optional<provider::MemorySpan> mapped_regions(int node) const override;

  Lost lost() const noexcept override {
    const HostKernels::Losses& lost = kernels_.lost();
    return {lost.num_tokens.load(std::memory_order_relaxed),
            lost.step.load(std::memory_order_relaxed), lost.rank.load(std::memory_order_relaxed)};
  }

  std::unique_ptr<base::Recording> record(std::unique_ptr<base::Recording> next) override {
    return kernels_.recorder().exchange(std::move(next));
  }

  // For a simulation, which advances calls one by one.
  const HostContext& context() const noexcept { return context_; }
  // Throws when something ends the wait of a call for `pending`.
  void check(const Pending& pending) const;

 private:
  void send_dispatch(const DispatchSend& send);
  void send_combine(const CombineSend& send);
  void wait_ready(const CombineSend& send);
  // Returns the first half of `handle` that waits for its second one.
  const OpenCall& sent(Handle handle, OpenCall::Stage stage, const char* what) const;
  void release(const OpenCall& call);
  // Releases the oldest dispatches, where the ledger does that.
  void make_room(int64_t num_steps);
  // Advances until done; the deadline starts anew whenever something moved.
  template <typename Advance, typename GetPending>
  void run(Advance&& advance, GetPending&& get_pending);

  const Plan& plan_;
  NodeMemory& memory_;
  Waits& waits_;
  const bool in_order_;  // NICs keep writes to the regions in order
  HostKernels kernels_;
  StepRing ring_;
  Ledger ledger_;
  const HostContext context_;
};

}  // namespace moe_p2p::moe
