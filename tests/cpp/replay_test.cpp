// Ranks of a replay, fed with what two exchanges recorded (csrc/moe/replay).
#include "moe/replay/rank.h"

#include "base/mutation.h"
#include "exchange_pair.h"

namespace moe_p2p::moe::exchange_test {
namespace {

using base::Event;

// Who waits for what, a line each.
std::string waits(replay::Rank& rank) {
  std::string lines;
  for (const std::string& line : rank.waits()) lines += line + "\n";
  return lines;
}

// The shape of Pair.
replay::Rank::Facts facts_of(int rank, uint64_t first_step = 0) {
  replay::Rank::Facts facts;
  facts.options.plan = {.world_size = 2,
                        .ranks_per_node = 1,
                        .num_experts = 2,
                        .hidden_dim = 8,
                        .topk = 1,
                        .max_tokens = 4,
                        .chunk_tokens = 4,
                        .expert_rank = {}};
  facts.options.rank = rank;
  facts.options.communicator = kCommunicator;
  facts.nics = {2, 2};
  facts.first_step = first_step;
  return facts;
}

struct Replayed {
  explicit Replayed(const replay::Rank::Facts& facts) : rank(facts) {
    rank.connect({rank.neighbour()});
  }
  std::string feed(const base::Recording& recording) {
    std::string differs;
    for (size_t i = 0; i < recording.size() && differs.empty(); ++i)
      differs = rank.feed(recording[i]);
    return differs;
  }
  replay::Rank rank;
};

// Both ranks dispatch steps 0 to `last`, and combine the earlier ones; what rank 0's second NIC
// sends of the last dispatch is withheld if `held`.
std::unique_ptr<base::Recording> recording_of(int rank, uint64_t last, bool held) {
  Pair pair(false);
  for (int r = 0; r < 2; ++r) CHECK(pair.engine(r).record(1000) == nullptr);
  for (uint64_t step = 0; step <= last; ++step) {
    if (step == last && held) pair.network.nic(1).hold(true);
    for (int r = 0; r < 2; ++r) pair.ring(r, Phase::kDispatch, step);
    pair.turn(100);
    if (step == last) break;
    for (int r = 0; r < 2; ++r) pair.ring(r, Phase::kCombine, step);
    pair.turn(100);
  }
  if (held)
    CHECK(pair.exchange(1).immediates(Phase::kDispatch, static_cast<int>(last % 2), 0) == "1 of 2");
  auto recording = pair.engine(rank).record(0);
  pair.network.nic(1).hold(false);  // writes end before their exchange does
  pair.turn(100);
  return recording;
}

TEST_CASE("replay: a withheld immediate leaves the wait that it left") {
  const auto recording = recording_of(1, 5, true);
  Replayed replayed(facts_of(1));
  CHECK(replayed.feed(*recording) == "");
  // Flags of the own node are not known, but the other node's are.
  CHECK(waits(replayed.rank) ==
        "rank 1: dispatch of step 5 waits for rank 0 (node 0, 1 of 2 immediates came)\n");
  CHECK(replayed.rank.num_untaken() == 0);
}

TEST_CASE("replay: without a fault nobody waits, and the exchange does what was recorded") {
  for (int rank = 0; rank < 2; ++rank) {
    Replayed replayed(facts_of(rank));
    CHECK(replayed.feed(*recording_of(rank, 6, false)) == "");
    CHECK(replayed.rank.waits().empty());
  }
}

TEST_CASE("replay: it is the exchange of this version that runs, faults included") {
  const auto recording = recording_of(1, 5, true);
  base::active_mutation = base::Mutation::kPublishBeforePayload;
  Replayed replayed(facts_of(1));
  replayed.feed(*recording);
  CHECK(replayed.rank.waits().empty());  // it takes one immediate for both
  base::active_mutation = base::Mutation::kNone;
}

TEST_CASE("replay: what the exchange does otherwise is named") {
  const auto recording = recording_of(0, 2, false);
  const auto without = [&](Event::Kind kind) {
    Replayed replayed(facts_of(0));
    std::string differs;
    bool left_out = false;
    for (size_t i = 0; i < recording->size() && differs.empty(); ++i) {
      if (!left_out && (*recording)[i].kind == kind)
        left_out = true;
      else
        differs = replayed.rank.feed((*recording)[i]);
    }
    return differs;
  };
  CHECK(without(Event::Kind::kDoorbell).find("was recorded to post 128 bytes") == 0);
  CHECK(without(Event::Kind::kImmediate).find("was recorded to publish dispatch of step 0") == 0);
}

TEST_CASE("replay: a write that fails ends the waits of its rank with its text") {
  Pair pair(false);
  pair.engine(0).record(1000);
  pair.fail_next(0);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(100);
  Replayed replayed(facts_of(0));
  CHECK(replayed.feed(*pair.engine(0).record(0)) == "");
  CHECK(waits(replayed.rank) ==
        "moe_p2p [peer dead] rank 0: the write of dispatch of step 0 to rank 1 (node 1) failed: "
        "peer dead, "
        "detail 7; dispatch of step 0 waits for rank 1 (node 1, 0 of 2 immediates came)\n");
}

TEST_CASE("replay: a NIC that takes nothing is seen as such") {
  Pair pair(false);
  pair.engine(0).record(1000);
  for (const size_t nic : {0, 1}) pair.network.nic(nic).refuse(true);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(10);
  Replayed replayed(facts_of(0));
  CHECK(replayed.feed(*pair.engine(0).record(0)) == "");
  CHECK(replayed.rank.num_untaken() == 2);
  for (const size_t nic : {0, 1}) pair.network.nic(nic).refuse(false);
  pair.turn(100);
}

TEST_CASE("replay: it begins with any step, in any place") {
  for (const uint64_t first : {1, 2, 3, 100, 101}) {
    Replayed replayed(facts_of(1, first));
    CHECK(replayed.rank.waits().empty());
    Pair pair(false);
    for (int r = 0; r < 2; ++r) {
      pair.exchange(r).begin_at(first);
      CHECK(pair.engine(r).record(1000) == nullptr);
    }
    pair.turn(10);
    CHECK(pair.num_posted(0) == 0);
    for (uint64_t step = first; step < first + 4; ++step) {
      for (const Phase phase : {Phase::kDispatch, Phase::kCombine}) {
        for (int r = 0; r < 2; ++r) pair.ring(r, phase, step);
        pair.turn(100);
        CHECK(pair.flag(1, phase, step) == abi::come(step));
      }
    }
    CHECK(replayed.feed(*pair.engine(1).record(0)) == "");
    CHECK(replayed.rank.waits().empty());
  }
}

TEST_CASE("replay: facts and events that do not fit are refused") {
  auto facts = facts_of(0);
  facts.nics = {2};
  CHECK_THROWS_AS(replay::Rank{facts}, base::Error);
  facts.nics = {2, 9};
  CHECK_THROWS_AS(replay::Rank{facts}, base::Error);
  facts = facts_of(0);
  facts.flags = {1, 2};
  CHECK_THROWS_AS(replay::Rank{facts}, base::Error);
  facts = facts_of(0);
  facts.options.plan.ranks_per_node = 2;
  CHECK_THROWS_AS(replay::Rank{facts}, base::Error);
  Replayed replayed(facts_of(0));
  const auto rank = [](uint32_t peer, uint8_t slot, uint16_t detail = 0) {
    return Event{.kind = Event::Kind::kDoorbell, .nic = slot, .detail = detail, .peer = peer};
  };
  CHECK_THROWS_AS(replayed.rank.feed(rank(0, 0)), base::Error);
  CHECK_THROWS_AS(replayed.rank.feed(rank(7, 0)), base::Error);
  CHECK_THROWS_AS(replayed.rank.feed(rank(1, 2)), base::Error);
  CHECK_THROWS_AS(replayed.rank.feed(rank(1, 0, 3 << 9)), base::Error);
  CHECK_THROWS_AS(replayed.rank.feed({.kind = Event::Kind::kPosted, .nic = 2}), base::Error);
  CHECK_THROWS_AS(replayed.rank.feed({.kind = Event::Kind::kFarewell, .peer = 0}), base::Error);
}

}  // namespace
}  // namespace moe_p2p::moe::exchange_test
