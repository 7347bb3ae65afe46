// What a machine without GDRCopy is told; with a stand-in for it:
// tests/gpu/test_gpu_arrival_flags.py.
#include "platform/mapped_gpu_memory.h"

#include "provider_harness.h"

namespace moe_p2p::platform {
namespace {

TEST_CASE("mapped GPU memory: what is missing is named") {
  const auto text = [](uint64_t address, const char* file) {
    return provider_test::text_of_error([&] { MappedGpuMemory(address, 65536, {file}); });
  };
  CHECK(text(1 << 20, "libnothing.so.9").find("GDRCopy cannot be opened") != std::string::npos);
  CHECK(text(1 << 20, "libc.so.6").find("libgdrapi has no gdr_open") != std::string::npos);
}

}  // namespace
}  // namespace moe_p2p::platform
