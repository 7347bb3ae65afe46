// The calls of one rank on a GPU: fills the kernels' parameters (kernels/abi/params.h) and launches
// them on the caller's stream. Nothing here waits for the device; kernels report through the Fault,
// which every later call reads. Capturable in CUDA graphs.
//
// The device decides which steps a kernel opens, and whether a combine closes the step of its
// dispatch. Kernels of one communicator run one after the other: events order streams that change
// (platform/stream_order.h); the owner of two graphs, or of a graph and calls, orders replays.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "kernels/abi/params.h"
#include "moe/backend.h"
#include "moe/device/grid.h"
#include "moe/ledger.h"
#include "moe/node/waits.h"
#include "platform/stream_order.h"

namespace moe_p2p::moe {

// GPU memory of a rank with options.device; the caller keeps it until close().
struct DeviceMemory {
  int ordinal = 0;             // of the CUDA device
  std::vector<uint64_t> data;  // [L] regions of each rank of the node, zeroed, as mapped here
  std::vector<uint64_t>
      peer_data;                // [N] regions of the rank with our local index; 0 = not mapped here
  bool in_place = false;        // what goes to other nodes is stored there (DeviceComm::data)
  uint64_t state = 0;           // abi::DeviceState and DeviceWords on this device, zeroed
  uint64_t expert_rank = 0;     // i32 [E] on this device
  uint64_t expert_local = 0;    // i32 [E]
  abi::Fault* fault = nullptr;  // pinned host memory, zeroed
  uint64_t fault_device = 0;    // the same as the device sees it
  int num_sms = 0;              // most blocks of a kernel; 0: as many as help
  uint64_t world = 0;           // number of the communicator, the same on all ranks
  uint64_t table = 0;           // abi::EpochTable on this device, where the world changes; or 0
};

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(const Plan& plan, const AllToAllOptions& options, const DeviceMemory& memory,
                Waits& waits);
  // Arrival flags of a part in this rank's memory; 0: none. Before the first call.
  void set_flag_words(int num) noexcept { comm_.flag_words = num; }
  // [L] signal memory of the node's ranks, as the device sees it; called before the first call.
  void set_signals(const std::vector<uint64_t>& addresses);

  void set_dispatch(DispatchVariant variant, const DeviceKernel& kernel);
  void set_combine(CombineVariant variant, const DeviceKernel& kernel);
  void set_clean(const DeviceKernel& kernel) { clean_kernel_ = kernel; }
  void set_enter(const DeviceKernel& kernel) { enter_kernel_ = kernel; }

  // Where the world changes: kernels that are launched or replayed behind this in the stream are of
  // this object's epoch, which takes over the kernels, and the captured calls, of the one before.
  // null: it is the first. absent: [W], 1 for ranks that are not in it.
  void enter(DeviceBackend* before, const std::vector<uint8_t>& absent,
             const platform::Stream& stream);

  // One kernel for both halves. They throw before anything is launched.
  void dispatch(const DispatchSend* send, const DispatchRecv* recv) override;
  void combine(const CombineSend* send, const CombineRecv* recv) override;
  void release(Handle handle, const platform::Stream& stream) override;
  void clean_masks(uint64_t round, const platform::Stream& stream) override;
  void check() const override;
  bool failed() const noexcept override { return failed_ || fault() != nullptr; }
  std::vector<Step> last_steps() const override {
    return {};
  }  // kernels have rung whatever they will
  Ledger& ledger() noexcept override { return ledger_; }
  Lost lost() const noexcept override;
  std::optional<provider::MemorySpan> regions() const override;
  std::optional<provider::MemorySpan> mapped_regions(int node) const override;

 private:
  using Stage = OpenCall::Stage;
  // The stream of a call, and the capture that it is part of.
  struct Place {
    const platform::Stream& stream;
    uint64_t capture;

    explicit Place(const platform::Stream& s) : stream(s), capture(platform::capture_of(s)) {}
  };

  // What the first kernel that failed reported; null while none did.
  const abi::Fault* fault() const noexcept;
  // Runs a call that launches kernels. A failure in the driver breaks the communicator; the caller
  // handles anything else that it throws.
  template <typename Call>
  void launching(Call&& call);
  void launch_dispatch(const DispatchSend* send, const DispatchRecv* recv,
                       const platform::Stream& stream);
  void launch_combine(const CombineSend* send, const CombineRecv* recv,
                      const platform::Stream& stream);
  void launch_release(const int32_t* handle, const Place& place);
  // Releases the oldest dispatches, where the ledger does that; throws where there is no room.
  void make_room(int64_t num_steps, const Place& place);
  provider::MemorySpan span_at(uint64_t address) const;

  OpenCall begin_dispatch(const DispatchSend& send) const;
  OpenCall begin_combine(const CombineSend& send) const;
  void check_half(int64_t num_steps) const;
  abi::DispatchParams params_of(const OpenCall& call) const;
  void discard(const OpenCall& call, const Place& place);
  void fill(abi::DispatchParams& p, const DispatchSend& send) const;
  void fill(abi::DispatchParams& p, const DispatchRecv& recv) const;
  static void fill(abi::CombineParams& p, const CombineSend& send);
  static void fill(abi::CombineParams& p, const CombineRecv& recv);
  // Late weights are relayed in any way, and so is what neighbours' partners dispatch.
  int32_t relay_blocks(bool with_weights) const noexcept {
    return plan_.shape.num_nodes() > 1 &&
           (comm_.flag_words == 0 || plan_.shape.ranks_per_node > 1 || with_weights);
  }
  // Tokens of a chunk that a grid is made for.
  int64_t tokens_of(const DeviceKernel& kernel, const OpenCall& call) const noexcept {
    return kernel.max_tokens > 0 ? call.num_slots : plan_.shape.chunk_tokens;
  }
  abi::Grid grid_of(const DeviceKernel& kernel, GridInput input) const;
  template <typename Params>
  void launch(const DeviceKernel& kernel, const Params& params, const Place& place);
  // overlaps: it may begin while the kernel before it in the stream runs, for which it waits
  // itself.
  void launch(const DeviceKernel& kernel, const void* params, int num_blocks, const Place& place,
              bool overlaps);

  const Plan& plan_;
  const int local_;
  Waits& waits_;
  const bool in_order_;  // NICs keep writes to the regions in order: flags may follow them
  const DeviceMemory memory_;
  const platform::PrimaryContext context_;
  abi::DeviceComm comm_{};
  std::map<DispatchVariant, DeviceKernel> dispatch_kernels_;
  std::map<CombineVariant, DeviceKernel> combine_kernels_;
  std::optional<DeviceKernel> clean_kernel_, enter_kernel_;
  abi::EpochTable table_{};
  bool failed_ = false;  // when a later epoch was entered: the fault is that one's from then on
  Ledger ledger_;
  platform::StreamOrder order_;
};

}  // namespace moe_p2p::moe
