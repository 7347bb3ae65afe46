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
    return cut_items(1, context, write.imm, cursor, out, item_at);
  }

  size_t operator()(const WritePages& pages) const noexcept {
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

}  // namespace moe_p2p::engine
