#include "platform/exported_memory.h"

#include <unistd.h>

#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

ExportedMemory::ExportedMemory(const void* data, size_t bytes) {
  const auto export_dmabuf = driver().export_dmabuf;
  if (!export_dmabuf) {
    why_not_ = "the CUDA driver is too old";
    return;
  }
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uint64_t>(data);
  begin_ = address / page * page;
  offset_ = address - begin_;
  const uint64_t size = (offset_ + bytes + page - 1) / page * page;
  const int error = export_dmabuf(&fd_, begin_, size, kDmabufHandle, 0);
  if (error == 0) return;
  fd_ = -1;
  why_not_ = driver_error(error);
}

ExportedMemory::~ExportedMemory() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace moe_p2p::platform
