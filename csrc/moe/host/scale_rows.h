// Where a receiver wants the scales of a row, and in which form. Scales are words of 4 bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "moe/call.h"
#include "moe/host/rows.h"

namespace moe_p2p::moe {

class ScaleRows {
 public:
  explicit ScaleRows(const DispatchRecv& call)
      : words_(static_cast<uint32_t*>(call.scales)),
        num_words_(call.scale_bytes / sizeof(uint32_t)),
        packed_(call.options.scale_format == abi::ScaleFormat::kUe8m0) {
    const auto stride = static_cast<uint64_t>(call.scale_stride);
    const auto capacity = static_cast<uint64_t>(call.capacity);
    if (call.options.rows().apart) rows_of_expert_ = capacity;
    row_step_ = call.options.column_scales ? 1 : num_words_;
    word_step_ = call.options.column_scales ? stride : 1;
    expert_step_ = num_words_ * (call.options.column_scales ? stride : capacity);
  }

  // `sent`: the scales of the row as they travelled, sent_bytes long.
  void store(uint64_t row, const std::byte* sent, uint64_t sent_bytes) const noexcept {
    const auto* words = abi::values_at<uint32_t>(sent);
    const auto* scales = abi::values_at<float>(sent);
    const uint64_t num_sent = sent_bytes / sizeof(uint32_t);
    for (uint64_t i = 0; i < num_words_; ++i)
      at(row, i) =
          packed_ ? pack_ue8m0(scales + 4 * i, std::min<uint64_t>(4, num_sent - 4 * i)) : words[i];
  }
  void clear(uint64_t row) const noexcept {
    for (uint64_t i = 0; i < num_words_; ++i) at(row, i) = 0;
  }

 private:
  uint32_t& at(uint64_t row, uint64_t word) const noexcept {
    return words_[row / rows_of_expert_ * expert_step_ + row % rows_of_expert_ * row_step_ +
                  word * word_step_];
  }

  uint32_t* words_;
  uint64_t num_words_;
  bool packed_;
  uint64_t rows_of_expert_ = std::numeric_limits<uint64_t>::max();  // all rows are of one part
  uint64_t row_step_, word_step_, expert_step_;
};

}  // namespace moe_p2p::moe
