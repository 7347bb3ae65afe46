// Called by kernels and their memory accesses: the instructions that ptx.cuh stands for, the hooks
// of the compiler, and the faults that tests plant.
#include "tests/emulation/launch.h"

#include <fstream>
#include <set>

namespace moe_p2p::emulation {
namespace {
const std::string& mutation() {
  static const std::string name = [] {
    const char* given = std::getenv("MOE_P2P_MUTATION");
    return std::string(given ? given : "");
  }();
  return name;
}
// Of an atomic access. The compiler checks others (-fsanitize=alignment).
template <size_t Bytes>
void check_aligned(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % Bytes != 0) moe_p2p_misaligned(at, Bytes);
}
// Lines that order memory and have run, by a hash of their place in the library of a kernel.
struct Line {
  const char* file;
  unsigned number;
};
std::array<std::atomic<const Line*>, 1 << 16> ordered;
void note(const std::source_location& site) {
  size_t at = (reinterpret_cast<uintptr_t>(site.file_name()) >> 3) * 31 + site.line();
  for (;; ++at) {
    auto& place = ordered[at % ordered.size()];
    const Line* known = place.load(std::memory_order_acquire);
    if (!known) {
      const auto* made = new Line{site.file_name(), site.line()};
      if (place.compare_exchange_strong(known, made)) return;
      delete made;
    }
    if (known->file == site.file_name() && known->number == site.line()) return;
  }
}
}  // namespace

extern "C" {

void moe_p2p_misaligned(const void* at, size_t bytes) {
  char text[80];
  std::snprintf(text, sizeof text, "%zu bytes at %p are not aligned", bytes, at);
  fail(text);
}

bool moe_p2p_mutated(const char* name) { return !mutation().empty() && mutation() == name; }
bool moe_p2p_orders(const std::source_location& site) {
  note(site);
  static const size_t colon = mutation().find(':');
  if (colon == std::string::npos) return true;
  static const unsigned at = static_cast<unsigned>(std::stoul(mutation().substr(colon + 1)));
  static const std::string name = "/" + mutation().substr(0, colon);
  return site.line() != at || !std::string_view(site.file_name()).ends_with(name);
}
void moe_p2p_write_ordered(const char* to) {
  std::set<std::string> names;
  for (const auto& place : ordered)
    if (const Line* line = place.load()) {
      const std::string_view file = line->file;
      const size_t begin = file.rfind("kernels/") + std::string_view("kernels/").size();
      names.insert(std::string(file.substr(begin)) + ":" + std::to_string(line->number));
    }
  std::ofstream file(to);
  for (const std::string& name : names) file << name << "\n";
}
const Thread& moe_p2p_thread() { return current->fiber(); }
void moe_p2p_pause() { current->pause(); }
const uint64_t* moe_p2p_warp(uint32_t mask, uint64_t value, bool orders) {
  return current->warp(mask, value, orders);
}
Votes moe_p2p_meet(int id, unsigned num_threads, bool vote) {
  return current->meet(id, num_threads, vote);
}
void moe_p2p_barrier_init(uint64_t* barrier, unsigned num_arrivals) {
  const auto count = static_cast<uint16_t>(num_arrivals);
  *reinterpret_cast<Barrier*>(barrier) = {.bytes = 0, .pending = count, .expected = count};
}
void moe_p2p_barrier_expect(uint64_t* barrier, unsigned bytes) {
  current->arrive(barrier);
  auto& b = *reinterpret_cast<Barrier*>(barrier);
  b.bytes += static_cast<int32_t>(bytes);
  --b.pending;
  b.settle();
}
bool moe_p2p_barrier_test(uint64_t* barrier, bool parity) {
  if (reinterpret_cast<const Barrier*>(barrier)->parity() == parity) return false;
  current->depart(barrier);
  return true;
}
void moe_p2p_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  current->actor().copies_global(from, bytes);
  current->copy(
      {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, barrier, {}});
}
void moe_p2p_store(void* to, const void* from, uint32_t bytes) {
  current->actor().copies_shared(from, bytes);
  current->actor().begins(to, bytes);
  current->store(
      {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, nullptr, {}});
}
void moe_p2p_commit() { current->commit(); }
void moe_p2p_wait_stores(unsigned num_left, bool written) {
  current->wait_stores(num_left, written);
}
void moe_p2p_arrive(const void* word) { current->arrive(word); }
void moe_p2p_depart(const void* word) { current->depart(word); }
void moe_p2p_release(const void* word, bool to_system) {
  current->actor().release(word, to_system);
}
void moe_p2p_release_too(const void* word) {
  current->actor().release_too(word, /*to_system=*/false);
}
void moe_p2p_saw(const void* word) { current->actor().saw(word); }
void moe_p2p_marked(const void* word) { current->actor().marked(word); }
void moe_p2p_acquire(const void* word) { current->actor().acquire(word); }
void moe_p2p_fence() { current->actor().fence(); }
void moe_p2p_let_next_begin() { current->let_next_begin(); }
void moe_p2p_wait_for_kernels() { current->wait_for_kernels(); }
void moe_p2p_fence_global() { current->actor().fence_global(); }
void moe_p2p_fence_shared() { current->actor().fence_shared(); }
void moe_p2p_signal_host(const void* word) { current->actor().signals_host(word); }
void moe_p2p_host_memory(const void* at, size_t bytes) { order::add_host_memory(at, bytes); }
void moe_p2p_no_host_memory(const void* at) { order::remove_host_memory(at); }
void moe_p2p_shared_memory(const void* at, size_t bytes) { order::add_shared_memory(at, bytes); }
void moe_p2p_no_shared_memory(const void* at, size_t bytes) {
  order::remove_shared_memory(at, bytes);
}
void moe_p2p_st_block(uint32_t* word, uint32_t value) { current->st_block(word, value); }
uint32_t moe_p2p_ld_block(const uint32_t* word) { return current->ld_block(word); }

// Called by code compiled with -fsanitize=thread, before each access of a kernel to memory.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): its names
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define MOE_P2P_ACCESS(bytes)                                                    \
  void __tsan_read##bytes(void* at) {                                            \
    if (current) current->actor().read(at, bytes, __builtin_return_address(0));  \
  }                                                                              \
  void __tsan_unaligned_read##bytes(void* at) {                                  \
    if (current) current->actor().read(at, bytes, __builtin_return_address(0));  \
  }                                                                              \
  void __tsan_write##bytes(void* at) {                                           \
    if (current) current->actor().wrote(at, bytes, __builtin_return_address(0)); \
  }                                                                              \
  void __tsan_unaligned_write##bytes(void* at) {                                 \
    if (current) current->actor().wrote(at, bytes, __builtin_return_address(0)); \
  }
MOE_P2P_ACCESS(1)
MOE_P2P_ACCESS(2)
MOE_P2P_ACCESS(4)
MOE_P2P_ACCESS(8)
MOE_P2P_ACCESS(16)
#undef MOE_P2P_ACCESS
void __tsan_read_range(void* at, size_t bytes) {
  if (current) current->actor().read(at, bytes, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t bytes) {
  if (current) current->actor().wrote(at, bytes, __builtin_return_address(0));
}
#define MOE_P2P_ATOMIC(bits)                                                                  \
  uint##bits##_t __tsan_atomic##bits##_load(const uint##bits##_t* p, int) {                   \
    check_aligned<bits / 8>(p);                                                               \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                              \
  }                                                                                           \
  void __tsan_atomic##bits##_store(uint##bits##_t* p, uint##bits##_t v, int) {                \
    check_aligned<bits / 8>(p);                                                               \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_exchange(uint##bits##_t* p, uint##bits##_t v, int) {   \
    check_aligned<bits / 8>(p);                                                               \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                                       \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(uint##bits##_t* p, uint##bits##_t v, int) {  \
    check_aligned<bits / 8>(p);                                                               \
    return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST);                                        \
  }                                                                                           \
  uint##bits##_t __tsan_atomic##bits##_fetch_or(uint##bits##_t* p, uint##bits##_t v, int) {   \
    check_aligned<bits / 8>(p);                                                               \
    return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);                                         \
  }                                                                                           \
  int __tsan_atomic##bits##_compare_exchange_strong(uint##bits##_t* p, uint##bits##_t* old,   \
                                                    uint##bits##_t v, int, int) {             \
    check_aligned<bits / 8>(p);                                                               \
    return __atomic_compare_exchange_n(p, old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
MOE_P2P_ATOMIC(32)
MOE_P2P_ATOMIC(64)
#undef MOE_P2P_ATOMIC
void __tsan_atomic_thread_fence(int) {}
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)
}

}  // namespace moe_p2p::emulation
