// The contract of provider/provider.h, third part: GPU memory under an engine. What a NIC wrote is
// visible to all readers of the memory when the engine counts the immediate, also where the GPU
// orders a device's writes less than its readers need; and no GPU is flushed that need not be.
#include <algorithm>

#include "engine/transfer_engine.h"
#include "provider_table.h"

namespace moe_p2p::provider_test {
namespace {

using engine::Request;
using engine::TransferEngine;
using test::FakeDriver;

template <typename Body>
void for_each_gpu_provider(Body&& body) {
  for_each_provider([&](const ProviderUnderTest& provider) {
    if (provider.memory == MemoryKind::kCuda) body(provider);
  });
}

bool is_software(const ProviderUnderTest& provider) {
  return std::string_view(provider.name) == "loopback" ||
         std::string_view(provider.name) == "timed";
}

// Sets how the fake GPUs order writes; as before at the end.
struct Ordering {
  explicit Ordering(int ordering, int flush_error = 0, int flush_options = 1) {
    FakeDriver::install().locked([&](FakeDriver& f) {
      f.writes_ordering = ordering, f.flush_error = flush_error, f.flush_options = flush_options;
    });
  }
  ~Ordering() {
    FakeDriver::install().locked(
        [](FakeDriver& f) { f.writes_ordering = 200, f.flush_error = 0, f.flush_options = 1; });
  }
};
uint64_t num_flushes() {
  return FakeDriver::install().locked([](FakeDriver& f) { return f.flushes; });
}

// Memory of a GPU, registered at an engine.
struct GpuMemory {
  GpuMemory(TransferEngine& at, size_t bytes, int device, bool read_by_neighbours)
      : engine(at),
        data(bytes),
        span{data.data(), data.size(), MemoryKind::kCuda, device, read_by_neighbours},
        handle(at.register_memory(span)) {
    FakeDriver::install().place(data, device, read_by_neighbours ? 200 : 100);
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() {
    FakeDriver::install().take_back(data);
    engine.unregister_memory(handle);
  }

  TransferEngine& engine;
  std::vector<std::byte> data;
  const MemorySpan span;
  const engine::MemoryHandle* handle;
};

// Two engines of one NIC, polled by the test.
struct EnginePair {
  explicit EnginePair(const ProviderUnderTest& provider)
      : a(options(provider)),
        b(options(provider)),
        maps_windows(!provider.by_ring && !provider.lent) {}

  static engine::EngineOptions options(const ProviderUnderTest& provider) {
    test::FakeFabric::use_for(provider.settings);
    return {.provider = provider.name, .num_nics = 1, .settings = provider.settings};
  }
  template <typename Ready>
  bool pump(Ready&& ready) {
    return test::poll_until([this] { return a.progress() | b.progress(); }, ready);
  }
  template <typename Ready>
  bool pump_for(Ready&& ready) {
    for (int turns = 0; turns < 1000 && !ready(); ++turns) a.progress(), b.progress();
    return ready();
  }
  uint64_t count(uint32_t imm) { return b.imm_table().value(imm); }
  const engine::RemoteRegion* region(const GpuMemory& target) {
    const auto* found = a.resolve(b.descriptor(target.handle));
    if (maps_windows) a.map_region(found, target.span);
    return found;
  }

  TransferEngine a, b;
  const bool maps_windows;
};

TEST_CASE("provider contract: GPU memory is visible to its readers when an immediate is counted") {
  for_each_gpu_provider([](const ProviderUnderTest& provider) {
    for (const int ordering : {0, 100, 200}) {
      for (const bool neighbours : {false, true}) {
        CAPTURE(ordering);
        CAPTURE(neighbours);
        const Ordering as(ordering);
        EnginePair engines(provider);
        GpuMemory source(engines.a, 20 * 1000, 0, neighbours);
        GpuMemory target(engines.b, 20 * 1000, 0, neighbours);
        const uint64_t before = num_flushes();
        const auto* region = engines.region(target);
        std::vector<std::unique_ptr<Request>> writes;
        for (uint32_t i = 0; i < 20; ++i) {
          fill(std::span(source.data).subspan(i * 1000, 1000), i);
          writes.push_back(std::make_unique<Request>(
              engine::Write{source.handle, i * 1000, region, i * 1000, 1000, i}));
          engines.a.submit(*writes.back());
        }
        size_t num_seen = 0, num_wrong = 0;
        std::vector<bool> seen(20);
        CHECK(engines.pump([&] {
          for (uint32_t i = 0; i < 20; ++i) {
            if (seen[i] || engines.count(i) == 0) continue;
            seen[i] = true;
            ++num_seen;
            if (!holds(std::span(target.data).subspan(i * 1000, 1000), i)) ++num_wrong;
          }
          return num_seen == 20;
        }));
        CHECK(num_wrong == 0);
        CHECK(engines.pump([&] {
          return std::ranges::all_of(writes, [](const auto& write) { return write->done(); });
        }));
        const bool needed = !is_software(provider) && ordering < (neighbours ? 200 : 100);
        CHECK((num_flushes() > before) == needed);
      }
    }
  });
}

TEST_CASE("provider contract: GPU memory is flushed for those who read it") {
  struct Ignores final : engine::ImmSink {
    void on_imm(const engine::ImmKey&) noexcept override { ++count; }
    int count = 0;
  };
  for_each_gpu_provider([](const ProviderUnderTest& provider) {
    if (is_software(provider)) return;
    for (const int ordering : {0, 100, 200}) {
      CAPTURE(ordering);
      const Ordering as(ordering);
      EnginePair engines(provider);
      GpuMemory source(engines.a, 1000, 0, true), target(engines.b, 1000, 0, true);
      const auto* region = engines.region(target);
      Ignores sink;
      using enum engine::Readers;
      engines.b.imm_table().set_sink(5, &sink, {kNeighbours, kOwner, kNeighbours, kNobody});
      for (uint32_t phase = 0; phase < 4; ++phase) {
        CAPTURE(phase);
        const uint64_t before = num_flushes();
        const int counted = sink.count;
        Request write(engine::Write{source.handle, 0, region, 0, 1000,
                                    engine::ImmKey{5, phase, 0, 0}.pack()});
        engines.a.submit(write);
        CHECK(engines.pump([&] { return sink.count == counted + 1 && write.done(); }));
        const int needed[] = {200, 100, 200, 0};  // ordering that readers can do without a flush
        CHECK((num_flushes() > before) == (ordering < needed[phase]));
        const auto scope =
            FakeDriver::install().locked([](FakeDriver& f) { return f.flush_scope; });
        if (ordering < needed[phase]) CHECK(scope == needed[phase]);
      }
    }
  });
}

TEST_CASE("provider contract: each GPU whose memory an engine registered is flushed") {
  for_each_gpu_provider([](const ProviderUnderTest& provider) {
    if (is_software(provider)) return;  // one GPU each
    const Ordering owner_only(100);
    EnginePair engines(provider);
    GpuMemory source(engines.a, 1000, 0, true);
    GpuMemory first(engines.b, 1000, 0, true), second(engines.b, 1000, 1, true);
    fill(source.data, 3);
    for (const GpuMemory* target : {&first, &second}) {
      Request write(engine::Write{source.handle, 0, engines.region(*target), 0, 1000, 7});
      const uint64_t before = engines.count(7);
      engines.a.submit(write);
      CHECK(engines.pump([&] { return engines.count(7) == before + 1; }));
      CHECK(holds(target->data, 3));
      CHECK(engines.pump([&] { return write.done(); }));
    }
  });
}

TEST_CASE("provider contract: a GPU that cannot flush keeps its immediates back and says so") {
  for_each_gpu_provider([](const ProviderUnderTest& provider) {
    if (is_software(provider)) return;
    {
      const Ordering failing(100, 700);
      EnginePair engines(provider);
      GpuMemory source(engines.a, 1000, 0, true), target(engines.b, 1000, 0, true);
      Request write(engine::Write{source.handle, 0, engines.region(target), 0, 1000, 7});
      engines.a.submit(write);
      CHECK(engines.pump([&] { return write.done() && !engines.b.first_failure().empty(); }));
      CHECK(engines.count(7) == 0);
      for (const std::string& text : {engines.b.first_failure(), engines.b.gpu_flush_failure()})
        CHECK(text.find("fake error (700)") != std::string::npos);
      CHECK(engines.b.gpu_flush_failed());
      // Also when the GPU can again: what came before is lost.
      FakeDriver::install().locked([](FakeDriver& f) { f.flush_error = 0; });
      Request again(engine::Write{source.handle, 0, engines.region(target), 0, 1000, 7});
      engines.a.submit(again);
      CHECK(engines.pump([&] { return again.done(); }));
      CHECK_FALSE(engines.pump_for([&] { return engines.count(7) != 0; }));
    }
    const Ordering helpless(100, 0, 0);
    EnginePair engines(provider);
    CHECK_THROWS_WITH_AS(GpuMemory(engines.a, 64, 0, true), doctest::Contains("flush"),
                         base::Error);
    const GpuMemory for_itself(engines.a, 64, 0, false);  // its order suffices
  });
}

// As aarch64 hosts often have them: the driver refuses a dma-buf of parts of a page.
struct HostPages {
  explicit HostPages(long bytes) { FakeDriver::set_host_page(bytes); }
  ~HostPages() { FakeDriver::set_host_page(0); }
};

TEST_CASE("provider contract: dma-bufs of GPU memory are whole pages of the host") {
  for_each_gpu_provider([](const ProviderUnderTest& provider) {
    if (is_software(provider)) return;
    FakeDriver& driver = FakeDriver::install();
    for (const size_t page : {size_t{4096}, size_t{65536}}) {
      CAPTURE(page);
      const HostPages pages(static_cast<long>(page));
      driver.locked([](FakeDriver& f) { f.exported = {}; });
      Node node = open(provider);
      const Memory memory(node, 5000);
      const auto exported = driver.locked([](FakeDriver& f) { return f.exported; });
      REQUIRE(!exported.empty());
      CHECK(reinterpret_cast<uint64_t>(exported.data()) % page == 0);
      CHECK(exported.size() % page == 0);
      CHECK(exported.data() <= memory.data.data());
      CHECK(exported.data() + exported.size() >= memory.data.data() + memory.data.size());
    }
  });
}

}  // namespace
}  // namespace moe_p2p::provider_test
