// The contract of provider/provider.h, of peers: many at once, and ones that leave with their last
// word.
#include <algorithm>

#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

constexpr size_t kBytes = 500;

// A peer that writes to `to`, at slots of its own.
struct Writer {
  Writer(const ProviderUnderTest& provider, Node& to, Memory& target, uint32_t first)
      : node(open(provider)),
        source(node, kBytes),
        peer(node.connect(to)),
        to_(target),
        first_(first) {
    fill(source.data, first);
  }
  void post(std::initializer_list<Node*> nodes, uint32_t num) {
    for (uint32_t i = 0; i < num; ++i, ++num_posted) {
      const uint32_t slot = first_ + num_posted;
      post_all(node, nodes,
               with_imm(make_write(slot, peer, source, 0, to_, slot * kBytes, kBytes), slot));
    }
  }
  bool is_done() const { return node.done.size() == num_posted; }
  Node node;
  Memory source;
  PeerId peer;
  uint32_t num_posted = 0;

 private:
  Memory& to_;
  uint32_t first_;
};

TEST_CASE("provider contract: what a peer sent last is shown after it has left") {
  for_each_provider([](const ProviderUnderTest& provider) {
    constexpr uint32_t kNum = 16;
    for (const bool closes : {false, true}) {
      CAPTURE(closes);
      Node b = open(provider);
      Memory target(b, kNum * kBytes);
      auto writer = std::make_unique<Writer>(provider, b, target, 0);
      size_t num_wrong = 0;
      b.on_imm = [&](uint32_t imm) {
        num_wrong += holds(target.data.subspan(imm * kBytes, kBytes), 0) ? 0 : 1;
      };
      b.poll_entries = 1;  // much is left to show when the writer has been told that it is there
      writer->post({&writer->node, &b}, kNum);
      CHECK(pump({&writer->node, &b}, [&] { return writer->is_done(); }));
      CHECK(writer->node.num_failed() == 0);
      writer->node.domain->disconnect(writer->peer);
      if (closes) {
        target.unmap();
        writer.reset();
      }
      CHECK(pump({&b}, [&] { return b.imms.size() == kNum; }));
      CHECK(num_wrong == 0);
    }
  });
}

TEST_CASE("provider contract: many peers write to one, and half of them leave") {
  for_each_provider([](const ProviderUnderTest& provider) {
    constexpr uint32_t kNumPeers = 12, kNum = 10;
    Node b = open(provider);
    Memory target(b, kNumPeers * 2 * kNum * kBytes);
    std::vector<std::unique_ptr<Writer>> writers;
    for (uint32_t i = 0; i < kNumPeers; ++i)
      writers.push_back(std::make_unique<Writer>(provider, b, target, i * 2 * kNum));
    std::vector<uint32_t> seen(kNumPeers * 2 * kNum);
    b.on_imm = [&](uint32_t imm) { seen.at(imm) += 1; };
    const auto run = [&] {
      for (const auto& writer : writers) writer->post({&writer->node, &b}, kNum);
      std::vector<Node*> nodes{&b};  // all of them: each has a deadline of its own
      for (const auto& writer : writers) nodes.push_back(&writer->node);
      CHECK(pump(nodes, [&] {
        return std::ranges::all_of(writers, [](const auto& writer) { return writer->is_done(); });
      }));
      for (const auto& writer : writers) CHECK(writer->node.num_failed() == 0);
    };
    run();
    target.unmap();
    for (uint32_t i = 0; i < kNumPeers / 2; ++i) writers.erase(writers.begin() + i);
    run();
    CHECK(pump({&b}, [&] { return b.imms.size() == kNumPeers * kNum * 3 / 2; }));
    for (uint32_t peer = 0; peer < kNumPeers; ++peer)
      for (uint32_t i = 0; i < 2 * kNum; ++i)
        CHECK(seen[peer * 2 * kNum + i] == (i < kNum || peer % 2 == 1 ? 1 : 0));
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
