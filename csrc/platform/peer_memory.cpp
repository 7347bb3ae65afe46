#include "platform/peer_memory.h"

#include <unistd.h>

#include <random>

#include "base/log.h"
#include "platform/cuda_context.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// As in cuda.h.
constexpr unsigned kLazyPeerAccess = 1;
constexpr int kPeerAccessAlreadyEnabled = 704;

struct Description {
  uint64_t process;
  uint64_t address, offset;  // there, and in its allocation
  int64_t device;
  IpcHandle handle;
};

// A number of this process, which a child does not inherit.
uint64_t this_process() {
  static const uint64_t drawn = [] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }();
  return drawn ^ static_cast<uint64_t>(getpid());
}

}  // namespace

GpuMemoryDescription describe_gpu_memory(const void* data, uint64_t bytes, int device) {
  const DriverTable& table = driver();
  if (!table.address_range || !table.ipc_get || !table.ipc_open || !table.ipc_close)
    return {{}, "the CUDA driver is too old"};
  const ControlGuard current(context_of(device));
  const auto address = reinterpret_cast<uint64_t>(data);
  uint64_t base = 0;
  size_t size = 0;
  int error = table.address_range(&base, &size, address);
  if (error != 0) return {{}, "looking up its allocation: " + driver_error(error)};
  if (address + bytes > base + size) return {{}, "it lies in several allocations"};
  Description found{};
  error = table.ipc_get(&found.handle, base);
  if (error != 0) return {{}, "asking for a handle: " + driver_error(error)};
  found.process = this_process();
  found.address = address, found.offset = address - base, found.device = device;
  base::WireWriter out;
  out.put(found);
  return {out.take(), {}};
}

PeerMemory::PeerMemory(std::span<const std::byte> description, int device) : device_(device) {
  base::WireReader in(description, "description of GPU memory");
  const auto theirs = in.get<Description>();
  in.expect_end();
  const DriverTable& table = driver();
  const ControlGuard current(context_of(device));
  const auto check = [&](int error) {
    MOE_P2P_CHECK(error == 0, Code::kUnavailable, "mapping a peer's GPU memory for device ", device,
                  ": ", driver_error(error));
  };
  if (theirs.process == this_process()) {
    const auto owner = static_cast<int>(theirs.device);
    if (owner != device && table.enable_peer) {
      const int error = table.enable_peer(context_of(owner).get(), 0);
      check(error == kPeerAccessAlreadyEnabled ? 0 : error);
    }
    data_ = reinterpret_cast<std::byte*>(theirs.address);
    return;
  }
  check(table.ipc_open(&opened_, theirs.handle, kLazyPeerAccess));
  data_ = reinterpret_cast<std::byte*>(opened_ + theirs.offset);
}

PeerMemory::~PeerMemory() {
  if (opened_ == 0) return;
  const ControlGuard current(context_of(device_));
  driver().ipc_close(opened_);
}

}  // namespace moe_p2p::platform
