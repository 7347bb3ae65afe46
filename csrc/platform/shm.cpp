#include "platform/shm.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// Process id, a counter and random bits: ids repeat across containers that share /dev/shm.
std::string fresh_name(const std::string& purpose) {
  static std::atomic<unsigned> counter{0};
  std::random_device random;
  return base::concat("/moe_p2p.", purpose, ".", getpid(), ".", counter.fetch_add(1), ".", random());
}

std::byte* map(int fd, size_t bytes, const std::string& name) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MOE_P2P_CHECK(p != MAP_FAILED, Code::kResourceExhausted, "mapping ", bytes,
                " bytes of shared memory ", name, ": ", std::strerror(errno));
  return static_cast<std::byte*>(p);
}

}  // namespace

SharedMemory SharedMemory::create(const std::string& purpose, size_t bytes, bool reserve) {
  SharedMemory shm;
  shm.name_ = fresh_name(purpose);
  shm.fd_ = shm_open(shm.name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  MOE_P2P_CHECK(shm.fd_ >= 0, Code::kResourceExhausted, "creating shared memory ", shm.name_, ": ",
                std::strerror(errno));
  shm.owner_ = shm.linked_ = true;
  MOE_P2P_CHECK(ftruncate(shm.fd_, static_cast<off_t>(bytes)) == 0, Code::kResourceExhausted,
                "sizing shared memory ", shm.name_, " to ", bytes,
                " bytes: ", std::strerror(errno));
  if (reserve) shm.reserve(0, bytes);
  MOE_P2P_CHECK(flock(shm.fd_, LOCK_EX | LOCK_NB) == 0, Code::kResourceExhausted, "locking ",
                shm.name_, ": ", std::strerror(errno));
  shm.data_ = map(shm.fd_, bytes, shm.name_);
  shm.size_ = bytes;
  return shm;
}

SharedMemory SharedMemory::open(const std::string& name) {
  SharedMemory shm;
  shm.name_ = name;
  shm.fd_ = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  MOE_P2P_CHECK(shm.fd_ >= 0, Code::kPeerDead, "opening shared memory ", name, " of a peer: ",
                std::strerror(errno), "; its process has ended, or it runs on another host");
  struct stat info{};
  MOE_P2P_CHECK(fstat(shm.fd_, &info) == 0 && info.st_size > 0, Code::kPeerDead, "shared memory ",
                name, " is empty; its process ended while creating it");
  shm.data_ = map(shm.fd_, static_cast<size_t>(info.st_size), name);
  shm.size_ = static_cast<size_t>(info.st_size);
  return shm;
}

void SharedMemory::reserve(size_t offset, size_t bytes) {
  const int error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  MOE_P2P_CHECK(error == 0, Code::kResourceExhausted, "reserving ", bytes, " bytes of shared memory ",
                name_, ": ", std::strerror(error),
                "; enlarge /dev/shm (docker: --shm-size) or lower max_tokens");
}

// A second open file description of the same object: the owner's lock excludes ours while it lives.
bool SharedMemory::owner_alive() const noexcept {
  if (flock(fd_, LOCK_SH | LOCK_NB) != 0) return true;
  flock(fd_, LOCK_UN);
  return false;
}

void SharedMemory::unlink() noexcept {
  if (std::exchange(linked_, false)) shm_unlink(name_.c_str());
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    name_ = std::move(other.name_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    fd_ = std::exchange(other.fd_, -1);
    owner_ = std::exchange(other.owner_, false);
    linked_ = std::exchange(other.linked_, false);
  }
  return *this;
}

SharedMemory::~SharedMemory() { reset(); }

void SharedMemory::reset() noexcept {
  unlink();
  if (data_) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
  data_ = nullptr;
  fd_ = -1;
}

}  // namespace moe_p2p::platform
