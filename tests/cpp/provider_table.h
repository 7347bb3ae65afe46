// The providers that the contract suite runs over: a new one is one line in kProviders. Where a
// provider has an adversary the cases run under several seeds; the seed is part of the subcase's
// name:  moe_p2p_tests -tc="provider contract*" -sc="*seed=3*"
#pragma once

#include "fake_fabric.h"
#include "provider_harness.h"

namespace moe_p2p::provider_test {

struct ProviderUnderTest {
  const char* name;
  const char* settings;
  bool reorders = false;  // has an adversary: order must really change, and replay from the seed
  MemoryKind memory = MemoryKind::kHost;
  bool takes_unpolled = false;  // its target takes writes while nobody polls there
  // A refused write takes the connection down with it: others under way fail too, all that the
  // poster learns is that the peer was lost, and it takes a moment until writes get through again.
  bool drops_connection = false;
  // Of libfabric 1.17: shm has no notion of a dead peer; over shm a refused write never completes
  // and stops those after it, over verbs;ofi_rxm the connection that it broke is not made again.
  bool notices_death = true;
  bool recovers = true;
  bool by_ring = false;  // GPU memory of the target is not mapped at the poster
  bool lent = false;     // it is, until its owner takes it back
};

// GPU memory that the target lends, that the poster does not map, and the other libraries' own.
constexpr ProviderUnderTest lent_gpu(const char* name, const char* settings) {
  return {.name = name, .settings = settings, .memory = MemoryKind::kCuda, .lent = true};
}
constexpr ProviderUnderTest ring_gpu(const char* name, const char* settings,
                                     bool reorders = false) {
  return {.name = name,
          .settings = settings,
          .reorders = reorders,
          .memory = MemoryKind::kCuda,
          .by_ring = true};
}
constexpr ProviderUnderTest unpolled(const char* name, const char* settings,
                                     MemoryKind memory = MemoryKind::kHost) {
  return {.name = name, .settings = settings, .memory = memory, .takes_unpolled = true};
}
constexpr ProviderUnderTest connected(const char* settings, bool notices_death = true,
                                      bool recovers = true) {
  return {.name = "libfabric",
          .settings = settings,
          .drops_connection = true,
          .notices_death = notices_death,
          .recovers = recovers};
}

inline const ProviderUnderTest kProviders[] = {
    {"loopback", ""},
    {"loopback", "ring_kib=4,addressing=offset,max_in_flight=20"},
    {"loopback", "seed=1", true},
    {"loopback", "seed=2,ring_kib=4", true},
    {"loopback", "seed=3,ring_kib=16,max_in_flight=64", true},
    {"loopback", "ordered=1"},
    {"loopback", "ordered=1,seed=7,ring_kib=4", true},
    {"loopback", "ordered=1,seed=8", true, MemoryKind::kCuda},
    {"loopback", "", false, MemoryKind::kCuda},
    {"loopback", "ring_kib=4,max_in_flight=20", false, MemoryKind::kCuda},
    {"loopback", "copy_kernel=1", false, MemoryKind::kCuda},
    {"loopback", "seed=4", true, MemoryKind::kCuda},
    {"loopback", "seed=5,ring_kib=4", true, MemoryKind::kCuda},
    lent_gpu("loopback", "row_kernel=77"),
    lent_gpu("loopback", "max_in_flight=20"),
    // Its GPU goes on while nobody polls, so a run does not repeat from the seed.
    lent_gpu("loopback", "seed=7,ring_kib=4,row_kernel=77,max_in_flight=128"),
    lent_gpu("timed", "flush=0,row_kernel=77"),
    ring_gpu("loopback", ""),
    ring_gpu("loopback", "ring_kib=4,max_in_flight=20"),
    ring_gpu("loopback", "seed=6,ring_kib=4", true),
    // Without windows, whose writes carry nothing: the rest of the contract holds for all memory.
    {"timed", ""},
    {"timed", "preset=efa,ring_kib=4,max_in_flight=20"},
    ring_gpu("timed", "flush=0"),
    unpolled("libfabric", "provider=efa,interfaces=efa1"),
    unpolled("libfabric", "provider=efa,interfaces=efa2,max_in_flight=20"),
    unpolled("libfabric", "provider=efa,interfaces=efa3"),
    unpolled("libfabric", "provider=efa,interfaces=efa4", MemoryKind::kCuda),
    connected("provider=tcp,timeout_ms=3000"),
    connected("provider=shm,timeout_ms=500", false, false),
    connected("provider=verbs;ofi_rxm,interfaces=10.77.0.1,timeout_ms=5000", true, false),
    unpolled("verbs", "library=fake"),
    unpolled("verbs", "library=fake,qps_per_peer=3,max_in_flight=20,receives=10"),
    unpolled("verbs", "library=fake", MemoryKind::kCuda),
    unpolled("verbs", "library=fake,ordered_writes=1,qps_per_peer=3,max_in_flight=20"),
    unpolled("verbs", "devices=rxe0,timeout=16,ordered_writes=1"),
};

inline Node open(const ProviderUnderTest& provider, int nic = 0) {
  test::FakeFabric::use_for(provider.settings);
  Node node(provider.name, provider.settings, nic, provider.memory);
  node.maps_windows = !provider.by_ring;
  node.lent_windows = provider.lent;
  return node;
}

// Why the provider cannot run here; empty when it can.
inline std::string why_unavailable(const ProviderUnderTest& provider) {
  try {
    open(provider);
    return "";
  } catch (const base::Error& error) {
    if (error.code() != Code::kUnavailable) throw;
    return error.what();
  }
}
// The same of one in kProviders, asked once: opening one takes milliseconds.
inline const std::string& why_not(const ProviderUnderTest& listed) {
  static std::map<const ProviderUnderTest*, std::string> reasons;
  const auto known = reasons.find(&listed);
  if (known != reasons.end()) return known->second;
  return reasons.emplace(&listed, why_unavailable(listed)).first->second;
}

// Runs body once per line of the table, each as a subcase of its own. A provider that cannot run
// here is skipped with its reason.
template <typename Body>
void for_each_provider(Body&& body) {
  for (const ProviderUnderTest& provider : kProviders) {
    const char* memory = provider.by_ring                       ? " GPU memory by ring"
                         : provider.lent                        ? " lent GPU memory"
                         : provider.memory == MemoryKind::kCuda ? " GPU memory"
                                                                : "";
    const std::string label = base::concat(provider.name, " ", provider.settings, memory);
    SUBCASE(label.c_str()) {
      INFO("provider ", label);
      const std::string& reason = why_not(provider);
      if (reason.empty()) {
        body(provider);
      } else {
        MESSAGE("skipped: ", reason);
      }
    }
  }
}

inline bool is_refusal(const ProviderUnderTest& provider, Code code) {
  return code == Code::kRemoteAccess || (provider.drops_connection && code == Code::kPeerDead);
}

// Two nodes with memory on both sides, connected from `a` to `b`.
struct Pair {
  Pair(const ProviderUnderTest& provider, size_t bytes)
      : a(open(provider)),
        b(open(provider)),
        source(a, bytes),
        target(b, bytes),
        peer(a.connect(b)) {}

  WorkRequest write(uint64_t wr_id, size_t offset, size_t bytes) const {
    return make_write(wr_id, peer, source, offset, target, offset, bytes);
  }
  // Into `source`, from `target`.
  WorkRequest read(uint64_t wr_id, size_t offset, size_t bytes) const {
    return make_read(wr_id, peer, source, offset, target, offset, bytes);
  }
  void post(const WorkRequest& request) { post_all(a, {&a, &b}, request); }
  bool pump_until_done(size_t num) {
    return pump({&a, &b}, [&] { return a.done.size() >= num; });
  }
  // Posts anew until one gets through; for connections that have to be made again.
  bool write_until_done(WorkRequest request) {
    const size_t first = a.done.size();
    return pump({&a, &b}, [&] {
      if (a.done.size() > first && a.code(a.done.back()) == Code::kOk) return true;
      if (a.domain->idle()) a.post(request);
      return false;
    });
  }
  bool pump_until_seen(size_t num_imms) {
    return pump({&a, &b}, [&] { return b.imms.size() >= num_imms; });
  }

  Node a, b;
  Memory source, target;
  PeerId peer;
};

// Requests 0 to num - 1 are posted: once each is done, its slot in `memory` holds its bytes.
inline void check_slots_when_done(Pair& pair, std::span<const std::byte> memory, size_t num,
                                  size_t slot_bytes) {
  size_t num_checked = 0, num_wrong = 0;
  CHECK(pump({&pair.a, &pair.b}, [&] {
    for (; num_checked < pair.a.done.size(); ++num_checked) {
      const uint64_t i = pair.a.done[num_checked];
      if (!holds(memory.subspan(i * slot_bytes, slot_bytes), i)) ++num_wrong;
    }
    return num_checked == num;
  }));
  CHECK(num_wrong == 0);
  CHECK(pair.b.imms.empty());
}

// Ranges of these sizes and offsets, as far as a write may be as long: each request fills the range
// in `to` from `from`, and not a byte beside it.
template <typename Make>
void check_ranges(Pair& pair, const Memory& from, const Memory& to,
                  std::initializer_list<size_t> sizes, std::initializer_list<size_t> offsets,
                  Make&& make) {
  const size_t limit = pair.a.domain->limits().max_write_bytes;
  uint64_t wr_id = 0;
  for (const size_t size : sizes) {
    for (const size_t offset : offsets) {
      if (size > limit) continue;
      std::ranges::fill(to.data, std::byte{0});
      fill(from.data.subspan(offset, size), wr_id);
      pair.post(make(wr_id, offset, size));
      CHECK(pair.pump_until_done(wr_id + 1));
      CHECK(holds(to.data.subspan(offset, size), wr_id));
      CHECK(all_zero(to.data.first(offset)));
      CHECK(all_zero(to.data.subspan(offset + size)));
      ++wr_id;
    }
  }
  CHECK(pair.a.num_failed() == 0);
}

// More requests than fit at once: a full queue takes fewer, and all of them later.
inline void check_full_queue(Pair& pair, std::span<const WorkRequest> requests) {
  size_t posted = pair.a.domain->post(requests);
  CHECK(posted > 0);
  CHECK(posted <= pair.a.domain->limits().max_in_flight);
  CHECK(pump({&pair.a, &pair.b}, [&] {
    posted += pair.a.domain->post(requests.subspan(posted));
    return pair.a.done.size() == requests.size();
  }));
  CHECK(pair.a.num_failed() == 0);
}

// Of 50 immediates, how many are seen before their payload.
inline size_t num_early(const ProviderUnderTest& provider) {
  Pair pair(provider, 50 * 3000);
  size_t num_wrong = 0;
  pair.b.on_imm = [&](uint32_t imm) {
    if (!holds(pair.target.data.subspan(imm * 3000, 3000), imm)) ++num_wrong;
  };
  for (uint32_t i = 0; i < 50; ++i) {
    fill(pair.source.data.subspan(i * 3000, 3000), i);
    pair.post(with_imm(pair.write(i, i * 3000, 3000), i));
  }
  CHECK(pair.pump_until_seen(50));
  CHECK(pair.pump_until_done(50));
  CHECK(pair.b.imms.size() == 50);  // still exactly once
  return num_wrong;
}

}  // namespace moe_p2p::provider_test
