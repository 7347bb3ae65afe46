// Engine, proxy and libfabric together: every kind of request over tcp, shm and the fake of EFA,
// with different numbers of NICs at both ends, and a peer that closes.
#include "engine_traffic.h"
#include "fake_fabric.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::test {
namespace {

using namespace engine;

EngineOptions fabric_options(const std::string& settings, int num_nics) {
  return engine_options("libfabric", settings, num_nics);
}

// Runs body(settings) for each provider that is here.
template <typename Body>
void for_each_fabric(Body&& body) {
  for (const char* settings :
       {"provider=efa,interfaces=efa1:efa2:efa3", "provider=tcp,timeout_ms=5000",
        "provider=shm,timeout_ms=5000",
        "provider=verbs;ofi_rxm,interfaces=10.77.0.1:10.77.0.2,timeout_ms=5000"}) {
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
    check_every_kind_of_request(from, to);
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
    REQUIRE(stays.imm_table().wait(1, 2, soon()));
    CHECK(kept.data == source.data);
  });
}

}  // namespace
}  // namespace moe_p2p::test
