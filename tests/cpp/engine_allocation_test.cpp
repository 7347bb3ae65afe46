// The polling thread allocates nothing: counted by replacing operator new in the test program, for
// the thread that asks for it and only while it asks.
#include <cstdlib>
#include <new>
#include <numeric>
#include <vector>

#include "doctest/doctest.h"
#include "engine/transfer_engine.h"

namespace {

thread_local bool counting = false;
thread_local size_t num_allocations = 0;

void* allocate(size_t bytes) {
  if (counting) ++num_allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
// Not inlined: the compiler would see free() on what it takes for memory of another operator new.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace moe_p2p::test {
namespace {

using namespace engine;

TEST_CASE("engine: neither submitting nor polling allocates") {
  EngineOptions options;
  options.provider = "null";
  options.settings = "max_in_flight=50,max_write_bytes=1000";
  TransferEngine engine(options);
  std::vector<std::byte> data(1 << 16);
  const auto* handle = engine.register_memory({data.data(), data.size()});
  const auto* region = engine.resolve(engine.descriptor(handle));
  std::vector<int64_t> pages(1000);
  std::iota(pages.begin(), pages.end(), 0);
  const std::vector<Slice> slices(9, Slice{0, region, 0, 3000});
  Request requests[4];
  requests[0].operation = Imm{region->owner, 1};
  requests[1].operation = Write{handle, 0, region, 0, data.size(), 1};
  requests[2].operation = WritePages{handle, region, 64, {pages, 64, 0}, {pages, 64, 0}, 1};
  requests[3].operation = Scatter{handle, slices, Scatter::Sharding::kByBytes, 1};
  counting = true;
  for (auto& request : requests) {
    engine.submit(request);
    while (!request.done()) engine.progress();
    engine.submit_from_poller(request);
    while (!request.done()) engine.progress();
  }
  for (uint32_t imm = 0; imm < 100; ++imm) engine.imm_table().deliver(imm);
  counting = false;
  CHECK(num_allocations == 0);
}

}  // namespace
}  // namespace moe_p2p::test
