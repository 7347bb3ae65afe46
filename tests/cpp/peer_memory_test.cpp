// Memory of GPUs that other processes map: what the driver gives no handle of, and how often it is
// open. This process passes for another one.
#include "platform/peer_memory.h"

#include <array>
#include <optional>

#include "doctest/doctest.h"
#include "fake_driver.h"

namespace moe_p2p::test {
namespace {

using platform::describe_gpu_memory;
using platform::PeerMemory;

struct Shared {
  FakeDriver& fake = FakeDriver::install();
  std::array<std::byte, 1000> memory{};
  explicit Shared(bool pool = false) {
    fake.share_memory(true);
    fake.allocate(memory, pool);
  }
  ~Shared() {
    fake.free_memory(memory);
    fake.share_memory(false);
  }
};

TEST_CASE("peer memory: a place within an allocation is found at the same distance") {
  Shared shared;
  auto description = describe_gpu_memory(&shared.memory[300], 200, 0);
  REQUIRE(description.why_not == "");
  CHECK(PeerMemory(description.bytes, 1).data() == &shared.memory[300]);  // of this process
  CHECK(shared.fake.num_mapped() == 0);
  description.bytes[0] ^= std::byte{1};  // of another one
  std::optional<PeerMemory> first(std::in_place, description.bytes, 1);
  {
    const PeerMemory second(description.bytes, 1);
    CHECK(second.data() == &shared.memory[300]);
  }
  CHECK(shared.fake.num_mapped() == 1);  // one is open still
  first.reset();
  CHECK(shared.fake.num_mapped() == 0);
}

TEST_CASE("peer memory: what has no handle is refused by name") {
  Shared pool(true);
  const auto description = describe_gpu_memory(pool.memory.data(), 100, 0);
  CHECK(description.bytes.empty());
  CHECK(description.why_not == "asking for a handle: fake error (1)");
  const Shared shared;
  const auto beyond = describe_gpu_memory(&shared.memory[900], 101, 0);
  CHECK(beyond.bytes.empty());
  CHECK(beyond.why_not == "it lies in several allocations");
}

TEST_CASE("peer memory: GPUs of one process use memory of each other, where they can") {
  Shared shared;
  const auto description = describe_gpu_memory(shared.memory.data(), 100, 1).bytes;
  for (int times = 0; times < 2; ++times)
    CHECK(PeerMemory(description, 0).data() == shared.memory.data());
  shared.fake.reach_peers(false);
  CHECK_THROWS_WITH_AS(PeerMemory(description, 0), doctest::Contains("(217)"), base::Error);
  CHECK_NOTHROW(PeerMemory(description, 1));  // of the same GPU
  shared.fake.reach_peers(true);
}

TEST_CASE(
    "peer memory: memory that was freed is refused, and other memory at its place meanwhile") {
  std::optional<Shared> shared(std::in_place);
  auto old = describe_gpu_memory(shared->memory.data(), 100, 0).bytes;
  old[0] ^= std::byte{1};
  std::optional<PeerMemory> mapped(std::in_place, old, 0);
  shared->fake.free_memory(shared->memory);
  CHECK_THROWS_WITH_AS(PeerMemory(old, 0), doctest::Contains("(1)"), base::Error);
  shared->fake.allocate(shared->memory);
  auto fresh = describe_gpu_memory(shared->memory.data(), 100, 0).bytes;
  fresh[0] ^= std::byte{1};
  CHECK_THROWS_WITH_AS(PeerMemory(fresh, 0), doctest::Contains("(208)"), base::Error);
  mapped.reset();
  CHECK_NOTHROW(PeerMemory(fresh, 0));
}

}  // namespace
}  // namespace moe_p2p::test
