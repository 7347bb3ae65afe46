// What is recorded of a polling thread, and what the recorder costs a thread that records nothing.
#include "base/recorder.h"

#include <map>

#include "doctest/doctest.h"
#include "exchange_pair.h"

namespace moe_p2p::moe::exchange_test {
namespace {

using Kind = base::Event::Kind;

std::map<Kind, size_t> counted(const base::Recording& recording) {
  std::map<Kind, size_t> kinds;
  for (size_t i = 0; i < recording.size(); ++i) ++kinds[recording[i].kind];
  return kinds;
}

TEST_CASE("recorder: a turn without events does not look at it, others once for each event") {
  Pair pair(false);
  pair.turn();
  base::num_looks = 0;
  pair.turn(1000);
  CHECK(base::num_looks == 0);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(100);
  // A doorbell, a batch for each of two NICs; at most two completions, two immediates, an arrival.
  CHECK(base::num_looks >= 6);
  CHECK(base::num_looks <= 8);
}

TEST_CASE("recorder: a step's events, with the words that it was rung with") {
  Pair pair(false);
  for (int rank = 0; rank < 2; ++rank) CHECK(pair.engine(rank).record(100) == nullptr);
  pair.ring(0, Phase::kCombine, 3, 0, 2);
  pair.turn(100);
  pair.ring(0, Phase::kCombine, 3, 1, 2);
  pair.turn(100);
  const auto sent = pair.engine(0).record(0), received = pair.engine(1).record(0);
  auto kinds = counted(*sent);
  CHECK(kinds[Kind::kDoorbell] == 2);
  CHECK(kinds[Kind::kPosted] == 4);
  uint64_t completed = 0;
  for (size_t i = 0; i < sent->size(); ++i) {
    const base::Event& event = (*sent)[i];
    if (event.kind == Kind::kCompleted) completed += event.b;
    if (event.kind != Kind::kDoorbell) continue;
    const auto part = static_cast<uint32_t>(event.detail >> 11);
    CHECK(event.detail == base::Event::detail_of(kCommunicator, 1, part));
    CHECK(event.nic == 1);  // step 3 of two slots
    CHECK(event.peer == 1);
    CHECK(event.a == 3);
    const abi::BellWords& words = pair.bell(0, Phase::kCombine, 3).part[part];
    CHECK(event.b == words.size);
    CHECK(event.c == words.place);
  }
  CHECK(completed == 4);
  kinds = counted(*received);
  CHECK(kinds[Kind::kImmediate] == 4);
  CHECK(kinds[Kind::kPublished] == 2);
  const base::Event& last = (*received)[received->size() - 1];
  CHECK(last.kind == Kind::kPublished);
  CHECK(last.b == pair.flag(1, Phase::kCombine, 3));
  CHECK(last.c == 1);
  CHECK(pair.engine(0).record(0) == nullptr);
}

TEST_CASE("recorder: a failed post, and a NIC that takes nothing") {
  Pair pair(false);
  pair.engine(0).record(100);
  pair.fail_next(0);
  for (const size_t nic : {0, 1}) pair.network.nic(nic).refuse(true);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(1);
  for (const size_t nic : {0, 1}) pair.network.nic(nic).refuse(false);
  pair.turn(100);
  const auto recording = pair.engine(0).record(0);
  size_t failed = 0;
  for (size_t i = 0; i < recording->size(); ++i) {
    const base::Event& event = (*recording)[i];
    if (event.kind == Kind::kRefused) CHECK((event.a == 1 && event.b == 0));
    if (event.kind != Kind::kCompleted || event.detail == 0) continue;
    ++failed;
    CHECK(static_cast<Code>(event.detail) == Code::kPeerDead);
    CHECK(event.c == 7);
  }
  CHECK(failed == 1);
  CHECK(counted(*recording)[Kind::kRefused] == 2);
}

TEST_CASE("recorder: a ring keeps the newest, the oldest first") {
  base::Recorder recorder;
  CHECK(!recorder.on());
  CHECK(recorder.exchange(std::make_unique<base::Recording>(3)) == nullptr);
  CHECK(recorder.on());
  for (uint64_t i = 0; i < 7; ++i) recorder.add({.kind = Kind::kPosted, .a = i});
  const auto recording = recorder.exchange(nullptr);
  CHECK(!recorder.on());
  CHECK(recording->size() == 3);
  CHECK(recording->overwritten() == 4);
  for (size_t i = 0; i < 3; ++i) CHECK((*recording)[i].a == 4 + i);
  CHECK((*recording)[0].time_ns <= (*recording)[2].time_ns);
  CHECK((*recording)[0].time_ns > 0);
}

}  // namespace
}  // namespace moe_p2p::moe::exchange_test
