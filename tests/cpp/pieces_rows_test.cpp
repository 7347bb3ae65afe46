// How pages of several rows are cut, and what is merged: pure functions, no engine.
#include <array>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "doctest/doctest.h"
#include "engine/peer.h"
#include "engine/pieces.h"

namespace moe_p2p::engine {
namespace {

constexpr uint64_t kFrom = 0x1000'0000'0000, kTo = 0x2000'0000'0000;

struct Memory {
  explicit Memory(int num_nics) {
    here.span = {reinterpret_cast<std::byte*>(kFrom), 1ull << 40};
    there.bytes = 1ull << 40;
    for (int i = 0; i < num_nics; ++i) {
      here.keys.push_back({10, 0, 0});
      there.rails.push_back({static_cast<provider::PeerId>(i), kTo, 20});
    }
  }
  MemoryHandle here;
  RemoteRegion there;
};

struct Cut {
  std::vector<provider::WorkRequest> works;
  std::vector<size_t> per_nic;
};

// `at_a_time` pieces for each call; held ones after pretending that the earlier ones completed.
Cut cut_all(const Operation& operation, int num_nics, uint32_t max_bytes, size_t at_a_time) {
  Cut result;
  for (int nic = 0; nic < num_nics; ++nic) {
    RailCursor cursor;
    const size_t before = result.works.size();
    do {
      std::vector<provider::WorkRequest> out(at_a_time);
      const size_t count = cut(operation, {nic, num_nics, max_bytes, 1}, cursor, out);
      result.works.insert(result.works.end(), out.begin(),
                          out.begin() + static_cast<std::ptrdiff_t>(count));
      if (cursor.state == RailCursor::State::kHeld) cursor.in_flight = 0;
    } while (cursor.state != RailCursor::State::kExhausted);
    result.per_nic.push_back(result.works.size() - before);
  }
  return result;
}

// Where every byte goes, by the definition: byte by byte.
std::map<uint64_t, uint64_t> bytes_of(const WritePages& write) {
  std::map<uint64_t, uint64_t> bytes;
  const uint64_t row_bytes = write.row_bytes == 0 ? write.page_bytes : write.row_bytes;
  const auto place = [](const Pages& pages, size_t i, uint64_t row) {
    return pages.offset + static_cast<uint64_t>(pages.indices[i]) * pages.stride +
           row * pages.row_stride;
  };
  for (size_t i = 0; i < write.source_pages.indices.size(); ++i)
    for (uint64_t row = 0; row * row_bytes < write.page_bytes; ++row)
      for (uint64_t b = 0; b < row_bytes; ++b)
        bytes[kTo + place(write.target_pages, i, row) + b] =
            kFrom + place(write.source_pages, i, row) + b;
  return bytes;
}

std::map<uint64_t, uint64_t> bytes_of(const Cut& cut) {
  std::map<uint64_t, uint64_t> bytes;
  for (const auto& work : cut.works)
    for (uint64_t b = 0; b < work.bytes; ++b) {
      const bool is_new =
          bytes.emplace(work.remote_addr + b, reinterpret_cast<uint64_t>(work.local) + b).second;
      CHECK(is_new);  // no byte twice
    }
  return bytes;
}

TEST_CASE("pieces: every byte of every row goes to its place once, whatever is merged or cut") {
  std::mt19937_64 random(7);
  for (int turn = 0; turn < 400; ++turn) {
    CAPTURE(turn);
    const int num_nics = 1 + static_cast<int>(random() % 4);
    const Memory memory(num_nics);
    const uint64_t row_bytes = 1 + random() % 12, num_rows = 1 + random() % 5;
    const auto row_stride = [&] { return row_bytes + (random() % 2 ? 0 : random() % 4); };
    WritePages write;
    write.source = &memory.here;
    write.target = &memory.there;
    write.page_bytes = row_bytes * num_rows;
    write.row_bytes = num_rows == 1 && random() % 2 ? 0 : row_bytes;
    std::vector<int64_t> from(random() % 12);
    std::iota(from.begin(), from.end(), random() % 3);
    std::vector<int64_t> to = from;
    if (random() % 2) std::shuffle(from.begin(), from.end(), random);
    if (random() % 2) std::shuffle(to.begin(), to.end(), random);
    for (auto [pages, indices] :
         {std::pair{&write.source_pages, &from}, std::pair{&write.target_pages, &to}}) {
      pages->indices = *indices;
      pages->row_stride = row_stride();
      pages->stride = pages->row_stride * num_rows + random() % 2 * 3;
      pages->offset = random() % 5;
    }
    const auto max_bytes = static_cast<uint32_t>(1 + random() % 40);
    const Cut cut = cut_all(write, num_nics, max_bytes, 1 + random() % 4);
    CHECK(bytes_of(cut) == bytes_of(write));
    for (const auto& work : cut.works) {
      CHECK(work.bytes <= max_bytes);
      CHECK(work.bytes > 0);
    }
  }
}

TEST_CASE("pieces: what follows each other on both sides is one write") {
  const Memory memory(2);
  std::vector<int64_t> run(64), reversed(64);
  std::iota(run.begin(), run.end(), 5);
  std::copy(run.rbegin(), run.rend(), reversed.begin());
  const Pages whole{.indices = run, .stride = 4096, .offset = 0, .row_stride = 64};
  const Pages backward{.indices = reversed, .stride = 4096, .offset = 0, .row_stride = 64};
  const auto num = [&](const Pages& from, const Pages& to, uint64_t row_bytes, uint32_t max_bytes) {
    const WritePages write{&memory.here, &memory.there, 4096, from, to, std::nullopt, row_bytes};
    return cut_all(write, 2, max_bytes, 16).works.size();
  };
  CHECK(num(whole, whole, 0, 1 << 30) == 2);         // a run for each NIC
  CHECK(num(whole, whole, 64, 1 << 30) == 2);        // of rows without gaps too
  CHECK(num(whole, whole, 0, 8192) == 32);           // as large as the NIC takes
  CHECK(num(whole, whole, 64, 3 * 4096) == 2 * 11);  // 32 pages by three
  CHECK(num(whole, backward, 0, 1 << 30) == 64);
  CHECK(num(backward, backward, 64, 1 << 30) == 64);
  const Pages apart{.indices = run, .stride = 8192, .offset = 0, .row_stride = 128};
  CHECK(num(whole, apart, 64, 1 << 30) == 64 * 64);  // on one side only
}

TEST_CASE("pieces: an immediate per NIC comes last and once, also from a NIC without rows") {
  const Memory memory(4);
  const std::vector<int64_t> pages = {3, 1};
  const Pages place{.indices = pages, .stride = 100, .offset = 0, .row_stride = 0};
  const WritePages write{
      &memory.here, &memory.there, 100, place, place, 9, 0, WritePages::Imms::kPerNic};
  const Cut cut = cut_all(write, 4, 60, 8);
  CHECK(cut.per_nic == std::vector<size_t>{1, 3, 1, 3});
  size_t num_imms = 0;
  for (const auto& work : cut.works) {
    num_imms += work.has_imm;
    CHECK(work.has_imm == (work.bytes == 0));
    if (work.has_imm) CHECK(work.imm == 9);
  }
  CHECK(num_imms == 4);
  RailCursor cursor;
  std::array<provider::WorkRequest, 8> out;
  CHECK(engine::cut(write, {1, 4, 60, 1}, cursor, out) == 2);
  CHECK(cursor.state == RailCursor::State::kHeld);  // until both have completed
  cursor.in_flight = 1;
  CHECK(engine::cut(write, {1, 4, 60, 1}, cursor, out) == 0);
  cursor.in_flight = 0;
  CHECK(engine::cut(write, {1, 4, 60, 1}, cursor, out) == 1);
  CHECK(cursor.state == RailCursor::State::kExhausted);
}

}  // namespace
}  // namespace moe_p2p::engine
