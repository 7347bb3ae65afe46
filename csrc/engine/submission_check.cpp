#include "engine/submission_check.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "base/log.h"
#include "engine/peer.h"

namespace moe_p2p::engine {

using base::Code;

namespace {

// Of one request. Rows may overlap, so its memory does not bound it; sums beyond it would wrap.
constexpr uint64_t kMostBytes = uint64_t{1} << 60;

struct Checker {
  const size_t num_nics;
  const std::string& label;
  const char* name = "";

  void local(const char* side, const MemoryHandle* handle) const {
    MOE_P2P_CHECK(handle != nullptr, Code::kInvalidArgument, label, ": ", name, " has no ", side);
    MOE_P2P_CHECK(handle->keys.size() == num_nics, Code::kInvalidArgument, label, ": ", name,
                  ": the ", side, " is registered at ", handle->keys.size(),
                  " NICs, this engine has ", num_nics, "; is it of another engine?");
  }

  void remote(const char* side, const RemoteRegion* region) const {
    MOE_P2P_CHECK(region != nullptr && region->owner != nullptr, Code::kInvalidArgument, label,
                  ": ", name, " has no ", side);
    MOE_P2P_CHECK(region->rails.size() == num_nics, Code::kInvalidArgument, label, ": ", name,
                  ": the ", side, " was resolved for ", region->rails.size(),
                  " NICs, this engine has ", num_nics, "; is it of another engine?");
  }

  void range(const char* side, uint64_t offset, uint64_t bytes, uint64_t limit) const {
    MOE_P2P_CHECK(offset <= limit && bytes <= limit - offset, Code::kInvalidArgument, label, ": ",
                  name, " ", side, ": ", bytes, " bytes at offset ", offset,
                  " do not lie within the ", limit, " registered bytes");
  }

  // From a page's first byte to its last row's last.
  static uint64_t extent(const WritePages& write, const Pages& pages, uint64_t limit) {
    const uint64_t num_rows = write.num_rows();
    if (num_rows <= 1) return write.page_bytes;
    if (pages.row_stride > limit / (num_rows - 1)) return std::numeric_limits<uint64_t>::max();
    return pages.row_stride * (num_rows - 1) + write.row_bytes;
  }

  void pages(const char* side, const Pages& pages, uint64_t page_bytes, uint64_t limit) const {
    if (pages.indices.empty()) return;
    range(side, pages.offset, page_bytes, limit);
    const uint64_t room = limit - pages.offset - page_bytes;
    const uint64_t last = pages.stride != 0
                              ? room / pages.stride
                              : static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    // One pass without a branch per page; a negative index becomes a very large one.
    uint64_t largest = 0;
    for (const int64_t index : pages.indices)
      largest = std::max(largest, static_cast<uint64_t>(index));
    if (largest <= last) [[likely]]
      return;
    const auto bad = std::find_if(pages.indices.begin(), pages.indices.end(), [&](int64_t index) {
      return static_cast<uint64_t>(index) > last;
    });
    throw base::Error(
        Code::kInvalidArgument,
        base::concat(label, ": ", name, " ", side, ": page index ", *bad, " at position ",
                     bad - pages.indices.begin(), " must be 0 to ", last, " (", limit,
                     " registered bytes, offset ", pages.offset, ", stride ", pages.stride,
                     ", pages of ", page_bytes, " bytes)"));
  }

  void operator()(const Imm& imm) {
    MOE_P2P_CHECK(imm.peer != nullptr, Code::kInvalidArgument, label, ": Imm has no peer");
    MOE_P2P_CHECK(imm.peer->rails().size() == num_nics, Code::kInvalidArgument, label,
                  ": Imm: the peer is connected over ", imm.peer->rails().size(),
                  " NICs, this engine has ", num_nics, "; is it of another engine?");
  }

  // `from` and `to` name the sides: the write's source is memory here, its target a peer's.
  void check(const Write& write, const char* from, const char* to) const {
    local(from, write.source);
    remote(to, write.target);
    range(from, write.source_offset, write.bytes, write.source->span.bytes);
    range(to, write.target_offset, write.bytes, write.target->bytes);
  }

  void check(const WritePages& write, const char* from, const char* to) const {
    local(from, write.source);
    remote(to, write.target);
    MOE_P2P_CHECK(write.source_pages.indices.size() == write.target_pages.indices.size(),
                  Code::kInvalidArgument, label, ": ", name, " has ",
                  write.source_pages.indices.size(), " ", from, " pages and ",
                  write.target_pages.indices.size(), " ", to, " pages, must be as many");
    MOE_P2P_CHECK(
        write.row_bytes == 0 || (write.page_bytes != 0 && write.page_bytes % write.row_bytes == 0),
        Code::kInvalidArgument, label, ": ", name, " has pages of ", write.page_bytes,
        " bytes, must be a multiple of its rows of ", write.row_bytes, " bytes");
    const uint64_t num_pages = std::max<uint64_t>(write.source_pages.indices.size(), 1);
    MOE_P2P_CHECK(write.page_bytes <= kMostBytes / num_pages, Code::kInvalidArgument, label, ": ",
                  name, " has ", num_pages, " pages of ", write.page_bytes, " bytes, more than ",
                  kMostBytes, " bytes");
    MOE_P2P_CHECK(write.num_rows() <= 1 || !write.imm || write.imms == WritePages::Imms::kPerNic,
                  Code::kInvalidArgument, label, ": ", name, " has an immediate per page and ",
                  write.num_rows(), " rows per page; count the immediate per NIC");
    const auto sides = {std::tuple{from, &write.source_pages, write.source->span.bytes},
                        std::tuple{to, &write.target_pages, write.target->bytes}};
    for (const auto& [side, these, limit] : sides)
      pages(side, *these, extent(write, *these, limit), limit);
  }

  void operator()(const Write& write) {
    name = "Write";
    check(write, "source", "target");
  }
  void operator()(const WritePages& write) {
    name = "WritePages";
    check(write, "source", "target");
  }
  void operator()(const Read& read) {
    name = "Read";
    check(read.reversed(), "target", "source");
  }
  void operator()(const ReadPages& read) {
    name = "ReadPages";
    check(read.reversed(), "target", "source");
  }

  void operator()(const Scatter& scatter) {
    name = "Scatter";
    local("source", scatter.source);
    for (size_t i = 0; i < scatter.slices.size(); ++i) {
      const Slice& slice = scatter.slices[i];
      const std::string slice_name = base::concat("Scatter slice ", i);
      name = slice_name.c_str();
      remote("target", slice.target);
      range("source", slice.source_offset, slice.bytes, scatter.source->span.bytes);
      range("target", slice.target_offset, slice.bytes, slice.target->bytes);
    }
  }
};

}  // namespace

void check_priority(int priority, const std::string& label) {
  MOE_P2P_CHECK(priority >= 0 && priority < kNumPriorities, Code::kInvalidArgument, label,
                ": priority is ", priority, ", must be 0 to ", kNumPriorities - 1);
}

void check_operation(const Operation& operation, int num_nics, const std::string& label) {
  std::visit(Checker{static_cast<size_t>(num_nics), label}, operation);
}

}  // namespace moe_p2p::engine
