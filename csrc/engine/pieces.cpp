#include "engine/pieces.h"

#include <algorithm>

#include "engine/peer.h"

namespace moe_p2p::engine {
namespace {

constexpr uint64_t kShardAlignment = 128;

struct Item {
  std::byte* local;
  uint64_t local_key;
  uint64_t remote_addr;
  uint64_t remote_key;
  uint64_t bytes;
  provider::PeerId peer;
};

// How many of `count` items NIC `nic` gets: items nic, nic + num_nics, ...
uint64_t num_dealt(uint64_t count, int nic, int num_nics) noexcept {
  const auto first = static_cast<uint64_t>(nic);
  return count > first ? (count - first - 1) / static_cast<uint64_t>(num_nics) + 1 : 0;
}

uint64_t dealt(uint64_t item, const CutContext& context) noexcept {
  return item * static_cast<uint64_t>(context.num_nics) + static_cast<uint64_t>(context.nic);
}

// Returns the write of `bytes` from `source` at source_offset to `target` at target_offset by NIC
// `nic`.
Item make_item(const MemoryHandle& source, uint64_t source_offset, const RemoteRegion& target,
               uint64_t target_offset, uint64_t bytes, int nic) noexcept {
  const auto& rail = target.rails[static_cast<size_t>(nic)];
  return {source.span.data + source_offset,
          source.keys[static_cast<size_t>(nic)].local_key,
          rail.remote_addr + target_offset,
          rail.remote_key,
          bytes,
          rail.peer};
}

template <typename ItemAt>
size_t cut_items(uint64_t count, const CutContext& context, std::optional<uint32_t> imm,
                 RailCursor& cursor, std::span<provider::WorkRequest> out,
                 ItemAt&& item_at) noexcept {
  size_t n = 0;
  for (; cursor.item < count;) {
    const Item item = item_at(cursor.item);
    if (item.bytes == 0 && !imm) {  // nothing to send
      ++cursor.item;
      continue;
    }
    cursor.state = RailCursor::State::kMore;
    if (n == out.size()) return n;
    const uint64_t left = item.bytes - cursor.offset;
    const bool last = left <= context.max_write_bytes;
    if (last && imm && cursor.offset != 0 && cursor.in_flight != 0) {
      cursor.state = RailCursor::State::kHeld;
      return n;
    }
    out[n++] = {.wr_id = context.wr_id,
                .local = item.local + cursor.offset,
                .local_key = item.local_key,
                .remote_addr = item.remote_addr + cursor.offset,
                .remote_key = item.remote_key,
                .bytes = last ? static_cast<uint32_t>(left) : context.max_write_bytes,
                .peer = item.peer,
                .imm = imm.value_or(0),
                .has_imm = last && imm.has_value()};
    ++cursor.in_flight;
    cursor.offset = last ? 0 : cursor.offset + context.max_write_bytes;
    cursor.item += last ? 1 : 0;
  }
  cursor.state = RailCursor::State::kExhausted;
  return n;
}

// The rows of all pages, in the order of the request: bytes from the first page's place.
class RowWalk {
 public:
  explicit RowWalk(const WritePages& write) noexcept
      : from_(write.source_pages), to_(write.target_pages), num_rows_(write.num_rows()) {}

  void seek(uint64_t at) noexcept {
    page_ = at / num_rows_;
    row_ = at % num_rows_;
    begin_page();
    local += row_ * from_.row_stride;
    remote += row_ * to_.row_stride;
  }
  void advance() noexcept {
    local += from_.row_stride;
    remote += to_.row_stride;
    if (++row_ != num_rows_) return;
    row_ = 0;
    ++page_;
    begin_page();
  }

  uint64_t local = 0, remote = 0;

 private:
  void begin_page() noexcept {
    if (page_ >= from_.indices.size()) return;
    local = static_cast<uint64_t>(from_.indices[page_]) * from_.stride;
    remote = static_cast<uint64_t>(to_.indices[page_]) * to_.stride;
  }

  const Pages from_, to_;
  const uint64_t num_rows_;
  uint64_t page_ = 0, row_ = 0;
};

struct RowRange {
  uint64_t row_bytes;
  uint64_t begin, end;
};

// Each NIC carries consecutive rows, so that what follows each other stays together.
RowRange rows_of(const WritePages& write, const CutContext& context) noexcept {
  const uint64_t num_rows = write.num_rows(), row_bytes = write.page_bytes / num_rows;
  const auto nic = static_cast<uint64_t>(context.nic);
  const auto num_nics = static_cast<uint64_t>(context.num_nics);
  const uint64_t total = row_bytes == 0 ? 0 : write.source_pages.indices.size() * num_rows;
  return {row_bytes, total * nic / num_nics, total * (nic + 1) / num_nics};
}

// cursor.item counts the NIC's rows, and one more for the immediate.
size_t cut_runs(const WritePages& write, const CutContext& context, RailCursor& cursor,
                std::span<provider::WorkRequest> out) noexcept {
  const auto [row_bytes, begin, end] = rows_of(write, context);
  const Item base = make_item(*write.source, write.source_pages.offset, *write.target,
                              write.target_pages.offset, 0, context.nic);
  size_t n = 0;
  uint64_t at = begin + cursor.item, offset = cursor.offset;
  RowWalk walk(write);
  if (at < end) walk.seek(at);
  while (at < end && n < out.size()) {
    const uint64_t local = walk.local + offset, remote = walk.remote + offset;
    uint64_t bytes = row_bytes - offset;
    walk.advance();
    ++at;
    while (at < end && bytes < context.max_write_bytes && walk.local == local + bytes &&
           walk.remote == remote + bytes) {
      bytes += row_bytes;
      walk.advance();
      ++at;
    }
    offset = 0;
    if (bytes > context.max_write_bytes) {  // its last row goes on in the next write
      offset = row_bytes - (bytes - context.max_write_bytes);
      bytes = context.max_write_bytes;
      walk.seek(--at);
    }
    out[n++] = {.wr_id = context.wr_id,
                .local = base.local + local,
                .local_key = base.local_key,
                .remote_addr = base.remote_addr + remote,
                .remote_key = base.remote_key,
                .bytes = static_cast<uint32_t>(bytes),
                .peer = base.peer};
  }
  cursor.item = at - begin;
  cursor.offset = offset;
  cursor.in_flight += n;
  cursor.state = RailCursor::State::kMore;
  if (at < end) return n;
  if (write.imm && at == end) {
    if (cursor.in_flight != 0) cursor.state = RailCursor::State::kHeld;
    if (cursor.in_flight != 0 || n == out.size()) return n;
    out[n++] = {.wr_id = context.wr_id, .peer = base.peer, .imm = *write.imm, .has_imm = true};
    ++cursor.in_flight;
    ++cursor.item;
  }
  cursor.state = RailCursor::State::kExhausted;
  return n;
}

// One overload per kind of operation: it gives the number of items, and where item i lies.
struct Cutter {
  const CutContext& context;
  RailCursor& cursor;
  std::span<provider::WorkRequest> out;

  size_t operator()(const Imm& imm) const noexcept {
    const auto item_at = [&](uint64_t) {
      return Item{nullptr, 0, 0, 0, 0, imm.peer->rails()[static_cast<size_t>(context.nic)]};
    };
    return cut_items(context.nic == 0 ? 1 : 0, context, imm.imm, cursor, out, item_at);
  }

  size_t operator()(const Write& write) const noexcept {
    const auto item_at = [&](uint64_t) {
      const Shard shard = shard_of(write.bytes, context.nic, context.num_nics);
      return make_item(*write.source, write.source_offset + shard.offset, *write.target,
                       write.target_offset + shard.offset, shard.bytes, context.nic);
    };
    const size_t n = cut_items(1, context, write.imm, cursor, out, item_at);
    if (write.flag && n > 0 && out[n - 1].has_imm) {
      const auto nic = static_cast<size_t>(context.nic);
      out[n - 1].has_flag = true;
      out[n - 1].flag_addr = write.target->rails[nic].remote_addr + write.flag->offset + 8 * nic;
      out[n - 1].flag_value = write.flag->value;
    }
    return n;
  }

  size_t operator()(const WritePages& pages) const noexcept {
    if (!pages.imm || pages.imms == WritePages::Imms::kPerNic)
      return cut_runs(pages, context, cursor, out);
    const Pages from = pages.source_pages;
    const Pages to = pages.target_pages;
    // The first byte of both sides, computed once; a page then costs two multiplications.
    const Item base = make_item(*pages.source, from.offset, *pages.target, to.offset,
                                pages.page_bytes, context.nic);
    const auto item_at = [&](uint64_t i) {
      const uint64_t page = dealt(i, context);
      Item item = base;
      item.local += static_cast<uint64_t>(from.indices[page]) * from.stride;
      item.remote_addr += static_cast<uint64_t>(to.indices[page]) * to.stride;
      return item;
    };
    return cut_items(num_dealt(from.indices.size(), context.nic, context.num_nics), context,
                     pages.imm, cursor, out, item_at);
  }

  size_t operator()(const Read& read) const noexcept { return as_reads((*this)(read.reversed())); }
  size_t operator()(const ReadPages& read) const noexcept {
    return as_reads((*this)(read.reversed()));
  }

  size_t as_reads(size_t count) const noexcept {
    for (provider::WorkRequest& work : out.first(count)) work.is_read = true;
    return count;
  }

  size_t operator()(const Scatter& scatter) const noexcept {
    if (scatter.sharding == Scatter::Sharding::kByPeer) {
      const auto item_at = [&](uint64_t i) {
        const Slice& slice = scatter.slices[dealt(i, context)];
        return make_item(*scatter.source, slice.source_offset, *slice.target, slice.target_offset,
                         slice.bytes, context.nic);
      };
      return cut_items(num_dealt(scatter.slices.size(), context.nic, context.num_nics), context,
                       scatter.imm, cursor, out, item_at);
    }
    const auto item_at = [&](uint64_t i) {
      const Slice& slice = scatter.slices[i];
      const Shard shard = shard_of(slice.bytes, context.nic, context.num_nics);
      return make_item(*scatter.source, slice.source_offset + shard.offset, *slice.target,
                       slice.target_offset + shard.offset, shard.bytes, context.nic);
    };
    return cut_items(scatter.slices.size(), context, scatter.imm, cursor, out, item_at);
  }
};

// One overload per kind of operation, as the Cutter has.
struct Remainder {
  const CutContext& context;
  const RailCursor& cursor;

  // `bytes_at` gives the size of one of `count` items.
  template <typename BytesAt>
  Amount of_items(uint64_t count, bool imm, BytesAt&& bytes_at) const noexcept {
    Amount sum;
    for (uint64_t i = cursor.item; i < count; ++i) sum += {bytes_at(i), imm ? 1u : 0u};
    sum.bytes -= cursor.offset;
    return sum;
  }
  uint64_t shard_bytes(uint64_t bytes) const noexcept {
    return shard_of(bytes, context.nic, context.num_nics).bytes;
  }

  Amount operator()(const Imm&) const noexcept {
    return {0, context.nic == 0 && cursor.item == 0 ? 1u : 0u};
  }
  Amount operator()(const Write& write) const noexcept {
    return of_items(1, write.imm.has_value(), [&](uint64_t) { return shard_bytes(write.bytes); });
  }
  Amount operator()(const WritePages& pages) const noexcept {
    const bool counts_pages = pages.imm && pages.imms == WritePages::Imms::kPerPage;
    const uint64_t num_pages = pages.source_pages.indices.size();
    if (counts_pages) {
      const uint64_t items = num_dealt(num_pages, context.nic, context.num_nics) - cursor.item;
      return {items * pages.page_bytes - cursor.offset, items};
    }
    const RowRange rows = rows_of(pages, context);
    const uint64_t count = rows.end - rows.begin;
    const uint64_t rows_left = count - std::min(count, cursor.item);
    return {rows_left * rows.row_bytes - cursor.offset,
            pages.imm && cursor.item <= count ? 1u : 0u};
  }
  Amount operator()(const Read& read) const noexcept { return (*this)(read.reversed()); }
  Amount operator()(const ReadPages& read) const noexcept { return (*this)(read.reversed()); }
  Amount operator()(const Scatter& scatter) const noexcept {
    const bool by_peer = scatter.sharding == Scatter::Sharding::kByPeer;
    const auto bytes_at = [&](uint64_t i) {
      return by_peer ? scatter.slices[dealt(i, context)].bytes
                     : shard_bytes(scatter.slices[i].bytes);
    };
    const uint64_t num_slices = scatter.slices.size();
    return of_items(by_peer ? num_dealt(num_slices, context.nic, context.num_nics) : num_slices,
                    scatter.imm.has_value(), bytes_at);
  }
};

}  // namespace

Shard shard_of(uint64_t bytes, int nic, int num_nics) noexcept {
  const auto count = static_cast<uint64_t>(num_nics);
  const uint64_t even = bytes / count + (bytes % count != 0 ? 1 : 0);
  const uint64_t stride = (even + kShardAlignment - 1) / kShardAlignment * kShardAlignment;
  const uint64_t begin = std::min(static_cast<uint64_t>(nic) * stride, bytes);
  return {begin, std::min(stride, bytes - begin)};
}

size_t cut(const Operation& operation, const CutContext& context, RailCursor& cursor,
           std::span<provider::WorkRequest> out) noexcept {
  return std::visit(Cutter{context, cursor, out}, operation);
}

Amount left(const Operation& operation, const CutContext& context,
            const RailCursor& cursor) noexcept {
  return std::visit(Remainder{context, cursor}, operation);
}

uint64_t num_merged(const Operation& operation, uint64_t num_writes) noexcept {
  const auto merged = [&](const WritePages& pages) -> uint64_t {
    if (pages.imm && pages.imms == WritePages::Imms::kPerPage) return 0;
    const uint64_t num_rows = pages.source_pages.indices.size() * pages.num_rows();
    return num_rows - std::min(num_rows, num_writes);
  };
  if (const auto* pages = std::get_if<WritePages>(&operation)) return merged(*pages);
  if (const auto* pages = std::get_if<ReadPages>(&operation)) return merged(pages->reversed());
  return 0;
}

}  // namespace moe_p2p::engine
