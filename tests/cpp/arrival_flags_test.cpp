// Which way arrivals are seen, of ranks that can different things and are not all there.
#include "moe/node/arrival_flags.h"

#include <map>
#include <string>

#include "doctest/doctest.h"

namespace moe_p2p::moe {
namespace {

const FlagOffer kNothing{"no order", "no library", 1}, kMaps{"no order", "", 1}, kWrites{"", "", 1};

AllToAllOptions of_rank(int rank, ArrivalFlags way = ArrivalFlags::kAuto) {
  AllToAllOptions options;
  options.rank = rank, options.arrival_flags = way;
  return options;
}

TEST_CASE("arrival flags: each rank goes by its own offer, whoever is absent") {
  const std::map<int, FlagOffer> ranks{{1, kNothing}, {2, kMaps}, {3, kNothing}};
  CHECK(choose_flags(of_rank(1), ranks) == ArrivalFlags::kRelay);
  CHECK(choose_flags(of_rank(2), ranks) == ArrivalFlags::kGdrCopy);
  CHECK(choose_flags(of_rank(3), ranks) == ArrivalFlags::kRelay);
}

TEST_CASE("arrival flags: NICs store them where those of all ranks that are there do") {
  std::map<int, FlagOffer> ranks{{1, kWrites}, {3, kWrites}};
  CHECK(choose_flags(of_rank(3), ranks) == ArrivalFlags::kWrite);
  ranks[3].num_nics = 2;
  CHECK(choose_flags(of_rank(3), ranks) == ArrivalFlags::kGdrCopy);
  ranks[3].num_nics = 1, ranks[2] = kMaps;
  CHECK(choose_flags(of_rank(1), ranks) == ArrivalFlags::kGdrCopy);
}

TEST_CASE("arrival flags: a refusal names the rank that cannot") {
  const std::map<int, FlagOffer> ranks{{1, kWrites}, {3, kNothing}};
  const auto said = [&](ArrivalFlags way) {
    try {
      choose_flags(of_rank(1, way), ranks);
    } catch (const base::Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(said(ArrivalFlags::kWrite).find("rank 3: no order") != std::string::npos);
  CHECK(said(ArrivalFlags::kGdrCopy).find("rank 3: no library") != std::string::npos);
}

}  // namespace
}  // namespace moe_p2p::moe
