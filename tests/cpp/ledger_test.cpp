// Which calls are open, and what that refuses or releases. What GPU calls make of it, with graphs,
// is in device_ledger_test.cpp.
#include "moe/ledger.h"

#include <doctest/doctest.h>

#include <array>
#include <vector>

#include "base/log.h"

namespace moe_p2p::moe {
namespace {

using Stage = OpenCall::Stage;

std::array<int32_t, 8> words;  // handles lie here

OpenCall dispatch(size_t which, int64_t num_steps = 1, bool solo = false) {
  return {
      .handle = &words[which], .num_steps = num_steps, .solo = solo, .stage = Stage::kDispatched};
}

// A paired dispatch, sent and received.
void open(Ledger& ledger, size_t which, uint64_t capture = 0) {
  ledger.record(nullptr, dispatch(which), capture, true, true);
}

bool has_room(Ledger& ledger, int64_t num_steps, uint64_t capture = 0) {
  try {
    ledger.check_room(num_steps, capture);
    return true;
  } catch (const base::Error& error) {
    CHECK(error.code() == base::Code::kInvalidArgument);
    return false;
  }
}

std::vector<const int32_t*> released(const Ledger& ledger, int64_t num_steps,
                                     uint64_t capture = 0) {
  std::vector<const int32_t*> handles;
  for (const OpenCall& call : ledger.to_release(num_steps, capture)) handles.push_back(call.handle);
  return handles;
}

void close(Ledger& ledger, size_t which, uint64_t capture = 0) {
  const OpenCall* found = ledger.find(&words[which], Stage::kDispatched, capture);
  REQUIRE(found);
  ledger.record(found, *found, capture, false, false);
}

TEST_CASE("ledger: a call has room as long as none of its steps waits for one that is open") {
  Ledger ledger(3);
  CHECK(has_room(ledger, 100));  // it closes them itself, one after the other
  open(ledger, 0);               // step 0
  CHECK(has_room(ledger, 2));
  CHECK(!has_room(ledger, 3));  // step 3 would wait for step 0
  open(ledger, 1);
  open(ledger, 2);
  CHECK(!has_room(ledger, 1));
  close(ledger, 1);  // not the one that is in the way
  CHECK(!has_room(ledger, 1));
  close(ledger, 0);
  CHECK(has_room(ledger, 2));
  CHECK(!has_room(ledger, 3));
  CHECK(released(ledger, 3).empty());  // its policy is to refuse
}

TEST_CASE("ledger: the oldest dispatches are released, in their order, and no sent combine is") {
  Ledger ledger(2);
  ledger.release_oldest();
  open(ledger, 0);
  open(ledger, 1);
  using Handles = std::vector<const int32_t*>;
  CHECK(released(ledger, 1) == Handles{&words[0]});
  CHECK(released(ledger, 2) == Handles{&words[0], &words[1]});
  CHECK(released(ledger, 50) == Handles{&words[0], &words[1]});
  CHECK(!has_room(ledger, 1));  // until they are
  close(ledger, 0);
  CHECK(has_room(ledger, 1));
  OpenCall combine = *ledger.find(&words[1], Stage::kDispatched, 0);
  combine.stage = Stage::kCombineSent;
  ledger.record(ledger.find(&words[1], Stage::kDispatched, 0), combine, 0, false, true);
  CHECK(released(ledger, 2).empty());
  CHECK(!has_room(ledger, 2));  // only receiving it helps
}

TEST_CASE("ledger: calls of any capture count once where the oldest are released") {
  Ledger ledger(2);
  ledger.release_oldest();
  using Handles = std::vector<const int32_t*>;
  open(ledger, 0);
  open(ledger, 1, 7);
  CHECK(released(ledger, 1) == Handles{&words[0]});
  CHECK(released(ledger, 2, 7) == Handles{&words[0], &words[1]});
  close(ledger, 0, 7);  // by a release that is captured
  CHECK(released(ledger, 2) == Handles{&words[1]});
  close(ledger, 1);  // by one that is not
  CHECK(released(ledger, 2).empty());
  CHECK(has_room(ledger, 100));
  CHECK(ledger.find(&words[1], Stage::kDispatched, 0));  // its graph may be replayed
}

TEST_CASE("ledger: the owner of a handle's words is kept until nothing reads them") {
  Ledger ledger(2);
  ledger.release_oldest();
  for (const uint64_t capture : {0, 7}) {
    CAPTURE(capture);
    auto owner = std::make_shared<int>();
    const std::weak_ptr<int> words_live = owner;
    OpenCall call = dispatch(0);
    call.owner = std::move(owner);
    ledger.record(nullptr, std::move(call), capture, true, true);
    call = {};
    CHECK(!words_live.expired());
    close(ledger, 0, capture);
    CHECK(words_live.expired());
  }
}

TEST_CASE(
    "ledger: on hosts a handle is known by the step it names, and by its place where none is") {
  Ledger ledger(4);
  for (const size_t which : {0, 1}) {
    OpenCall combine = dispatch(which);
    combine.solo = true;
    combine.stage = Stage::kCombineSent;
    combine.named_step = ~uint64_t{0};
    ledger.record(nullptr, combine, 0, true, true);
  }
  OpenCall named = dispatch(2);
  named.named_step = 2;
  ledger.record(nullptr, named, 0, true, true);
  CHECK(ledger.find_named(2, &words[7], Stage::kDispatched)->handle == &words[2]);  // of a copy
  CHECK(ledger.find_named(3, &words[2], Stage::kDispatched) == nullptr);
  CHECK(ledger.find_named(2, &words[2], Stage::kCombineSent) == nullptr);
  for (const size_t which : {0, 1})
    CHECK(ledger.find_named(~uint64_t{0}, &words[which], Stage::kCombineSent)->first_step == which);
}

}  // namespace
}  // namespace moe_p2p::moe
