// Engine, proxy and libfabric together: every kind of request over tcp, shm and the fake of EFA,
// with different numbers of NICs at both ends, and a peer that closes.
#include <numeric>

#include "engine_pair.h"
#include "fake_fabric.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;
using platform::Clock;

platform::Deadline soon() { return Clock::now() + std::chrono::seconds(60); }

EngineOptions fabric_options(const std::string& settings, int num_nics) {
  EngineOptions options;
  options.provider = "libfabric";
  options.settings = settings;
  options.num_nics = num_nics;
  return options;
}

// Runs body(settings) for each provider that is here.
template <typename Body>
void for_each_fabric(Body&& body) {
  for (const char* settings : {"provider=efa,interfaces=efa1:efa2:efa3",
                               "provider=tcp,timeout_ms=5000", "provider=shm,timeout_ms=5000"}) {
    SUBCASE(settings) {
      FakeFabric::use_for(settings);
      try {
        const TransferEngine probe(fabric_options(settings, 1));
      } catch (const base::Error& error) {
        REQUIRE(error.code() == base::Code::kUnavailable);
        MESSAGE("skipped: ", error.what());
        return;
      }
      body(std::string(settings));
    }
  }
}

TEST_CASE("engine over libfabric: every kind of request arrives") {
  for_each_fabric([](const std::string& base_settings) {
    const auto settings = base_settings + ",max_write_bytes=700,max_in_flight=16";
    TransferEngine from(fabric_options(settings, 2)), to(fabric_options(settings, 3));
    proxy::ProxyThread first(from, {}), second(to, {});
    Buffer source(from, pattern(50'000)), target(to, std::vector<std::byte>(50'000));
    const auto* region = from.resolve(to.descriptor(target.handle));
    std::vector<int64_t> pages(40);
    std::iota(pages.begin(), pages.end(), 0);
    const std::vector<Slice> slices = {{40'000, region, 40'000, 0}, {40'000, region, 40'000, 9999}};
    Request write(Write{source.handle, 0, region, 0, 20'001, 1});
    Request page_write(
        WritePages{source.handle, region, 450, {pages, 500, 20'001}, {pages, 500, 20'001}, 2});
    Request scatter(Scatter{source.handle, slices, Scatter::Sharding::kByBytes, 3});
    Request imm(Imm{region->owner, 4});
    const std::array<uint64_t, 4> immediates = {2, 40, 4, 1};
    for (uint64_t round = 1; round <= 3; ++round) {
      Request* requests[] = {&write, &page_write, &scatter, &imm};
      for (Request* request : requests) from.submit(*request);
      for (Request* request : requests) {
        REQUIRE(request->wait(soon()));
        CHECK(request->status().ok());
      }
      for (uint32_t i = 0; i < immediates.size(); ++i)
        REQUIRE(to.imm_table().find_or_add(i + 1)->wait(round * immediates[i], soon()));
      CHECK(std::equal(source.data.begin(), source.data.begin() + 20'001, target.data.begin()));
      for (ptrdiff_t page = 0; page < 40; ++page) {
        const auto begin = source.data.begin() + 20'001 + page * 500;
        CHECK(std::equal(begin, begin + 450, target.data.begin() + 20'001 + page * 500));
      }
      CHECK(std::equal(source.data.begin() + 40'001, source.data.begin() + 49'999,
                       target.data.begin() + 40'001));
      std::ranges::fill(target.data, std::byte{0});
    }
    CHECK(to.imm_table().discarded() == 0);
  });
}

TEST_CASE("engine over libfabric: a peer that closes fails what is sent to it, others go on") {
  for_each_fabric([](const std::string& settings) {
    if (settings.find("shm") != settings.npos) {
      MESSAGE("skipped: libfabric's shm does not notice that a peer is gone");
      return;
    }
    TransferEngine from(fabric_options(settings, 2)), stays(fabric_options(settings, 1));
    auto leaves = std::make_unique<TransferEngine>(fabric_options(settings, 2));
    proxy::ProxyThread first(from, {}), second(stays, {});
    Buffer source(from, pattern(200'000)), kept(stays, std::vector<std::byte>(200'000));
    const auto* to_kept = from.resolve(stays.descriptor(kept.handle));
    auto lost = std::make_unique<Buffer>(*leaves, std::vector<std::byte>(200'000));
    const auto* to_lost = from.resolve(leaves->descriptor(lost->handle));
    leaves.reset();  // before anything was sent
    Request doomed(Write{source.handle, 0, to_lost, 0, 200'000, 1});
    Request good(Write{source.handle, 0, to_kept, 0, 200'000, 1});
    from.submit(doomed);
    from.submit(good);
    REQUIRE(good.wait(soon()));
    CHECK(good.status().ok());
    from.disconnect(to_lost->owner);
    REQUIRE(doomed.wait(soon()));
    CHECK((doomed.status().code == base::Code::kPeerDead ||
           doomed.status().code == base::Code::kClosed));
    REQUIRE(stays.imm_table().find_or_add(1)->wait(2, soon()));
    CHECK(kept.data == source.data);
  });
}

}  // namespace
}  // namespace moe_p2p::test
