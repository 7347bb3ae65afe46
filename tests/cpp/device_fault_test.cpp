// The error text of what a kernel reported.
#include "moe/device/fault.h"

#include <doctest/doctest.h>

#include "device_rank.h"

namespace moe_p2p::test {
namespace {

// What rank 1 (nodes of 2, two steps in flight) waited for from `source` in step 6.
abi::Fault late(abi::Phase phase, int source, uint64_t expected, uint64_t got) {
  abi::Fault fault{};
  fault.raised = abi::kTimedOut;
  fault.phase = static_cast<int32_t>(phase);
  fault.source = source;
  fault.step = 6;
  fault.expected = expected;
  fault.got = got;
  return fault;
}
std::string word_of(const Plan& plan, const abi::Fault& fault) {
  const base::Error error = error_of(fault, plan, 1, "", "");
  CHECK(error.code() == Code::kTimeout);
  const std::string text = error.what(), head = "waiting for rank 0: ";
  const auto begin = text.find("waiting for rank ") + head.size();
  return text.substr(begin, text.find(" (expected word") - begin);
}

TEST_CASE("device calls: a timeout names the word that was waited for") {
  using abi::Phase;
  const Plan plan = plan_of_rank();
  const uint64_t word = 7, parts = 6 * abi::kMaxParts;  // of step 6
  CHECK(word_of(plan, late(Phase::kDispatch, 3, parts + 3, parts + 1)) ==
        "arrival of part 2, 1 parts arrived");
  CHECK(word_of(plan, late(Phase::kCombine, 2, abi::come(6), abi::come(4))) ==
        "arrival of the last part, 0 parts arrived");
  CHECK(word_of(plan, late(Phase::kDispatch, 0, word, word - 2)) == "header or slot flag");
  CHECK(word_of(plan, late(Phase::kDispatch, 0, word, word - 4)) == "slot flag");
  CHECK(word_of(plan, late(Phase::kDispatch, 0, word, 0)) == "header or slot");
  CHECK(word_of(plan, late(Phase::kCombine, 0, word, word - 4)) == "row flag");
  CHECK(word_of(plan, late(Phase::kCombine, 0, word, 0)) == "row");
  CHECK(word_of(plan, late(Phase::kWeights, 0, word, word - 2)) == "header of its weights");
  CHECK(word_of(plan, late(Phase::kDispatch, 1, 2 * word, 0)) ==
        "word of its own blocks, header or slot");
}

TEST_CASE("device calls: a timeout says how much came, and that a rank that is gone is dead") {
  const Plan plan = plan_of_rank();
  const base::Error error =
      error_of(late(abi::Phase::kDispatch, 3, 25, 0), plan, 1, "rank 1 has closed its communicator",
               ", 1 of 2 immediates came");
  CHECK(error.code() == Code::kPeerDead);
  CHECK(std::string(error.what())
            .find("got 0), 1 of 2 immediates came; rank 1 has closed its communicator") !=
        std::string::npos);
}

}  // namespace
}  // namespace moe_p2p::test
