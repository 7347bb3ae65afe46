// What the tests of the software NIC with GPU memory share: the driver that stands in, and the NIC.
#pragma once

#include <string>

#include "provider_table.h"

namespace moe_p2p::provider_test {

// Put back to what it was at first, or other tests would see what this one did.
struct Driver {
  test::FakeDriver& fake = test::FakeDriver::install();
  ~Driver() {
    fake.hold(false);
    fake.fail_copies(0);
    fake.fail_queries(0);
    fake.set_max_queries(12);
  }
};

constexpr const char* kSettings[] = {"", "seed=6", "seed=7,ring_kib=4"};

inline ProviderUnderTest gpu(const std::string& settings) {
  return {"loopback", settings.c_str(), false, MemoryKind::kCuda};
}

}  // namespace moe_p2p::provider_test
