// Two NICs of the fake libibverbs, connected from `a` to `b`, with memory at both.
#pragma once

#include <algorithm>

#include "provider_harness.h"
#include "verbs_fake.h"

namespace moe_p2p::provider_test {

using test::FakeVerbs;

struct FakePair {
  explicit FakePair(const std::string& settings = "", MemoryKind memory = MemoryKind::kHost)
      : fake(FakeVerbs::install()),
        a("verbs", "library=fake," + settings, 0, memory),
        b("verbs", "library=fake," + settings, 1, memory),
        source(a, kBytes),
        target(b, kBytes),
        peer(a.connect(b)) {
    fill(source.data, 1);
  }
  ~FakePair() {
    CHECK(counters().busy == 0);
    CHECK(counters().lock_violations == 0);
    CHECK(counters().overruns == 0);
    CHECK(counters().full_receives == 0);
    FakeVerbs::install();
  }

  // `num` writes with immediates 0.., given to the NIC together.
  std::vector<WorkRequest> writes(uint32_t num, size_t bytes) const {
    std::vector<WorkRequest> all;
    for (uint32_t i = 0; i < num; ++i)
      all.push_back(with_imm(make_write(i, peer, source, i * bytes, target, i * bytes, bytes), i));
    return all;
  }
  bool pump_until_done(size_t num) {
    return pump({&a, &b}, [&] { return a.done.size() >= num; });
  }
  void set(const FakeVerbs::Faults& faults) {
    fake.locked([&](FakeVerbs& f) { f.faults = faults; });
  }
  FakeVerbs::Counters counters() {
    return fake.locked([](FakeVerbs& f) { return f.counters; });
  }

  static constexpr size_t kBytes = 100'000;
  FakeVerbs& fake;
  Node a, b;
  Memory source, target;
  PeerId peer;
};

inline std::vector<uint32_t> sorted(std::vector<uint32_t> values) {
  std::sort(values.begin(), values.end());
  return values;
}
inline std::vector<uint32_t> all_but(uint32_t num, uint32_t missing) {
  std::vector<uint32_t> values;
  for (uint32_t i = 0; i < num; ++i)
    if (i != missing) values.push_back(i);
  return values;
}

}  // namespace moe_p2p::provider_test
