// The contract of provider/provider.h as an engine that cancels relies on it: what was posted
// arrives, what was taken back does not, and memory of a request that is done is left alone.
#include <algorithm>
#include <numeric>

#include "engine/transfer_engine.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

struct Cancelling {
  explicit Cancelling(const ProviderUnderTest& provider)
      : options{.provider = provider.name, .num_nics = 1, .settings = provider.settings} {
    test::FakeFabric::use_for(provider.settings);
    if (provider.memory == MemoryKind::kCuda) test::FakeDriver::install();
    a = std::make_unique<engine::TransferEngine>(options);
    b = std::make_unique<engine::TransferEngine>(options);
  }
  bool pump(const std::function<bool()>& ready) const {
    return test::poll_until([this] { return a->progress() | b->progress(); }, ready);
  }
  const engine::EngineOptions options;
  std::unique_ptr<engine::TransferEngine> a, b;
};

TEST_CASE("provider contract: of a cancelled request the posted part arrives and nothing else") {
  for_each_provider([](const ProviderUnderTest& provider) {
    constexpr size_t kPages = 3000, kPage = 256;
    Cancelling pair(provider);
    std::vector<std::byte> from(kPages * kPage, std::byte{1}), to(kPages * kPage);
    const bool host = provider.memory == MemoryKind::kHost;
    const auto span = [&](std::vector<std::byte>& bytes) {
      return MemorySpan{bytes.data(), bytes.size(), provider.memory, host ? -1 : 0};
    };
    const auto* source = pair.a->register_memory(span(from));
    const auto* target = pair.b->register_memory(span(to));
    const auto* region = pair.a->resolve(pair.b->descriptor(target));
    std::vector<int64_t> pages(kPages);  // every second one first: nothing is merged
    for (size_t i = 0; i < kPages; ++i)
      pages[i] = static_cast<int64_t>(i < kPages / 2 ? 2 * i : 2 * (i - kPages / 2) + 1);
    engine::Request request(
        engine::WritePages{source, region, kPage, {pages, kPage, 0}, {pages, kPage, 0}, 4});
    pair.a->submit(request);
    for (int i = 0; i < 3; ++i) pair.a->progress(), pair.b->progress();
    const auto cancelled = pair.a->cancel(request);
    if (!cancelled) {
      CHECK(request.status().ok());
      return;
    }
    CHECK(pair.pump([&] { return request.done(); }));
    CHECK(request.status().code == Code::kCancelled);
    std::ranges::fill(from, std::byte{9});  // done: nothing may read it any more
    const uint64_t posted = cancelled->posted_writes;
    CHECK(cancelled->posted.bytes == posted * kPage);
    CHECK(cancelled->posted.imms == posted);
    CHECK(cancelled->taken_back.bytes == (kPages - posted) * kPage);
    CHECK(posted > 0);
    CHECK(posted < kPages);
    CHECK(pair.pump([&] { return pair.b->imm_table().value(4) == posted; }));
    for (int i = 0; i < 500; ++i) pair.a->progress(), pair.b->progress();
    CHECK(pair.b->imm_table().value(4) == posted);
    size_t num_wrong = 0;
    for (size_t i = 0; i < kPages; ++i) {
      const auto page = std::span(to).subspan(static_cast<size_t>(pages[i]) * kPage, kPage);
      const auto expected = i < posted ? std::byte{1} : std::byte{0};
      num_wrong += std::ranges::count(page, expected) == kPage ? 0 : 1;
    }
    CHECK(num_wrong == 0);
    engine::Request next(engine::Write{source, 0, region, 0, kPage, 5});
    pair.a->submit(next);
    CHECK(pair.pump([&] { return next.done(); }));
    CHECK(next.status().ok());
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
