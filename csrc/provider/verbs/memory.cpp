#include "provider/verbs/memory.h"

#include <cerrno>

#include "base/log.h"
#include "platform/exported_memory.h"
#include "provider/verbs/sender.h"

namespace moe_p2p::provider::verbs {

using base::Code;

namespace {

constexpr int kAccess = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead;

int access_of(const Nic& nic, const MemorySpan& span) {
  return kAccess | (nic.config.relaxed_ordering && !span.in_order ? kAccessRelaxedOrdering : 0);
}

}  // namespace

MemoryKey Registrations::add(const MemorySpan& span) {
  MOE_P2P_CHECK(span.data != nullptr && span.bytes > 0, Code::kInvalidArgument, nic_.name(),
                ": registering ", span.bytes, " bytes at ", static_cast<const void*>(span.data));
  const bool cuda = span.kind == MemoryKind::kCuda;
  Owned<Mr> mr = cuda ? register_cuda(span) : register_host(span);
  const MemoryKey key{.local_key = mr->lkey | (cuda ? kCudaKey : 0),
                      .remote_key = mr->rkey,
                      .remote_addr = reinterpret_cast<uint64_t>(span.data)};
  const std::lock_guard lock(mutex_);
  regions_.insert_or_assign(key.local_key, std::move(mr));
  return key;
}

void Registrations::remove(const MemoryKey& key) {
  const std::lock_guard lock(mutex_);
  const auto found = regions_.find(key.local_key);
  MOE_P2P_CHECK(found != regions_.end(), Code::kInvalidArgument, nic_.name(),
                ": unregistering memory that is not registered here");
  regions_.erase(found);
}

// The older call would pass relaxed ordering as a required flag, which old kernels refuse.
Owned<Mr> Registrations::register_address(const MemorySpan& span) const {
  const auto address = reinterpret_cast<uint64_t>(span.data);
  Mr* mr = nic_.api.reg_mr_iova2
               ? nic_.api.reg_mr_iova2(nic_.pd.get(), span.data, span.bytes, address,
                                       static_cast<unsigned>(access_of(nic_, span)))
               : nic_.api.reg_mr(nic_.pd.get(), span.data, span.bytes, kAccess);
  return {mr, nic_.api.dereg_mr};
}

Owned<Mr> Registrations::register_host(const MemorySpan& span) const {
  Owned<Mr> mr = register_address(span);
  MOE_P2P_CHECK(mr, Code::kResourceExhausted, nic_.name(), ": registering ", span.bytes,
                " bytes of host memory: ", error_text(errno));
  return mr;
}

Owned<Mr> Registrations::register_cuda(const MemorySpan& span) const {
  std::string why = "dmabuf=0 was asked for";
  if (nic_.config.dmabuf)
    if (Owned<Mr> mr = register_dmabuf(span, why)) return mr;
  Owned<Mr> mr = register_address(span);
  MOE_P2P_CHECK(mr, Code::kResourceExhausted, nic_.name(), ": registering ", span.bytes,
                " bytes of GPU ", span.device, ": as a dma-buf: ", why,
                "; through peer memory: ", error_text(errno),
                ". One of them is needed: a driver with open kernel modules and a kernel from 5.12 "
                "on for dma-buf, or `modprobe nvidia-peermem`");
  return mr;
}

// Null when library, driver, kernel or NIC does not support dma-bufs; `why` gets the reason.
Owned<Mr> Registrations::register_dmabuf(const MemorySpan& span, std::string& why) const {
  Owned<Mr> none(nullptr, nic_.api.dereg_mr);
  if (!nic_.api.reg_dmabuf_mr) {
    why = "libibverbs is too old";
    return none;
  }
  const platform::ExportedMemory exported(span.data, span.bytes);
  if (!exported) {
    why = exported.why_not();
    return none;
  }
  Owned<Mr> mr(nic_.api.reg_dmabuf_mr(nic_.pd.get(), exported.offset(), span.bytes,
                                      reinterpret_cast<uint64_t>(span.data), exported.fd(),
                                      access_of(nic_, span)),
               nic_.api.dereg_mr);
  if (!mr) why = error_text(errno);
  return mr;
}

}  // namespace moe_p2p::provider::verbs
