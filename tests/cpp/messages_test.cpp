// Inboxes and outboxes over every provider that carries bytes: each message arrives once and in
// its sender's order, whatever the network does; what is full, gone or forgotten is refused by
// name.
#include <list>
#include <map>
#include <thread>

#include "engine/inbox.h"
#include "engine/outbox.h"
#include "engine_traffic.h"
#include "provider_table.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using base::Code;
using provider_test::contains;
using provider_test::ProviderUnderTest;
using provider_test::text_of_error;

constexpr InboxPlace kSmall{.num_rings = 4, .num_slots = 8, .max_bytes = 300};

// The settings that a row's engines are opened with. Threads that poll may not run for half a
// second on a machine with much to do.
std::string patient(const std::string& settings) {
  FakeFabric::use_for(settings.c_str());
  return contains(settings, "shm") ? "provider=shm,timeout_ms=30000" : settings;
}

// An engine with its thread, and an inbox. Settings of other providers name one device.
struct End {
  End(const ProviderUnderTest& on, int num_nics, const InboxPlace& size = kSmall)
      : engine(engine_options(on.name, patient(on.settings),
                              std::string(on.name) == "loopback" ? num_nics : 1)),
        proxy(std::make_unique<proxy::ProxyThread>(engine, proxy::ProxyOptions{})) {
    inbox = std::make_unique<Inbox>(engine, size, "receiver");
  }
  ~End() { proxy.reset(); }

  std::optional<Message> take(Purpose purpose = Purpose::kMessages) { return inbox->take(purpose); }
  Message next() {
    std::optional<Message> found;
    const bool came =
        poll_until([] { return false; }, [&] { return found || (found = take()).has_value(); });
    REQUIRE(came);
    return *found;
  }

  std::unique_ptr<Inbox> inbox;  // lives as long as the engine
  TransferEngine engine;
  std::unique_ptr<proxy::ProxyThread> proxy;
};

// A sender of its own connection, which takes leave at its end.
class Sender {
 public:
  Sender(End& from, const End& to, Purpose purpose = Purpose::kMessages)
      : engine_(from.engine),
        peer_(engine_.connect(to.engine.address())),
        outbox_(engine_, peer_, purpose, "sender") {}
  ~Sender() { leave(); }
  void leave() {
    if (peer_ == nullptr) return;
    outbox_.end(soon());
    engine_.disconnect(std::exchange(peer_, nullptr));
    const bool settled = poll_until([] { return false; }, [&] { return outbox_.settled(); });
    CHECK(settled);
  }

  std::shared_ptr<Request> send(std::span<const std::byte> data) {
    std::shared_ptr<Request> sent;
    outbox_.send(data, soon(), [&](const MessageWrite& write) {
      auto record = std::make_shared<Record>();
      record->slice = write.slice;
      record->request.operation =
          Scatter{write.source, {&record->slice, 1}, Scatter::Sharding::kByPeer, write.imm};
      engine_.submit(record->request);
      sent = {record, &record->request};
      return sent;
    });
    return sent;
  }
  // Again while the inbox is full.
  void send_until_taken(std::span<const std::byte> data) {
    const bool sent = poll_until([] { return false; },
                                 [&] {
                                   try {
                                     send(data);
                                     return true;
                                   } catch (const base::Error& error) {
                                     if (error.code() != Code::kResourceExhausted) throw;
                                     return false;
                                   }
                                 });
    REQUIRE(sent);
  }

 private:
  struct Record {
    Slice slice;
    Request request;
  };
  TransferEngine& engine_;
  const Peer* peer_;
  Outbox outbox_;
};

// Runs body over the providers that carry bytes in host memory.
template <typename Body>
void for_each_carrier(Body&& body) {
  provider_test::for_each_provider([&](const ProviderUnderTest& on) {
    if (on.memory == provider::MemoryKind::kHost && std::string(on.name) != "timed") body(on);
  });
}

std::vector<std::byte> message(unsigned number, size_t bytes) {
  auto data = pattern(bytes, number);
  if (bytes >= sizeof number) std::memcpy(data.data(), &number, sizeof number);
  return data;
}

size_t bytes_of(unsigned number) { return number % 7 == 0 ? 0 : number * 37 % 301; }

TEST_CASE("messages: each arrives once, in the order of its sender") {
  for_each_carrier([](const ProviderUnderTest& on) {
    End from(on, 2), to(on, 1);
    constexpr unsigned kNum = 150;
    const auto send_all = [&](unsigned first) {
      Sender sender(from, to);
      for (unsigned i = 0; i < kNum; ++i)
        sender.send_until_taken(message(first + i, bytes_of(first + i)));
    };
    std::thread first([&] { send_all(1000); }), second([&] { send_all(5000); });
    std::map<uint64_t, std::vector<base::Bytes>> arrived;
    for (unsigned i = 0; i < 2 * kNum; ++i) {
      Message one = to.next();
      CHECK(one.label == "sender");
      arrived[one.sender].push_back(std::move(one.data));
    }
    first.join();
    second.join();
    CHECK(arrived.size() == 2);
    for (const auto& [sender, datas] : arrived) {
      REQUIRE(datas.size() == kNum);
      const unsigned base = datas[0] == message(1000, bytes_of(1000)) ? 1000 : 5000;
      size_t num_wrong = 0;
      for (unsigned i = 0; i < kNum; ++i)
        num_wrong += datas[i] == message(base + i, bytes_of(base + i)) ? 0 : 1;
      CHECK(num_wrong == 0);
    }
    CHECK_FALSE(to.take());
  });
}

TEST_CASE("messages: a full inbox and a message too large are refused by name") {
  for_each_carrier([](const ProviderUnderTest& on) {
    End from(on, 1), to(on, 2);
    Sender sender(from, to);
    for (unsigned i = 0; i < kSmall.num_slots; ++i) sender.send(message(i, 20));
    for (int again = 0; again < 2; ++again)
      CHECK(contains(text_of_error([&] { sender.send(message(99, 20)); }),
                     "has not taken 8 messages from here"));
    CHECK(contains(text_of_error([&] { sender.send(message(99, 301)); }), "takes at most 300"));
    CHECK(to.next().data == message(0, 20));
    sender.send(message(8, 300));  // one has room again, at once
    for (unsigned i = 1; i <= 8; ++i) CHECK(to.next().data == message(i, i == 8 ? 300 : 20));
    CHECK_FALSE(to.take());
  });
}

TEST_CASE("messages: rings that are left are for others, and no more senders than rings") {
  for_each_carrier([](const ProviderUnderTest& on) {
    if (contains(on.settings, "shm")) return;  // it sends no byes: provider.h
    End from(on, 2), to(on, 2);
    for (unsigned i = 0; i < 2 * kSmall.num_rings; ++i) {
      Sender sender(from, to);
      sender.send(message(i, 64));
      sender.leave();  // before it is taken
      CHECK(to.next().data == message(i, 64));
    }
    CHECK_FALSE(to.take());
    std::list<Sender> all;
    for (unsigned i = 0; i < kSmall.num_rings; ++i)
      all.emplace_back(from, to).send_until_taken(message(i, 8));
    Sender late(from, to);
    CHECK(contains(text_of_error([&] { late.send({}); }), "room for 4 senders"));
    for (unsigned i = 0; i < kSmall.num_rings; ++i) to.next();
    all.clear();
    const bool has_room =
        poll_until([] { return false; },
                   [&] {
                     CHECK_FALSE(to.take());  // who looks gives rings back
                     return text_of_error([&] { late.send(message(77, 8)); }).empty();
                   });
    CHECK(has_room);
    CHECK(to.next().data == message(77, 8));
  });
}

TEST_CASE("messages: senders that come at once have rings of their own") {
  for_each_carrier([](const ProviderUnderTest& on) {
    if (contains(on.settings, "shm")) return;  // no ring comes back
    End from(on, 1), to(on, 1);
    for (int round = 0; round < 5; ++round) {
      std::vector<std::thread> threads;
      for (unsigned i = 0; i < kSmall.num_rings; ++i)
        threads.emplace_back([&, i] {
          Sender sender(from, to);
          sender.send_until_taken(message(i, 100));
          sender.send_until_taken(message(10 + i, 100));
        });
      std::map<uint64_t, std::vector<base::Bytes>> arrived;
      for (unsigned i = 0; i < 2 * kSmall.num_rings; ++i) {
        Message one = to.next();
        arrived[one.sender].push_back(std::move(one.data));
      }
      for (std::thread& thread : threads) thread.join();
      CHECK(arrived.size() == kSmall.num_rings);
      for (const auto& [sender, datas] : arrived) {
        unsigned number = 0;
        std::memcpy(&number, datas.at(0).data(), sizeof number);
        CHECK(datas == std::vector{message(number, 100), message(10 + number, 100)});
      }
    }
  });
}

TEST_CASE("messages: those of barriers are taken apart from others") {
  const ProviderUnderTest on{"loopback", "seed=3"};
  End from(on, 1), to(on, 1);
  Sender plain(from, to), barrier(from, to, Purpose::kBarriers);
  barrier.send(message(1, 16))->wait(soon());
  plain.send(message(2, 16))->wait(soon());
  CHECK(to.next().data == message(2, 16));
  CHECK_FALSE(to.take());
  CHECK(poll_until([] { return false; }, [&] { return to.take(Purpose::kBarriers).has_value(); }));
}

TEST_CASE("messages: a sender that was forgotten fails by name, its ring is for others") {
  for_each_carrier([](const ProviderUnderTest& on) {
    if (on.drops_connection) return;  // a refused write takes others of the connection with it
    End from(on, 1), to(on, 1);
    Sender sender(from, to);
    sender.send(message(1, 8));
    const uint64_t name = to.next().sender;
    CHECK_FALSE(to.inbox->forget(name + 2));
    sender.send(message(2, 8))->wait(soon());
    CHECK(to.inbox->forget(name));
    CHECK_FALSE(to.inbox->forget(name));
    CHECK(to.inbox->num_senders() == 0);
    std::string why;
    const bool failed = poll_until([] { return false; },
                                   [&] {
                                     why = text_of_error([&] { sender.send(message(3, 8)); });
                                     return !why.empty();
                                   });
    CHECK(failed);
    CHECK(contains(why, "connect again"));
    CHECK_FALSE(to.take());  // not even what had arrived
    Sender other(from, to);
    other.send(message(4, 8));
    CHECK(to.next().data == message(4, 8));
  });
}

TEST_CASE("messages: without an inbox, and to a receiver that is gone, they fail by name") {
  const ProviderUnderTest on{"loopback", ""};
  End from(on, 1);
  TransferEngine plain(engine_options("loopback", "", 1));
  Outbox none(from.engine, from.engine.connect(plain.address()), Purpose::kMessages, "sender");
  CHECK(contains(text_of_error([&] { none.send({}, soon(), {}); }), "takes no messages"));
  none.end(soon());
  auto to = std::make_unique<End>(on, 1);
  Sender sender(from, *to);
  sender.send(message(1, 8))->wait(soon());
  to.reset();
  std::string why;
  const bool failed = poll_until([] { return false; },
                                 [&] {
                                   why = text_of_error([&] { sender.send(message(2, 8)); });
                                   return !why.empty();
                                 });
  CHECK(failed);
  CHECK(contains(why, "connect again"));
  CHECK(contains(why, "peer dead"));
}

TEST_CASE("messages: sizes that cannot be are refused by name") {
  TransferEngine engine(engine_options("loopback", "", 1));
  const auto why = [&](InboxPlace size) {
    return text_of_error([&] { const Inbox made(engine, size, "rank 3"); });
  };
  CHECK(contains(why({0, 8, 8}), "rank 3: number of senders is 0, must be 1 to 256"));
  CHECK(contains(why({1u << 30, 8, 8}), "must be 1 to 256"));
  CHECK(contains(why({4, 129, 8}), "number of messages of a sender is 129, must be 1 to 128"));
  CHECK(contains(why({4, 8, 65537}), "bytes of a message is 65537, must be 1 to 65536"));
  CHECK(engine.address().inbox.num_rings == 0);
}

TEST_CASE("messages: an address says where the inbox is, and is still of the same engine") {
  TransferEngine engine(engine_options("loopback", "", 2));
  const EngineAddress before = engine.address();
  proxy::ProxyThread proxy(engine, {});
  const auto inbox = std::make_unique<Inbox>(engine, kSmall, "rank 0");
  const EngineAddress after = EngineAddress::parse(engine.address().serialize());
  CHECK(before == after);
  CHECK(before.inbox.num_rings == 0);
  CHECK(after.inbox.num_slots == 8);
  CHECK(after.inbox.rails == inbox->place().rails);
}

TEST_CASE("messages: immediates of an earlier owner of a ring count for nobody") {
  using Kind = MessageImm::Kind;
  std::unique_ptr<Inbox> opened;  // lives longer than the engine
  TransferEngine engine(engine_options("loopback", "", 1));
  proxy::ProxyThread proxy(engine, {});
  opened = std::make_unique<Inbox>(engine, kSmall, "rank 0");
  Inbox& inbox = *opened;
  const auto deliver = [&](MessageImm imm) {
    const MessageImm same = MessageImm::unpack(imm.pack());
    CHECK(same.pack() == imm.pack());
    engine.run_on_poller([&] { engine.imm_table().deliver(imm.pack()); }, soon());
  };
  deliver({Kind::kMessage, 2, 0, 0});  // of a ring without an owner
  deliver({Kind::kBye, 2, 0, 0});
  deliver({Kind::kMessage, 200, 0, 0});  // of no ring
  deliver({Kind::kClaim, 2, 15, 0});     // of another generation
  deliver({Kind::kClaim, 2, 0, 0});      // without a name
  CHECK(inbox.num_senders() == 0);
  CHECK_FALSE(inbox.take(Purpose::kMessages));
  CHECK(engine.imm_table().discarded() == 0);
}

}  // namespace
}  // namespace moe_p2p::test
