// An Exchange by itself: what flags say of parts, and what it learns of a partner by probing.
#include <chrono>
#include <thread>
#include <utility>

#include "doctest/doctest.h"
#include "exchange_pair.h"
#include "fake_driver.h"
#include "moe/host/gather.h"
#include "patience.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using exchange_test::kCommunicator;
using exchange_test::Pair;

TEST_CASE("exchange: a bell holds parts of regions of 128 GiB") {
  const uint64_t begin = ((1ull << 30) - 1) * abi::kLine, bytes = ((1ull << 32) - 1) * abi::kLine;
  for (const int32_t num_parts : {1, 4}) {
    const auto words = abi::BellWords::make(
        6, {.index = 1, .num_parts = num_parts, .num_slots = 0, .begin = begin, .bytes = bytes});
    CHECK(words.whole());
    CHECK(words.tag() == 7);
    CHECK(words.begin(1) == begin);
    CHECK(words.own_bells(1) == 0);
    CHECK(words.bytes() == bytes);
    CHECK(words.num_parts() == static_cast<uint64_t>(num_parts));
  }
}

TEST_CASE(
    "exchange: a GPU that does not flush ends the waits of its node at once, with the reason") {
  test::FakeDriver& driver = test::FakeDriver::install();
  const auto set = [&](int ordering, int error) {
    driver.locked(
        [&](test::FakeDriver& f) { f.writes_ordering = ordering, f.flush_error = error; });
  };
  for (const bool masks : {false, true}) {
    CAPTURE(masks);
    set(0, 0);
    Pair pair(true, masks);
    std::vector<std::byte> memory(64);
    for (const size_t nic : {0, 1}) pair.network.nic(nic).reach_gpus();
    pair.engine(0).register_memory(
        {memory.data(), memory.size(), provider::MemoryKind::kCuda, 0, true});
    pair.ring(1, Phase::kDispatch, 0);
    pair.turn(20);
    CHECK(pair.flag(0, Phase::kDispatch, 0) != 0);
    CHECK(pair.exchange(0).failure().node == -1);
    CHECK(pair.aborted(0) == 0);
    set(0, 700);
    pair.ring(1, Phase::kDispatch, 1);
    pair.turn(20);
    CHECK(pair.flag(0, Phase::kDispatch, 1) == 0);
    const auto failure = pair.exchange(0).failure();
    CHECK(failure.kind == Exchange::Failure::Kind::kFlush);
    CHECK(failure.node == 0);
    CHECK(failure.status.code == Code::kTransport);
    CHECK(pair.aborted(0) == 1);
    CHECK(pair.aborted(1) == 0);
    CHECK(pair.engine(0).gpu_flush_failure().find("fake error (700)") != std::string::npos);
  }
  set(200, 0);
}

TEST_CASE("exchange: a bell is taken once both of its words are there") {
  for (const bool size_first : {true, false}) {
    CAPTURE(size_first);
    Pair pair(true);
    abi::BellWords& words = pair.bell(0, Phase::kDispatch, 0).part[0];
    pair.ring(0, Phase::kDispatch, 0);
    uint64_t& second = size_first ? words.place : words.size;
    const uint64_t late = std::exchange(second, 0);
    pair.turn(100);
    CHECK(pair.num_posted(0) == 0);
    second = late;
    pair.turn(100);
    CHECK(pair.num_posted(0) == 2);
    CHECK(pair.flag(1, Phase::kDispatch, 0) == abi::come(0));
  }
}

TEST_CASE("exchange: a bell is taken whichever of its words comes last") {
  for (const int late : {0, 1}) {
    CAPTURE(late);
    Pair pair(true);
    pair.ring(0, Phase::kDispatch, 0);
    const auto rung = pair.rung(0, Phase::kDispatch, 0);
    const auto tag = pair.tag(0, Phase::kDispatch, 0);
    if (late == 0) rung.store(0);
    if (late == 1) tag.store(0);
    pair.turn(100);
    CHECK(pair.num_posted(0) == 0);
    rung.store(1);
    tag.store(1);
    pair.turn(100);
    CHECK(pair.num_posted(0) == 2);
  }
}

TEST_CASE("exchange: a bell waits for the slots that ring for themselves, of the same step") {
  for (const uint64_t step : {uint64_t{6}, uint64_t{0xfffffffe}}) {
    CAPTURE(step);
    Pair pair(true);
    for (const int early : {2, 0, 3}) pair.ring_slot(0, step - 2, early);  // of the slot's last use
    pair.ring_own(0, step, 4);
    for (const int slot : {2, 0, 3}) pair.ring_slot(0, step, slot);
    pair.turn(100);
    CHECK(pair.num_posted(0) == 0);
    pair.ring_slot(0, step, 1);
    pair.turn(100);
    CHECK(pair.num_posted(0) == 2);
  }
}

TEST_CASE("exchange: bells have the low half of a step's number") {
  Pair pair(true);
  uint64_t nth_use = 0;  // of the slot: what flags count
  for (const uint64_t step : {0xfffffffeu * 1ull, 0x100000000ull}) {
    CAPTURE(step);
    pair.ring(0, Phase::kDispatch, step);
    pair.turn(100);
    CHECK(pair.flag(1, Phase::kDispatch, step) == abi::come(2 * nth_use++));
  }
}

TEST_CASE("exchange: a flag counts the parts from the first on, and is the step's with the last") {
  Pair pair(true);
  for (const uint64_t step : {0u, 2u}) {
    CAPTURE(step);
    const uint64_t before = pair.flag(1, Phase::kDispatch, step);
    const auto flag_after = [&](uint32_t part, uint32_t num_parts) {
      for (int nic = 0; nic < 2; ++nic)
        pair.exchange(1).on_imm({.communicator = kCommunicator,
                                 .phase = static_cast<uint32_t>(Phase::kDispatch),
                                 .slot = 0,
                                 .source = 0,
                                 .part = part,
                                 .is_last = part + 1 == num_parts});
      pair.turn(100);
      return pair.flag(1, Phase::kDispatch, step);
    };
    CHECK(before <= step * abi::kMaxParts);
    CHECK(flag_after(1, 3) == before);
    CHECK(pair.exchange(1).immediates(Phase::kDispatch, 0, 0) == "2 of 4");
    CHECK(flag_after(0, 3) == step * abi::kMaxParts + 2);
    CHECK(flag_after(2, 3) == abi::come(step));
    CHECK(pair.exchange(1).immediates(Phase::kDispatch, 0, 0) == "0 of 2");
  }
  pair.ring(0, Phase::kDispatch, 4, 0, 1);  // the same slot again, whole
  pair.turn(100);
  CHECK(pair.flag(1, Phase::kDispatch, 4) == abi::come(4));
}

// Kernels may see flags of all NICs while immediates of one are still under way: here those of NIC
// 0 arrive at once, those of NIC 1 late. A partner that is answered uses the slot again, and its
// next use may have more parts.
TEST_CASE("exchange: with flags an answer leaves once the immediates that it answers are counted") {
  for (const Phase answered : {Phase::kDispatch, Phase::kCombine}) {
    CAPTURE(answered);
    const bool dispatches = answered == Phase::kDispatch;
    Pair pair(true);
    pair.exchange(1).use_flags(true, nullptr);
    const auto immediates_of_one_nic = [&](uint32_t num_parts) {
      for (uint32_t part = 0; part < num_parts; ++part)
        pair.exchange(1).on_imm({.communicator = kCommunicator,
                                 .phase = static_cast<uint32_t>(answered),
                                 .slot = 0,
                                 .source = 0,
                                 .part = part,
                                 .is_last = part + 1 == num_parts});
      pair.turn(100);
    };
    pair.ring(1, Phase::kDispatch, 0);
    if (!dispatches)
      for (const int rank : {0, 1}) pair.ring(rank, rank ? Phase::kCombine : Phase::kDispatch, 0);
    pair.turn(100);
    const size_t before = pair.num_posted(1);
    const auto has_answer = [&] { return pair.num_posted(1) != before; };

    immediates_of_one_nic(1);
    pair.ring(1, dispatches ? Phase::kCombine : Phase::kDispatch, dispatches ? 0 : 2);
    pair.turn(100);
    CHECK(!has_answer());
    const bool early = has_answer();
    if (early) immediates_of_one_nic(3);
    immediates_of_one_nic(1);
    CHECK(has_answer());
    if (!early) immediates_of_one_nic(3);
    immediates_of_one_nic(3);
    CHECK(pair.flag(1, answered, 2) == abi::come(2));
    CHECK(pair.exchange(1).immediates(answered, 0, 0) == "0 of 2");

    // Whoever has counted wrongly misses steps of a partner that has sent all of them.
    if (dispatches) pair.ring(0, Phase::kCombine, 0);
    pair.ring(1, Phase::kDispatch, 2);
    if (!dispatches) pair.ring(0, Phase::kDispatch, 2);
    pair.turn(100);
    if (!dispatches) pair.ring(1, Phase::kCombine, 2);
    pair.turn(100);
    pair.exchange(0).leave(
        {false, [](int) { return 4; }, {}});  // writes whose immediates are above
    pair.turn(100);
    CHECK(pair.left(1) == Left::kInOrder);
    CHECK(pair.exchange(1).failure().node == -1);
  }
}

TEST_CASE("exchange: parts leave once the first is there, and all of them do") {
  Pair pair(true);
  for (const uint64_t step : {0u, 2u}) {
    CAPTURE(step);
    const size_t before = pair.num_posted(0);
    const auto posted_after = [&](uint64_t part) {
      pair.ring(0, Phase::kDispatch, step, part, 3);
      pair.turn(100);
      return pair.num_posted(0) - before;
    };
    CHECK(posted_after(1) == 0);
    CHECK(posted_after(0) == 4);
    CHECK(posted_after(2) == 6);
    CHECK(pair.flag(1, Phase::kDispatch, step) == abi::come(step));
    pair.ring(0, Phase::kCombine, step);
    pair.turn(100);
    CHECK(pair.flag(1, Phase::kCombine, step) == abi::come(step));
  }
}

TEST_CASE("exchange: whatever a step rings leaves, in steps one after the other and side by side") {
  Pair pair(true);
  for (uint64_t step = 0; step < 8; step += 2) {
    CAPTURE(step);
    for (const uint64_t each : {step, step + 1}) pair.ring(0, Phase::kDispatch, each);
    pair.turn(step == 0 ? 0 : 100);
    for (const uint64_t each : {step + 1, step}) {
      if (step != 4) pair.ring(0, Phase::kWeights, each);
      pair.ring(0, Phase::kCombine, each);
      pair.turn(100);
      CHECK(pair.flag(1, Phase::kDispatch, each) == abi::come(each));
      CHECK(pair.flag(1, Phase::kCombine, each) == abi::come(each));
    }
  }
  CHECK(pair.num_posted(0) == 2 * (8 + 8 + 6));
}

TEST_CASE("exchange: a rank that closes says so once all that was rung has arrived") {
  Pair pair(true);
  pair.ring(0, Phase::kDispatch, 0);
  pair.hold(0, true);
  pair.exchange(0).leave({});
  pair.turn(100);
  CHECK(!pair.exchange(0).has_left());
  CHECK(pair.num_posted(0) == 2);  // no farewell yet
  pair.hold(0, false);
  pair.turn(100);
  CHECK(pair.exchange(0).has_left());
  CHECK(pair.num_posted(0) == 4);
  CHECK(pair.left(1) == Left::kInOrder);
  CHECK(pair.exchange(1).failure().node == -1);
}

TEST_CASE(
    "exchange: a write to a partner that left is no failure, and is not made once that is known") {
  Pair pair(false);
  pair.ring(1, Phase::kDispatch, 0);
  pair.hold(1, true);
  pair.turn(10);
  pair.exchange(0).leave({true, {}, {}});
  pair.turn(100);
  CHECK(pair.left(1) == Left::kFailed);
  pair.fail_next(1);
  pair.hold(1, false);
  pair.turn(100);
  pair.ring(1, Phase::kDispatch, 1);
  pair.turn(100);
  CHECK(pair.num_posted(1) == 2);
  CHECK(pair.exchange(1).failure().node == -1);
  pair.exchange(1).leave({});
  pair.turn(1);
  CHECK(pair.exchange(1).has_left());
  CHECK(pair.num_posted(1) == 2);  // a partner that left needs no farewell
}

TEST_CASE("exchange: a partner that left is told of once all it has sent is here") {
  Pair pair(false);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(100);
  pair.exchange(0).leave({false, [](int) { return 1; }, {}});  // its immediates are still to come
  pair.turn(100);
  CHECK(pair.exchange(0).has_left());
  CHECK(pair.left(1) == Left::kNo);
  for (int nic = 0; nic < 2; ++nic)
    pair.exchange(1).on_imm(
        {.communicator = kCommunicator, .phase = HostGather::kPhase, .slot = 1, .source = 0});
  pair.turn(1);
  CHECK(pair.left(1) == Left::kInOrder);
}

TEST_CASE("exchange: a GPU's rank fails for what a partner left without") {
  Pair pair(true);
  for (const uint64_t step : {0u, 1u}) pair.ring(1, Phase::kDispatch, step);
  pair.ring(0, Phase::kDispatch, 0);
  pair.turn(100);
  CHECK(pair.exchange(1).failure().node == -1);
  pair.exchange(0).leave({});
  pair.turn(100);
  const Exchange::Failure failure = pair.exchange(1).failure();
  CHECK(failure.node == 0);
  CHECK(failure.kind == Exchange::Failure::Kind::kLeft);
  CHECK(failure.phase == Phase::kDispatch);
  CHECK(failure.step == 1);
}

TEST_CASE("exchange: a GPU's rank does not fail for a partner that has sent all it was asked for") {
  Pair pair(true);
  for (const int rank : {0, 1})
    for (const Phase phase : {Phase::kDispatch, Phase::kCombine}) pair.ring(rank, phase, 0);
  pair.turn(100);
  pair.exchange(0).leave({});
  pair.turn(100);
  CHECK(pair.left(1) == Left::kInOrder);
  CHECK(pair.exchange(1).failure().node == -1);
  pair.ring(1, Phase::kDispatch, 1);  // too late for it
  pair.turn(100);
  CHECK(pair.exchange(1).failure().kind == Exchange::Failure::Kind::kLeft);
}

TEST_CASE("exchange: a partner that is there does not notice a probe") {
  Pair pair(false);
  for (int i = 0; i < 3; ++i) CHECK(pair.probe() == 2);
  CHECK(pair.exchange(0).failure().node == -1);
  for (const Phase phase : {Phase::kDispatch, Phase::kCombine, Phase::kWeights})
    for (int slot = 0; slot < 2; ++slot)
      CHECK(pair.exchange(1).immediates(phase, slot, 0) == "0 of 2");
}

TEST_CASE("exchange: a probe in vain is a failure when somebody still asks a while later") {
  Pair pair(false);
  pair.fail_next(0);
  CHECK(pair.probe() == 2);
  CHECK(pair.probe() == 0);  // too soon
  CHECK(pair.exchange(0).failure().node == -1);
  std::this_thread::sleep_for(2 * Exchange::kProbeInterval);
  pair.fail_next(0);
  CHECK(pair.probe() == 2);  // for something else
  CHECK(pair.exchange(0).failure().node == -1);
  std::this_thread::sleep_for(Exchange::kProbeInterval);
  CHECK(pair.probe() == 0);
  const Exchange::Failure failure = pair.exchange(0).failure();
  CHECK(failure.node == 1);
  CHECK(failure.kind == Exchange::Failure::Kind::kProbe);
  CHECK(failure.status == base::Status{Code::kPeerDead, 7});
}

TEST_CASE("exchange: for a GPU it probes by itself while a step is not answered") {
  Pair pair(true);
  const auto turn = [&] {
    pair.turn();
    return false;
  };
  for (const Phase phase : {Phase::kDispatch, Phase::kCombine}) {
    pair.ring(0, phase, 0);
    pair.turn(100);
    const size_t before = pair.num_posted(0);
    CHECK(test::poll_until(turn, [&] { return pair.num_posted(0) != before; }));
    pair.ring(1, phase, 0);
    pair.turn(100);
  }
  const size_t before = pair.num_posted(0);
  const auto until = platform::Clock::now() + Exchange::kProbeInterval * 3 / 2;
  CHECK(test::poll_until(turn, [&] { return platform::Clock::now() > until; }));
  CHECK(pair.num_posted(0) == before);
}

}  // namespace moe_p2p::moe
