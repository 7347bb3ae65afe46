#include "fake_driver_memory.h"

#include <algorithm>
#include <bit>

#include "fake_driver.h"

namespace moe_p2p::test {

namespace {

// CUresult
constexpr int kInvalid = 1;
constexpr int kAlreadyMapped = 208, kNoPeerAccess = 217;
constexpr int kPeerAccessAlready = 704, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kNotPermitted = 800;

FakeDriver& memory_of_fake() { return FakeDriver::install(); }

const FakeDriver::Allocation* allocation_at(FakeDriver& f, uint64_t address) {
  for (const auto& each : f.allocations) {
    const auto base = reinterpret_cast<uint64_t>(each.memory.data());
    if (address >= base && address < base + each.memory.size()) return &each;
  }
  return nullptr;
}
struct Handle {
  uint64_t id, base;
  char padding[48];
};
static_assert(sizeof(Handle) == sizeof(platform::IpcHandle));

}  // namespace

int address_range(uint64_t* base, size_t* bytes, uint64_t address) {
  return memory_of_fake().locked([&](FakeDriver& f) {
    const auto* const found = allocation_at(f, address);
    *base = found ? reinterpret_cast<uint64_t>(found->memory.data()) : address;
    *bytes = found ? found->memory.size() : size_t{1} << 40;
    return 0;
  });
}
// Of the base of what cuMemAlloc returned only.
int ipc_get(platform::IpcHandle* handle, uint64_t base) {
  if (const int error = refusal(); error != 0) return error;
  return memory_of_fake().locked([&](FakeDriver& f) {
    const auto* const found = allocation_at(f, base);
    if (!f.shares_memory || (found && found->pool)) return kInvalid;
    if (found && base != reinterpret_cast<uint64_t>(found->memory.data())) return kInvalid;
    *handle = std::bit_cast<platform::IpcHandle>(Handle{found ? found->id : 0, base, {}});
    return 0;
  });
}
// Counts how often a handle is opened. Refuses memory that was freed, and other memory at an
// address at which freed memory of the same process is still mapped.
int ipc_open(uint64_t* address, platform::IpcHandle handle, unsigned flags) {
  if (const int error = refusal(); error != 0) return error;
  const auto given = std::bit_cast<Handle>(handle);
  return memory_of_fake().locked([&](FakeDriver& f) {
    const auto* const found = allocation_at(f, given.base);
    if (flags != 1 || !found || found->id != given.id) return kInvalid;
    *address = given.base;
    for (auto& mapping : f.mappings) {
      if (mapping.id == given.id) return ++mapping.count, 0;
      const bool apart = mapping.base + mapping.bytes <= given.base ||
                         given.base + found->memory.size() <= mapping.base;
      if (!apart) return kAlreadyMapped;
    }
    f.mappings.push_back({given.id, given.base, found->memory.size(), 1});
    return 0;
  });
}
int ipc_close(uint64_t base) {
  if (const int error = refusal(); error != 0) return error;
  return memory_of_fake().locked([&](FakeDriver& f) {
    const auto mapping = std::ranges::find(f.mappings, base, &FakeDriver::Mapping::base);
    if (mapping == f.mappings.end()) return kInvalid;
    if (--mapping->count == 0) f.mappings.erase(mapping);
    return 0;
  });
}

int enable_peer(void* context, unsigned) {
  if (const int error = refusal(); error != 0) return error;
  return memory_of_fake().locked([&](FakeDriver& f) {
    if (!f.reaches_peers) return kNoPeerAccess;
    return f.peers.insert({current_context(), context}).second ? 0 : kPeerAccessAlready;
  });
}
int host_register(void* memory, size_t bytes, unsigned) {
  if (const int error = refusal(); error != 0) return error;
  const auto address = reinterpret_cast<uint64_t>(memory);
  if (address % 4096 != 0 || bytes % 4096 != 0) return kInvalid;
  return memory_of_fake().locked([&](FakeDriver& f) {
    if (!f.registers_pages) return kNotPermitted;
    return f.registered.insert(memory).second ? 0 : kAlreadyRegistered;
  });
}
int host_unregister(void* memory) {
  if (const int error = refusal(); error != 0) return error;
  return memory_of_fake().locked(
      [&](FakeDriver& f) { return f.registered.erase(memory) == 1 ? 0 : kNotRegistered; });
}

void FakeDriver::allocate(std::span<std::byte> memory, bool pool) {
  locked([&](FakeDriver& f) { f.allocations.push_back({memory, pool, ++f.num_allocations}); });
}
void FakeDriver::free_memory(std::span<std::byte> memory) {
  locked([&](FakeDriver& f) {
    std::erase_if(f.allocations,
                  [&](const Allocation& each) { return each.memory.data() == memory.data(); });
  });
}
size_t FakeDriver::num_mapped() {
  return locked([](FakeDriver& f) { return f.mappings.size(); });
}

}  // namespace moe_p2p::test
