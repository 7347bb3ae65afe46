// GPU memory as a dma-buf, for providers that register it. The driver exports whole pages of the
// host, which have 64 KiB on some machines, so the memory asked for lies somewhere within.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moe_p2p::platform {

class ExportedMemory {
 public:
  ExportedMemory(const void* data, size_t bytes);
  ~ExportedMemory();  // a registration keeps the buffer
  ExportedMemory(const ExportedMemory&) = delete;
  ExportedMemory& operator=(const ExportedMemory&) = delete;

  explicit operator bool() const noexcept { return fd_ >= 0; }
  int fd() const noexcept { return fd_; }
  uint64_t begin() const noexcept { return begin_; }    // of the first page
  uint64_t offset() const noexcept { return offset_; }  // of `data` from there
  const std::string& why_not() const noexcept { return why_not_; }

 private:
  int fd_ = -1;
  uint64_t begin_ = 0, offset_ = 0;
  std::string why_not_;
};

}  // namespace moe_p2p::platform
