#include "provider/libfabric/memory.h"

#include <cerrno>
#include <string>
#include <utility>

#include "base/log.h"
#include "platform/exported_memory.h"
#include "provider/locked_memory.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

// libfabric's description of a dma-buf.
Dmabuf description_of(const platform::ExportedMemory& memory, size_t bytes) {
  Dmabuf dmabuf{};
  dmabuf.fd = memory.fd();
  dmabuf.offset = memory.offset();
  dmabuf.len = bytes;
  dmabuf.base_addr = reinterpret_cast<void*>(memory.begin());
  return dmabuf;
}

}  // namespace

Regions::Regions(const Session& session, std::string name)
    : session_(session), name_(std::move(name)) {}

// Keys that we choose are random: a key of another NIC, or a key that was given back, must not be
// valid.
uint64_t Regions::next_key() {
  if (session_.mr_mode(kMrProvKey)) return 0;
  const size_t bytes = session_.info->domain_attr->mr_key_size;
  const uint64_t key = random_() >> 1;  // never all ones
  return bytes >= 8 ? key : key & ((uint64_t{1} << bytes * 8) - 1);
}

Owned<MemoryRegion> Regions::open(const MemorySpan& span) {
  using enum Session::GpuMemory;
  const bool on_gpu = span.kind == MemoryKind::kCuda;
  const char* what = on_gpu ? " bytes of GPU memory: " : " bytes: ";
  MOE_P2P_CHECK(span.data != nullptr && span.bytes > 0, Code::kInvalidArgument, name_,
                ": registering ", span.bytes, " bytes at ", static_cast<const void*>(span.data));
  MOE_P2P_CHECK(!on_gpu || session_.gpu_memory != kNone, Code::kUnavailable, name_,
                ": cannot write GPU memory: ", session_.why_no_hmem);
  const iovec whole{span.data, span.bytes};
  MrAttr attr{};
  attr.memory = &whole;
  attr.iov_count = 1;
  attr.access = kWrite | kRemoteWrite | kRead | kRemoteRead;
  attr.requested_key = regions_.empty() ? kScratchKey : next_key();
  MemoryRegion* region = nullptr;
  const auto reg = [&](uint64_t flags) {
    return session_.domain->mr->regattr(&session_.domain->fid, &attr, flags, &region);
  };
  int error = -ENOTSUP;
  if (on_gpu && library().version() >= make_version(1, 20)) {
    const platform::ExportedMemory exported(span.data, span.bytes);
    if (exported) {
      const Dmabuf dmabuf = description_of(exported, span.bytes);
      attr.memory = &dmabuf;
      // A dma-buf declared as host memory: EFA registers it without looking at CUDA and posts it
      // without calls of CUDA, its needs_sync stays false (efa_mr.c of libfabric 1.22: lines 195,
      // 521, 959; of 2.5.1: 212, 629, 1152). Only writes by the device touch the memory:
      // peers with other software, whose writes are emulated, are refused (Peers::check_software).
      attr.iface = session_.gpu_memory == kHmem ? kHmemCuda : kHmemSystem;
      attr.device = attr.iface == kHmemCuda ? static_cast<uint32_t>(span.device) : 0;
      error = reg(kMrDmabuf);
      attr.memory = &whole;
    }
    MOE_P2P_CHECK(error == 0 || session_.gpu_memory == kHmem, Code::kUnavailable, name_,
                  ": registering ", span.bytes, what,
                  exported ? "by dma-buf: " + error_text(error)
                           : "the CUDA driver exports no dma-buf of it: " + exported.why_not(),
                  ". FI_HMEM, the other way, cannot be used: ", session_.why_no_hmem);
  }
  if (error != 0) {
    if (on_gpu) {  // hmem is on: libfabric calls CUDA itself
      attr.iface = kHmemCuda;
      attr.device = static_cast<uint32_t>(span.device);
    }
    error = reg(0);
  }
  MOE_P2P_CHECK(error == 0, Code::kResourceExhausted, name_, ": registering ", span.bytes, what,
                error_text(error), locked_memory_hint(-error));
  return Owned<MemoryRegion>(region);
}

MemoryKey Regions::add(const MemorySpan& span, Owned<MemoryRegion> mr) {
  if (session_.mr_mode(kMrEndpoint)) {
    const auto& ops = *mr->fid.ops;
    int error = ops.bind(&mr->fid, &session_.endpoint->fid, 0);
    if (error == 0) error = ops.control(&mr->fid, kControlEnable, nullptr);
    MOE_P2P_CHECK(error == 0, Code::kTransport, name_,
                  ": enabling registered memory: ", error_text(error));
  }
  const MemoryKey key{.local_key = first_key_ + regions_.size(),
                      .remote_key = mr->key,
                      .remote_addr = session_.mr_mode(kMrVirtAddr)
                                         ? reinterpret_cast<uint64_t>(span.data)
                                         : uint64_t{0}};
  void* descriptor = mr->mem_desc;
  regions_.push_back(std::make_unique<Region>(span, std::move(mr), descriptor));
  return key;
}

Region& Regions::at(const MemoryKey& key) {
  Region* region = find(key.local_key);
  MOE_P2P_CHECK(region && region->mr, Code::kInvalidArgument, name_,
                ": unregistering memory that is not registered here");
  return *region;
}

Owned<MemoryRegion> Regions::remove(const MemoryKey& key) { return std::move(at(key).mr); }

}  // namespace moe_p2p::provider::libfabric
