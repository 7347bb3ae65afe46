#include "platform/shm.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
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
  return base::concat(SharedMemory::kNamePrefix, purpose, ".", getpid(), ".", counter.fetch_add(1),
                      ".", random());
}

int open_existing(const char* name) noexcept { return shm_open(name, O_RDWR | O_CLOEXEC, 0); }

std::byte* map(int fd, size_t bytes, const std::string& name) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  MOE_P2P_CHECK(p != MAP_FAILED, Code::kResourceExhausted, "mapping ", bytes,
                " bytes of shared memory ", name, ": ", std::strerror(errno));
  return static_cast<std::byte*>(p);
}

double mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// "/dev/shm has 2.5 MiB free of 64 MiB"
std::string room() {
  struct statvfs info{};
  if (statvfs("/dev/shm", &info) != 0) return "/dev/shm cannot be examined";
  return base::concat("/dev/shm has ", mib(info.f_bavail * info.f_frsize), " MiB free of ",
                      mib(info.f_blocks * info.f_frsize), " MiB");
}

// A descriptor of a new object, locked. Between our open and our lock another process may consider
// the object stale and remove it; it then has no name, and we start again.
int create_locked(const std::string& name) {
  for (;;) {
    const int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    MOE_P2P_CHECK(fd >= 0, Code::kResourceExhausted, "creating shared memory ", name, ": ",
                  std::strerror(errno));
    struct stat info{};
    const bool locked = flock(fd, LOCK_EX) == 0;
    if (locked && fstat(fd, &info) == 0 && info.st_nlink > 0) return fd;
    const int error = errno;
    close(fd);
    MOE_P2P_CHECK(locked, Code::kResourceExhausted, "locking shared memory ", name, ": ",
                  std::strerror(error));
  }
}

// Removes the object when it can be locked exclusively, which a living owner prevents. True when it
// did.
bool remove_if_stale(const char* name) noexcept {
  const int fd = open_existing(name);
  if (fd < 0) return false;  // gone already, or owned by another user
  const bool stale = flock(fd, LOCK_EX | LOCK_NB) == 0 && shm_unlink(name) == 0;
  close(fd);
  return stale;
}

}  // namespace

// One name of each node is in /dev/shm until its owner removes it, else until exit(): an exception
// of a signal's handler may have taken the owner from who would have closed it. Nodes are never
// freed, and no lock is taken, as a thread may fork while another one is here.
struct SharedMemory::Linked {
  enum State : int { kFree, kTaken, kLinked };

  static Linked* add(const std::string& name) {
    [[maybe_unused]] static const int registered = std::atexit(remove_all);
    Linked* node = first.load(std::memory_order_acquire);
    for (int free = kFree; node; node = node->next, free = kFree)
      if (node->state.compare_exchange_strong(free, kTaken, std::memory_order_acquire)) break;
    if (!node) {
      node = new Linked;
      node->next = first.load(std::memory_order_relaxed);
      while (!first.compare_exchange_weak(node->next, node, std::memory_order_release)) {
      }
    }
    node->name = name;
    node->born = Birthplace();
    node->state.store(kLinked, std::memory_order_release);  // remove_all acquires
    return node;
  }

  void remove() noexcept {
    int linked = kLinked;
    if (!state.compare_exchange_strong(linked, kTaken, std::memory_order_acquire)) return;
    if (!born.inherited()) shm_unlink(name.c_str());
    state.store(kFree, std::memory_order_release);
  }

  static void remove_all() {
    for (Linked* node = first.load(std::memory_order_acquire); node; node = node->next)
      node->remove();
  }

  static inline std::atomic<Linked*> first = nullptr;

  Linked* next = nullptr;
  std::atomic<int> state = kTaken;
  std::string name;
  Birthplace born;
};

SharedMemory SharedMemory::create(const std::string& purpose, size_t bytes, bool reserve) {
  [[maybe_unused]] static const int removed = remove_stale();
  SharedMemory shm;
  shm.name_ = fresh_name(purpose);
  shm.fd_ = OwnFd(create_locked(shm.name_));
  shm.linked_ = Linked::add(shm.name_);
  MOE_P2P_CHECK(ftruncate(shm.fd_.get(), static_cast<off_t>(bytes)) == 0, Code::kResourceExhausted,
                "sizing shared memory ", shm.name_, " to ", bytes,
                " bytes: ", std::strerror(errno));
  if (reserve) shm.reserve(0, bytes);
  const OwnFd unlocked(open_existing(shm.name_.c_str()));
  shm.data_ = map(unlocked.get(), bytes, shm.name_);
  shm.size_ = bytes;
  return shm;
}

SharedMemory SharedMemory::open(const std::string& name) {
  SharedMemory shm;
  shm.name_ = name;
  shm.fd_ = OwnFd(open_existing(name.c_str()));
  MOE_P2P_CHECK(shm.fd_, Code::kPeerDead, "opening shared memory ", name,
                " of a peer: ", std::strerror(errno),
                "; its process has ended, or it runs on another host");
  struct stat info{};
  MOE_P2P_CHECK(fstat(shm.fd_.get(), &info) == 0 && info.st_size > 0, Code::kPeerDead,
                "shared memory ", name, " is empty; its process ended while creating it");
  shm.data_ = map(shm.fd_.get(), static_cast<size_t>(info.st_size), name);
  shm.size_ = static_cast<size_t>(info.st_size);
  return shm;
}

SharedMemory SharedMemory::blank(size_t bytes) {
  SharedMemory shm;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  MOE_P2P_CHECK(p != MAP_FAILED, Code::kResourceExhausted, "mapping ", bytes,
                " blank bytes: ", std::strerror(errno));
  shm.data_ = static_cast<std::byte*>(p);
  shm.size_ = bytes;
  return shm;
}

void SharedMemory::reserve(size_t offset, size_t bytes) {
  const int error =
      posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  MOE_P2P_CHECK(error == 0, Code::kResourceExhausted, "reserving ", mib(bytes),
                " MiB of shared memory ", name_, ": ", std::strerror(error), "; ", room(),
                ". Enlarge it (docker: --shm-size), or lower nics_per_rank, or ring_kib of the "
                "software NIC (transport_settings)");
}

// A second open file description of the same object: the owner's lock excludes ours while it lives.
bool SharedMemory::owner_alive() const noexcept {
  if (!fd_) return false;
  if (flock(fd_.get(), LOCK_SH | LOCK_NB) != 0) return true;
  flock(fd_.get(), LOCK_UN);
  return false;
}

bool SharedMemory::owner_alive(const char* name) noexcept {
  const int fd = open_existing(name);
  if (fd < 0) return errno != ENOENT;
  const bool alive = flock(fd, LOCK_SH | LOCK_NB) != 0;
  close(fd);  // releases the lock
  return alive;
}

int SharedMemory::remove_stale() noexcept {
  DIR* folder = opendir("/dev/shm");
  if (!folder) return 0;
  int num_removed = 0;
  const size_t prefix = std::strlen(kNamePrefix) - 1;  // without the slash
  while (const dirent* entry = readdir(folder)) {
    if (std::strncmp(entry->d_name, kNamePrefix + 1, prefix) != 0) continue;
    char name[sizeof entry->d_name + 1] = "/";
    std::strcat(name, entry->d_name);
    if (remove_if_stale(name)) ++num_removed;
  }
  closedir(folder);
  return num_removed;
}

void SharedMemory::unlink() noexcept {
  if (Linked* linked = std::exchange(linked_, nullptr)) linked->remove();
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    name_ = std::move(other.name_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    fd_ = std::move(other.fd_);
    linked_ = std::exchange(other.linked_, nullptr);
    born_ = other.born_;
  }
  return *this;
}

SharedMemory::~SharedMemory() { reset(); }

void SharedMemory::reset() noexcept {
  unlink();
  if (data_) munmap(data_, size_);
  data_ = nullptr;
  fd_.reset();
}

}  // namespace moe_p2p::platform
