#include "engine_traffic.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace moe_p2p::test {

using namespace engine;

void check_every_kind_of_request(TransferEngine& from, TransferEngine& to) {
  Buffer source(from, pattern(50'000)), target(to, std::vector<std::byte>(50'000));
  const auto* region = from.resolve(to.descriptor(target.handle));
  std::vector<int64_t> pages(40);
  std::iota(pages.begin(), pages.end(), 0);
  const std::vector<Slice> slices = {{40'000, region, 40'000, 0}, {40'000, region, 40'000, 9999}};
  Request write(Write{source.handle, 0, region, 0, 20'001, 1});
  Request page_write(
      WritePages{source.handle, region, 450, {pages, 500, 20'001}, {pages, 500, 20'001}, 2});
  Request scatter(Scatter{source.handle, slices, Scatter::Sharding::kByBytes, 3});
  Request imm(Imm{region->owner, 4});
  const std::array<uint64_t, 4> immediates = {2, 40, 4, 1};
  for (uint64_t round = 1; round <= 3; ++round) {
    Request* requests[] = {&write, &page_write, &scatter, &imm};
    for (Request* request : requests) from.submit(*request);
    for (Request* request : requests) {
      REQUIRE(request->wait(soon()));
      CHECK(request->status().ok());
    }
    for (uint32_t i = 0; i < immediates.size(); ++i)
      REQUIRE(to.imm_table().wait(i + 1, round * immediates[i], soon()));
    const auto same = [&](size_t begin, size_t end) {
      return std::equal(source.data.begin() + static_cast<std::ptrdiff_t>(begin),
                        source.data.begin() + static_cast<std::ptrdiff_t>(end),
                        target.data.begin() + static_cast<std::ptrdiff_t>(begin));
    };
    CHECK(same(0, 20'001));
    for (size_t page = 0; page < 40; ++page) {
      CHECK(same(20'001 + page * 500, 20'001 + page * 500 + 450));
      CHECK(target.data[20'001 + page * 500 + 450] == std::byte{0});
    }
    CHECK(same(40'001, 49'999));
    CHECK(target.data[49'999] == std::byte{0});
    std::ranges::fill(target.data, std::byte{0});
  }
  CHECK(to.imm_table().discarded() == 0);
}

}  // namespace moe_p2p::test
