// The CPU twins of kernels/*.cu: each works on one step of one rank and never waits. Callers
// (host/calls.cpp) have checked that the step's slot is free, or that everything the kernel reads
// has arrived. They throw only on wrong data from peers (Error{kProtocol}, naming the rank).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/mutation.h"
#include "base/recorder.h"
#include "moe/call.h"
#include "moe/ledger.h"
#include "moe/node/masks.h"
#include "moe/node/memory.h"
#include "moe/plan/handle.h"
#include "moe/plan/step.h"
#include "moe/plan/token_parts.h"
#include "platform/thread.h"

namespace moe_p2p::moe {

// Routing of a dispatch: made once per call, before anything is sent.
struct Routing {
  std::vector<int32_t> experts;    // [T', K] global ids, -1 = none
  std::vector<int32_t> positions;  // [T', K] earlier tokens of the call with that expert, or rank
  std::vector<int32_t> expert_counts;  // [E] tokens of the whole call
  std::vector<int32_t> rank_counts;    // [W] the same
  std::vector<int32_t> num_slots;  // [C][L + N] slots of each chunk, per own-node rank, per node
};

// Where the rows of each (expert, source) lie, by rank of each source; made from the counts in the
// first chunk.
struct Placement {
  std::vector<int32_t> first_row;  // [E_local][W], by rank [W]
  std::vector<int32_t> num_rows;   // the same
  struct Item {
    int32_t source;
    int32_t slot;
  };
  std::vector<Item> items;  // scratch: slots of this chunk that hold rows of ours
};

class HostKernels {
 public:
  HostKernels(const Plan& plan, NodeMemory& memory, int num_threads, const Masks& masks);
  int rank() const noexcept { return memory_.rank(); }
  // Spans of the four halves. Of the thread in a call.
  base::Recorder& recorder() noexcept { return recorder_; }
  // From now on sums that lack what a masked rank had to send are NaN.
  void poison() noexcept { poisons_ = true; }
  // See AllToAll::lost(). Any thread.
  struct Losses {
    std::atomic<uint64_t> num_tokens{0}, step{0};
    std::atomic<int> rank{-1};
  };
  const Losses& lost() const noexcept { return lost_; }

  // Reads which ranks are masked; all kernels use that until the next call of this. Nothing is
  // written for masked ranks; they count as arrived, and empty.
  void look_at_masks();

  // Checks the expert ids, counts, and gives every token its slots (into the handle).
  Routing route(const DispatchSend& call, int64_t num_chunks, const HandleView& handle);

  void dispatch_send(Step step, const DispatchSend& call, const abi::TokenParts& parts,
                     const Routing& routing, const HandleView& handle, int64_t chunk);
  // Chunk 0 also lays out the output.
  void dispatch_recv(Step step, const DispatchRecv& call, const OpenCall& sent,
                     const HandleView& handle, int64_t chunk, Placement& placement);
  // Pushes call.topk_weights to the ranks that hold the tokens; combine_send() needs all ranks'.
  void push_weights(Step step, const CombineSend& call, const HandleView& handle, int64_t chunk);
  void recv_weights(Step step) const;
  void combine_send(Step step, const CombineSend& call, const HandleView& handle, int64_t chunk);
  void combine_recv(Step step, const CombineRecv& call, const HandleView& handle, int64_t chunk);

  // Empty halves of a step; the receiving side checks that nothing arrived.
  void send_empty_dispatch(Step step);
  void recv_empty_dispatch(Step step) const;
  void send_empty_combine(Step step);
  void recv_empty_combine(Step step) const;

  // Clears the masks, and announces to the node that this rank reads nothing more of old rounds.
  void begin_round(uint64_t round) noexcept;
  // Whether a rank of the node has done that, for this round or a later one.
  bool has_cleaned(uint64_t round, int source) const noexcept;

  // True when what `source` sends this rank in a phase is visible, or `source` is masked. In
  // combine the rank with this local index sends for its whole node; true for that node's other
  // ranks.
  bool arrived(Step step, abi::Phase phase, int source) const noexcept;

 private:
  // Whether what this rank's partner on that node sends it is here, by its flags.
  bool flags_arrived(Step step, abi::Phase phase, int node) const noexcept;
  bool silent(int rank) const noexcept { return silent_[static_cast<size_t>(rank)]; }
  // Nothing is written for this rank: it may still read what was sent before its mask.
  bool skips(int rank) const noexcept { return silent(rank) && !MOE_P2P_MUTATED(kWriteToMasked); }
  int rank_of(int node, int local) const noexcept { return node * shape_.ranks_per_node + local; }
  // The rank of a column of send_slots: of this node, or our partner on another one.
  int rank_of_column(int column) const noexcept;
  // Where this rank reads what `source` sent; no tokens and no counts when it is masked.
  abi::RegionHeader& dispatch_region(Step step, int source) const noexcept;
  abi::RegionHeader& combine_region(Step step, int source) const noexcept;
  abi::RegionHeader& weights_region(Step step, int source) const noexcept;
  // null: of an empty combine.
  void check_combine(Step step, const CombineRecv* call) const;
  void check_header(const abi::RegionHeader& header, Step step, uint32_t flags, uint64_t slot_bytes,
                    int source, const char* phase, int32_t num_slots = -1) const;
  void fill_header(abi::RegionHeader& header, Step step, uint32_t num_tokens, uint32_t flags,
                   uint64_t slot_bytes) const noexcept;
  void write_counts(abi::RegionHeader& region, const Routing& routing, int first_rank,
                    int num_ranks) const noexcept;
  void build_slot(std::byte* slot, Step step, const DispatchSend& call,
                  const abi::TokenParts& parts, const Routing& routing,
                  int64_t token) const noexcept;
  base::Span span(Step step, abi::Phase phase, uint32_t part) noexcept {
    return {recorder_, step.index, static_cast<uint32_t>(phase), part};
  }
  const int32_t* counts_from(Step step, int source) const noexcept;
  void place(Step step, const DispatchRecv& call, Placement& placement) const;
  void place_tokens(Step step, const DispatchRecv& call, Placement& placement) const;
  void read_heads(Step step, const DispatchRecv& call, const abi::TokenParts& parts,
                  const HandleView& handle, int64_t chunk, Placement& placement) const;
  void copy_rows(Step step, const DispatchRecv& call, const abi::TokenParts& parts,
                 const HandleView& handle, int64_t chunk, const Placement& placement);
  void fill_topk(const DispatchRecv& call, const std::byte* slot, uint64_t row) const noexcept;
  void raise_counts(const DispatchRecv& call) const noexcept;
  void clear_padding(const DispatchRecv& call) const noexcept;
  struct Addends;
  void find_in_rank_order(Step step, const CombineRecv& call, const int32_t* slots,
                          Addends& found) const noexcept;
  void find_in_topk_order(Step step, const CombineRecv& call, int64_t token, const int32_t* slots,
                          Addends& found) const noexcept;
  // A masked rank that has this token, so that its sum lacks something; -1: none.
  int lost_of(const int32_t* slots) const noexcept;
  // Raises flags of own-node peers, hands the node's partial sums in and adds them up when last.
  void hand_in(Step step, const CombineSend* call, const HandleView* handle, int64_t chunk);
  void add_up(Step step, const CombineSend* call, const HandleView* handle, int64_t chunk,
              int gateway, int node);
  // The outbox of a phase is complete: `num_slots` slots behind `front` bytes.
  void ring(Step step, abi::Phase phase, int gateway, int node, uint64_t front, uint64_t stride,
            int32_t num_slots) noexcept;
  void raise_flag(Step step, abi::Phase phase, int local) noexcept;

  const Plan& plan_;
  const abi::Shape& shape_;
  NodeMemory& memory_;
  const Masks masks_;
  std::vector<bool> silent_;  // [W] masked at the last look
  bool any_silent_ = false;
  bool poisons_ = false;
  Losses lost_;
  base::Recorder recorder_;
  std::vector<uint64_t> empty_;  // dispatch of a masked rank: a header and counts, all zero
  platform::ThreadPool pool_;
};

}  // namespace moe_p2p::moe
