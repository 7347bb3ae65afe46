// The software NIC with GPU memory that its peers have not mapped: through the ring, between GPUs
// and to and from host memory.
#include <algorithm>

#include "loopback_gpu.h"
#include "seeds.h"

namespace moe_p2p::provider_test {
namespace {

TEST_CASE(
    "loopback GPU: memory that is not mapped here is written by the ring, until it is given back") {
  for (const char* settings : kSettings) {
    Pair pair(gpu(settings), 4000);
    const auto request = with_imm(pair.write(0, 0, 4000), 1);
    pair.target.unmap();
    fill(pair.source.data, 3);
    pair.post(request);
    CHECK(pair.pump_until_seen(1));
    CHECK(holds(pair.target.data, 3));
    CHECK(pair.pump_until_done(1));
    pair.target.unregister();
    fill(pair.source.data, 4);
    pair.post(request);
    CHECK(pair.pump_until_done(2));
    CHECK(pair.a.code(0) == Code::kRemoteAccess);
    CHECK(holds(pair.target.data, 3));
  }
}

TEST_CASE("loopback GPU: host memory and GPU memory are written to each other") {
  const Driver driver;
  for (const char* settings : kSettings) {
    for (const size_t bytes : {size_t{1}, size_t{4000}, size_t{300'001}}) {
      for (const uint32_t slow : {0u, 12u, 60u}) {
        driver.fake.set_max_queries(slow);
        Node gpu_node = open(gpu(settings)), host_node("loopback", settings);
        const PeerId to_host = gpu_node.connect(host_node), to_gpu = host_node.connect(gpu_node);
        Memory on_gpu(gpu_node, 2 * bytes), on_host(host_node, 2 * bytes);
        fill(on_host.data.first(bytes), 3);
        bool in_place = false;
        gpu_node.on_imm = [&](uint32_t) { in_place = holds(on_gpu.data.last(bytes), 3); };
        post_all(host_node, {&gpu_node, &host_node},
                 with_imm(make_write(0, to_gpu, on_host, 0, on_gpu, bytes, bytes), 1));
        CHECK(pump({&gpu_node, &host_node}, [&] { return gpu_node.imms.size() == 1; }));
        CHECK(in_place);
        CHECK(all_zero(on_gpu.data.first(bytes)));
        host_node.on_imm = [&](uint32_t) { in_place = holds(on_host.data.last(bytes), 3); };
        in_place = false;
        post_all(gpu_node, {&gpu_node, &host_node},
                 with_imm(make_write(0, to_host, on_gpu, bytes, on_host, bytes, bytes), 1));
        CHECK(pump({&gpu_node, &host_node}, [&] { return host_node.imms.size() == 1; }));
        CHECK(in_place);
        CHECK(pump({&gpu_node, &host_node},
                   [&] { return gpu_node.done.size() == 1 && host_node.done.size() == 1; }));
        CHECK(host_node.code(0) == Code::kOk);
        CHECK(gpu_node.code(0) == Code::kOk);
      }
    }
  }
}

ProviderUnderTest by_ring(const std::string& settings) {
  ProviderUnderTest provider = gpu(settings);
  provider.by_ring = true;
  return provider;
}

TEST_CASE("loopback GPU: by the ring too an immediate never comes before its payload") {
  const Driver driver;
  for (uint32_t seed = 0; seed < num_seeds(21); ++seed) {
    driver.fake.set_max_queries(seed % 3 * 40);
    const auto settings = base::concat("seed=", seed, ",ring_kib=", 4 << seed % 3);
    CAPTURE(settings);
    CHECK(num_early(by_ring(settings)) == 0);
  }
}

TEST_CASE("loopback GPU: a ring is not given back while a GPU copies into it or out of it") {
  const Driver driver;
  for (const char* settings : kSettings) {
    for (const bool upload : {false, true}) {
      CAPTURE(upload);
      // One side is on the host, so that the GPU's copies are those of the sender or the receiver.
      Node left = upload ? Node("loopback", settings) : open(gpu(settings));
      Node target = upload ? open(gpu(settings)) : Node("loopback", settings);
      Memory source(left, 3000), to(target, 3000), bytes(target, 3000);
      const PeerId first = left.connect(target);
      driver.fake.hold(true);
      fill(source.data, 1);
      post_all(left, {&left, &target}, with_imm(make_write(0, first, source, 0, to, 0, 3000), 1));
      settle({&left, &target}, 400);
      CHECK(target.imms.empty());
      left.domain->disconnect(first);
      CHECK(pump({&left, &target}, [&] { return left.done.size() == 1; }));
      CHECK(left.code(0) == Code::kClosed);
      // The next one gets another channel, or this one when the copy is done.
      driver.fake.hold(false);
      const PeerId second = left.connect(target);
      fill(source.data, 2);
      post_all(left, {&left, &target},
               with_imm(make_write(1, second, source, 0, bytes, 0, 3000), 2));
      CHECK(pump({&left, &target}, [&] { return std::ranges::count(target.imms, 2u) == 1; }));
      CHECK(holds(bytes.data, 2));
      CHECK(pump({&left, &target}, [&] { return left.done.size() == 2; }));
    }
  }
}

TEST_CASE("loopback GPU: copies into a ring and out of it that fail, fail their writes") {
  const Driver driver;
  for (const char* settings : kSettings) {
    Pair pair(by_ring(settings), 64 * 3000);
    const auto post = [&](uint64_t first) {
      for (uint64_t i = first; i < first + 20; ++i)
        pair.post(with_imm(pair.write(i, i * 3000, 3000), static_cast<uint32_t>(i)));
    };
    post(0);
    pair.a.poll();
    driver.fake.fail_copies(719);
    post(20);
    CHECK(pair.pump_until_done(40));
    driver.fake.fail_copies(0);
    for (uint64_t i = 20; i < 40; ++i) CHECK(pair.a.code(i) == Code::kTransport);
    post(40);
    CHECK(pair.pump_until_done(60));
    settle({&pair.a, &pair.b}, 500);
    for (uint64_t i = 40; i < 60; ++i) CHECK(pair.a.code(i) == Code::kOk);
    for (const uint32_t imm : pair.b.imms) CHECK(pair.a.code(imm) == Code::kOk);
  }
}

TEST_CASE("loopback GPU: nothing is written by the ring to memory that was given back") {
  for (const char* settings : kSettings) {
    constexpr size_t kBytes = 20'000;
    Node a("loopback", settings), b = open(gpu(settings));
    const PeerId peer = a.connect(b);
    Memory source(a, kBytes);
    fill(source.data, 1);
    Traffic traffic(a, b, 4);
    for (size_t turn = 1; turn <= 20; ++turn) {
      Memory target(b, kBytes);
      const auto request = make_write(turn, peer, source, 0, target, 0, kBytes);
      traffic.post(request, 4 * (turn - 1) + turn % 3);
      target.unregister();
      std::ranges::fill(target.data, std::byte{0});  // a copy under way would be a data race
      traffic.wait(4 * turn);
      CHECK(all_zero(target.data));
    }
  }
}

}  // namespace
}  // namespace moe_p2p::provider_test
