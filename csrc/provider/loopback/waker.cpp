#include "provider/loopback/waker.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe_p2p::provider::loopback {

Waker::Waker(const char* name) noexcept {
  if (name[0] == '\0') return;
  const int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return;
  struct stat info{};
  constexpr size_t kBytes = sizeof(platform::EventCount);
  if (fstat(fd, &info) == 0 && static_cast<size_t>(info.st_size) >= kBytes) {
    void* p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p != MAP_FAILED) event_ = static_cast<platform::EventCount*>(p);
  }
  ::close(fd);
}

Waker::~Waker() {
  if (event_) munmap(event_, sizeof(platform::EventCount));
}

}  // namespace moe_p2p::provider::loopback
