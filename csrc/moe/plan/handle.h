// Typed view of a handle's words (kernels/abi/handle.h, HandleLayout). The words lie in a tensor of
// the caller, who may have overwritten them: host calls check what they read before they use it.
#pragma once

#include "base/log.h"
#include "kernels/abi/handle.h"
#include "moe/call.h"

namespace moe_p2p::moe {

class HandleView {
 public:
  // For a handle about to be written by a dispatch.
  static HandleView create(const abi::Shape& shape, Handle handle, int64_t num_rows,
                           int64_t num_chunks, int64_t num_slots) {
    const auto layout = abi::HandleLayout::make(shape, num_rows, num_chunks, num_slots);
    MOE_P2P_CHECK(handle.words && static_cast<uint64_t>(handle.num_words) >= layout.total,
                  base::Code::kInvalidArgument, "handle has ", handle.num_words,
                  " words, this dispatch needs ", layout.total, " (handle_words)");
    return {shape, handle.words, layout, num_slots};
  }
  // For a handle that a dispatch of this communicator has written. Throws unless it is one, and
  // every array that its numbers describe lies inside.
  static HandleView open(const abi::Shape& shape, uint32_t communicator, Handle handle);
  // Throws unless `rank` may use every number that its combine reads here: slots of partial sums,
  // ranks of its node, rows of y.
  void check_contents(int rank, int64_t y_rows) const;

  abi::HandleMeta& meta() const noexcept { return *reinterpret_cast<abi::HandleMeta*>(words_); }
  // The most slots that a source has in a chunk.
  int64_t num_slots() const noexcept { return num_slots_; }
  // [L + N] of token t
  int32_t* send_slots(int64_t token) const noexcept {
    return words_ + layout_.send_slots +
           static_cast<uint64_t>(token) *
               static_cast<uint64_t>(shape_->ranks_per_node + shape_->num_nodes());
  }
  int32_t& slot_count(int64_t chunk, int source) const noexcept {
    return words_[layout_.slot_counts + of_source(chunk, source)];
  }
  // [K] of one received slot
  int32_t* slot_rows(int64_t chunk, int source, int64_t slot) const noexcept {
    return words_ + layout_.slot_rows +
           of_slot(chunk, source, slot) * static_cast<uint64_t>(shape_->topk);
  }
  uint64_t slot_ranks(int64_t chunk, int source, int64_t slot) const noexcept {
    const int32_t* p = words_ + layout_.slot_ranks + 2 * of_slot(chunk, source, slot);
    return static_cast<uint64_t>(static_cast<uint32_t>(p[1])) << 32 | static_cast<uint32_t>(p[0]);
  }
  void set_slot_ranks(int64_t chunk, int source, int64_t slot, uint64_t bits) const noexcept {
    int32_t* p = words_ + layout_.slot_ranks + 2 * of_slot(chunk, source, slot);
    p[0] = static_cast<int32_t>(bits);
    p[1] = static_cast<int32_t>(bits >> 32);
  }

 private:
  HandleView(const abi::Shape& shape, int32_t* words, const abi::HandleLayout& layout,
             int64_t num_slots)
      : shape_(&shape), words_(words), layout_(layout), num_slots_(num_slots) {}

  uint64_t of_source(int64_t chunk, int source) const noexcept {
    return static_cast<uint64_t>(chunk) * static_cast<uint64_t>(shape_->world_size) +
           static_cast<uint64_t>(source);
  }
  uint64_t of_slot(int64_t chunk, int source, int64_t slot) const noexcept {
    return of_source(chunk, source) * static_cast<uint64_t>(num_slots_) +
           static_cast<uint64_t>(slot);
  }

  const abi::Shape* shape_;
  int32_t* words_;
  abi::HandleLayout layout_;
  int64_t num_slots_;
};

}  // namespace moe_p2p::moe
