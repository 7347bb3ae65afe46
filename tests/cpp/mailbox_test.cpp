#include "engine/mailbox.h"

#include <thread>
#include <vector>

#include "doctest/doctest.h"
#include "engine/poller_call.h"

namespace moe_p2p::engine {
namespace {

using platform::Clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Item : MailboxNode {
  Item() : MailboxNode(Kind::kRequest) {}
  int sender = 0;
  int number = 0;
};

TEST_CASE("mailbox: empties in order of arrival") {
  Mailbox mailbox;
  CHECK(mailbox.empty());
  CHECK(mailbox.take_all() == nullptr);
  std::vector<Item> items(5);
  for (auto& item : items) mailbox.push(item);
  CHECK_FALSE(mailbox.empty());
  MailboxNode* node = mailbox.take_all();
  for (auto& item : items) {
    REQUIRE(node == &item);
    node = node->next;
  }
  CHECK(node == nullptr);
  CHECK(mailbox.empty());
}

TEST_CASE("mailbox: loses, doubles and reorders nothing of several senders") {
  constexpr int kSenders = 4, kItems = 2000;
  Mailbox mailbox;
  std::vector<std::vector<Item>> items(kSenders);
  for (auto& list : items) list = std::vector<Item>(kItems);
  std::vector<std::thread> senders;
  for (int s = 0; s < kSenders; ++s) {
    senders.emplace_back([&, s] {
      for (int i = 0; i < kItems; ++i) {
        auto& item = items[static_cast<size_t>(s)][static_cast<size_t>(i)];
        item.sender = s;
        item.number = i;
        mailbox.push(item);
      }
    });
  }
  std::vector<int> next(kSenders, 0);
  for (int received = 0; received < kSenders * kItems;) {
    MailboxNode* node = mailbox.take_all();
    if (node == nullptr) std::this_thread::yield();
    for (; node != nullptr; node = node->next, ++received) {
      const auto& item = static_cast<Item&>(*node);
      REQUIRE(item.number == next[static_cast<size_t>(item.sender)]++);
    }
  }
  for (auto& sender : senders) sender.join();
  CHECK(mailbox.empty());
}

TEST_CASE("poller call: a call that was given up never runs, and its node is used again") {
  CallPool pool;
  bool ran = false;
  const Closure closure = [&] { ran = true; };
  PollerCall& call = pool.take(closure);
  CHECK_FALSE(call.wait(Clock::now() + milliseconds(1)));
  PollerCall& other = pool.take(closure);
  CHECK(&other != &call);  // the first is still in a mailbox
  call.run();
  CHECK_FALSE(ran);
  CHECK(&pool.take(closure) == &call);
}

TEST_CASE("poller call: the caller gets what the closure throws") {
  CallPool pool;
  const Closure closure = [] { throw std::runtime_error("from the poller"); };
  PollerCall& call = pool.take(closure);
  call.run();
  CHECK_THROWS_WITH(call.wait(Clock::now()), "from the poller");
  CHECK(&pool.take(closure) == &call);
}

TEST_CASE("poller call: a closure that has begun is awaited beyond the deadline") {
  CallPool pool;
  std::atomic<bool> begun{false}, go_on{false};
  int result = 0;
  const Closure closure = [&] {
    begun = true;
    while (!go_on) std::this_thread::yield();
    result = 7;
  };
  PollerCall& call = pool.take(closure);
  std::thread poller([&] { call.run(); });
  while (!begun) std::this_thread::yield();
  std::thread caller([&] {
    CHECK(call.wait(Clock::now()));  // a deadline that has passed already
    CHECK(result == 7);
  });
  go_on = true;
  caller.join();
  poller.join();
}

TEST_CASE("poller call: of giving up and running exactly one happens") {
  CallPool pool;
  for (int round = 0; round < 300; ++round) {
    std::atomic<int> runs{0};
    const Closure closure = [&] { ++runs; };
    PollerCall& call = pool.take(closure);
    std::thread poller([&] { call.run(); });
    const bool ran = call.wait(Clock::now());
    poller.join();
    REQUIRE(runs == (ran ? 1 : 0));
  }
}

}  // namespace
}  // namespace moe_p2p::engine
