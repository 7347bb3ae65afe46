// How operations are cut into work requests: pure functions, no engine.
#include "engine/pieces.h"

#include <array>
#include <numeric>
#include <vector>

#include "doctest/doctest.h"
#include "engine/peer.h"

namespace moe_p2p::engine {
namespace {

constexpr uint64_t kSourceAddress = 0x1000'0000'0000;
constexpr uint64_t kTargetAddress = 0x2000'0000'0000;

// Imaginary memory of `bytes` on both sides; NIC i has source key 10 + i, target key 20 + i.
struct Ends {
  explicit Ends(int num_nics, uint64_t bytes) {
    source.span = {reinterpret_cast<std::byte*>(kSourceAddress), bytes};
    target.bytes = bytes;
    for (int i = 0; i < num_nics; ++i) {
      const auto nic = static_cast<uint64_t>(i);
      source.keys.push_back({10 + nic, 0, 0});
      target.rails.push_back({static_cast<provider::PeerId>(i), kTargetAddress, 20 + nic});
    }
  }
  MemoryHandle source;
  RemoteRegion target;
};

struct Piece {
  provider::WorkRequest work;
  int nic;
};

// All pieces of an operation; held ones after pretending that the earlier ones completed.
std::vector<Piece> cut_all(const Operation& operation, int num_nics, uint32_t max_write_bytes) {
  std::vector<Piece> pieces;
  for (int nic = 0; nic < num_nics; ++nic) {
    RailCursor cursor;
    do {
      std::array<provider::WorkRequest, 3> out;
      const size_t count = cut(operation, {nic, num_nics, max_write_bytes, 1}, cursor, out);
      for (size_t i = 0; i < count; ++i) pieces.push_back({out[i], nic});
      if (cursor.state == RailCursor::State::kHeld) cursor.in_flight = 0;
    } while (cursor.state != RailCursor::State::kExhausted);
  }
  return pieces;
}

TEST_CASE("pieces: shards cover every byte of every size once") {
  for (int num_nics = 1; num_nics <= kMaxNics; ++num_nics) {
    for (uint64_t bytes = 0; bytes <= 3000; ++bytes) {
      uint64_t next = 0;
      for (int nic = 0; nic < num_nics; ++nic) {
        const Shard shard = shard_of(bytes, nic, num_nics);
        REQUIRE(shard.offset == next);
        next += shard.bytes;
      }
      REQUIRE(next == bytes);
    }
  }
}

TEST_CASE("pieces: shards of a large write differ by less than 128 bytes per NIC") {
  const uint64_t bytes = (uint64_t{5} << 32) + 12345;
  for (int num_nics : {2, 3, 4, 8}) {
    const uint64_t even = bytes / static_cast<uint64_t>(num_nics);
    for (int nic = 0; nic + 1 < num_nics; ++nic) {
      const Shard shard = shard_of(bytes, nic, num_nics);
      CHECK(shard.offset % 128 == 0);
      CHECK(shard.bytes >= even);
      CHECK(shard.bytes <= even + 128);
    }
  }
}

TEST_CASE("pieces: offsets and sizes above 4 GiB stay exact") {
  const uint64_t bytes = (uint64_t{9} << 30) + 77;
  const uint64_t offset = (uint64_t{6} << 32) + 5;
  for (int num_nics : {1, 2, 4}) {
    const Ends ends(num_nics, uint64_t{1} << 40);
    const auto pieces = cut_all(Write{&ends.source, offset, &ends.target, offset + 3, bytes, 7},
                                num_nics, 1u << 30);
    uint64_t next = 0;
    size_t immediates = 0;
    for (const auto& [work, nic] : pieces) {
      CHECK(reinterpret_cast<uint64_t>(work.local) == kSourceAddress + offset + next);
      CHECK(work.remote_addr == kTargetAddress + offset + 3 + next);
      next += work.bytes;
      immediates += work.has_imm ? 1 : 0;
    }
    CHECK(next == bytes);
    CHECK(immediates == static_cast<size_t>(num_nics));
  }
}

TEST_CASE("pieces: an immediate waits until the earlier pieces of its shard have completed") {
  const Ends ends(1, 1000);
  const Operation write = Write{&ends.source, 0, &ends.target, 0, 1000, 7};
  RailCursor cursor;
  std::array<provider::WorkRequest, 16> out;
  const CutContext context{0, 1, 300, 1};
  REQUIRE(cut(write, context, cursor, out) == 3);
  CHECK(cursor.state == RailCursor::State::kHeld);
  for (size_t i = 0; i < 3; ++i) CHECK_FALSE(out[i].has_imm);
  cursor.in_flight = 1;  // two completed
  CHECK(cut(write, context, cursor, out) == 0);
  CHECK(cursor.state == RailCursor::State::kHeld);
  cursor.in_flight = 0;
  REQUIRE(cut(write, context, cursor, out) == 1);
  CHECK(cursor.state == RailCursor::State::kExhausted);
  CHECK(out[0].has_imm);
  CHECK(out[0].bytes == 100);
}

TEST_CASE("pieces: without an immediate nothing waits and nothing empty is sent") {
  const Ends ends(4, 1000);
  CHECK(cut_all(Write{&ends.source, 0, &ends.target, 0, 0, {}}, 4, 300).empty());
  CHECK(cut_all(Write{&ends.source, 0, &ends.target, 0, 1, {}}, 4, 300).size() == 1);
  RailCursor cursor;
  std::array<provider::WorkRequest, 16> out;
  const Ends single(1, 1000);
  CHECK(cut(Write{&single.source, 0, &single.target, 0, 1000, {}}, {0, 1, 300, 1}, cursor, out) ==
        4);
  CHECK(cursor.state == RailCursor::State::kExhausted);
}

TEST_CASE("pieces: an empty write with an immediate is sent empty on every NIC") {
  const Ends ends(4, 1000);
  const auto pieces = cut_all(Write{&ends.source, 0, &ends.target, 0, 0, 9}, 4, 300);
  REQUIRE(pieces.size() == 4);
  for (int nic = 0; nic < 4; ++nic) {
    const auto& work = pieces[static_cast<size_t>(nic)].work;
    CHECK(work.bytes == 0);
    CHECK(work.has_imm);
    CHECK(work.imm == 9);
    CHECK(work.peer == static_cast<provider::PeerId>(nic));
  }
}

TEST_CASE("pieces: each piece carries the keys of its own NIC") {
  const int num_nics = 4;
  const Ends ends(num_nics, 1 << 20);
  std::vector<int64_t> indices(37);
  std::iota(indices.begin(), indices.end(), 0);
  const std::vector<Slice> slices(11, Slice{64, &ends.target, 128, 5000});
  const std::vector<Operation> operations = {
      Write{&ends.source, 0, &ends.target, 0, 100'000, 1},
      WritePages{&ends.source, &ends.target, 1000, {indices, 1000, 0}, {indices, 2000, 0}, 1},
      Scatter{&ends.source, slices, Scatter::Sharding::kByPeer, 1},
      Scatter{&ends.source, slices, Scatter::Sharding::kByBytes, 1}};
  for (const auto& operation : operations) {
    for (const auto& [work, nic] : cut_all(operation, num_nics, 4096)) {
      CHECK(work.local_key == 10 + static_cast<uint64_t>(nic));
      CHECK(work.remote_key == 20 + static_cast<uint64_t>(nic));
      CHECK(work.peer == static_cast<provider::PeerId>(nic));
      CHECK(work.bytes <= 4096);
    }
  }
}

TEST_CASE("pieces: pages lie at offset + index * stride on both sides, above 4 GiB too") {
  const uint64_t stride = uint64_t{3} << 31;
  const Ends ends(2, uint64_t{1} << 44);
  const std::vector<int64_t> from = {5, 0, 7};
  const std::vector<int64_t> to = {2, 9, 4};
  const auto pieces = cut_all(
      WritePages{&ends.source, &ends.target, 100, {from, stride, 11}, {to, stride + 1, 13}, 3}, 2,
      1u << 30);
  REQUIRE(pieces.size() == 3);
  const std::array<size_t, 3> page_of_piece = {0, 2, 1};  // NIC 0: pages 0 and 2, NIC 1: page 1
  for (size_t i = 0; i < 3; ++i) {
    const auto page = page_of_piece[i];
    const auto& work = pieces[i].work;
    CHECK(reinterpret_cast<uint64_t>(work.local) ==
          kSourceAddress + 11 + static_cast<uint64_t>(from[page]) * stride);
    CHECK(work.remote_addr == kTargetAddress + 13 + static_cast<uint64_t>(to[page]) * (stride + 1));
    CHECK(work.has_imm);
  }
}

TEST_CASE("pieces: a scatter sends one immediate per slice, or one per slice and NIC") {
  const int num_nics = 3;
  const Ends ends(num_nics, 1 << 20);
  std::vector<Slice> slices;
  for (uint64_t i = 0; i < 8; ++i) slices.push_back({i * 1000, &ends.target, i * 2000, i * 100});
  const auto immediates = [&](Scatter::Sharding sharding, uint32_t max_write_bytes) {
    uint64_t bytes = 0;
    size_t count = 0;
    for (const auto& [work, nic] :
         cut_all(Scatter{&ends.source, slices, sharding, 5}, num_nics, max_write_bytes)) {
      bytes += work.bytes;
      count += work.has_imm ? 1 : 0;
    }
    CHECK(bytes == 2800);
    return count;
  };
  for (const uint32_t limit : {1u << 20, 150u, 1u}) {
    CHECK(immediates(Scatter::Sharding::kByPeer, limit) == 8);
    CHECK(immediates(Scatter::Sharding::kByBytes, limit) == 24);
  }
}

}  // namespace
}  // namespace moe_p2p::engine
