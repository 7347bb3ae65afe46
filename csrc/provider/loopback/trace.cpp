#include "provider/loopback/trace.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace moe_p2p::provider::loopback {

namespace {

constexpr size_t kEntries = 1u << 20;  // 16 MiB, of which the file has what was written

}  // namespace

Trace::Trace(const std::string& path, int nic) {
  if (path.empty()) return;
  const std::string file = base::concat(path, ".", nic);
  constexpr size_t kBytes = kEntries * sizeof(Entry);
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  void* data = MAP_FAILED;
  if (fd >= 0 && ::ftruncate(fd, kBytes) == 0)
    data = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int reason = errno;
  if (fd >= 0) ::close(fd);
  MOE_P2P_CHECK(data != MAP_FAILED, base::Code::kInvalidArgument, "loopback settings: trace=", path,
                ": cannot write ", file, ": ", std::strerror(reason));
  entries_ = {static_cast<Entry*>(data), kEntries};
}

Trace::~Trace() {
  if (!entries_.empty()) ::munmap(entries_.data(), entries_.size_bytes());
}

void Trace::store(Entry::Kind kind, const WorkRequest& request, int priority) noexcept {
  entries_[next_] = {.batch = batch_,
                     .bytes = request.bytes,
                     .kind = kind,
                     .priority = static_cast<uint8_t>(priority),
                     .is_read = request.is_read,
                     .has_imm = request.has_imm,
                     .imm = request.imm};
  entries_[0].batch = static_cast<uint32_t>(next_++);
}

}  // namespace moe_p2p::provider::loopback
