#include "platform/process.h"

#include <poll.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <set>

namespace moe_p2p::platform {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> fds;
  std::array<void (*)(), 16> in_child{};
  size_t num_in_child = 0;
};

void prepare();
void in_parent();
void in_child();

// Never destroyed: a fork may happen while static objects are destroyed.
Registry& registry() {
  static Registry* const all = [] {
    auto* made = new Registry;
    pthread_atfork(&prepare, &in_parent, &in_child);
    return made;
  }();
  return *all;
}

// Held during the fork, so that the child gets a consistent set.
void prepare() { registry().mutex.lock(); }
void in_parent() { registry().mutex.unlock(); }

void in_child() {
  Registry& all = registry();
  num_forks.fetch_add(1, std::memory_order_relaxed);
  for (const int fd : all.fds) close(fd);
  all.fds.clear();
  all.mutex.unlock();
  for (size_t i = 0; i < all.num_in_child; ++i) all.in_child[i]();
}

// Makes the registry at start: a Birthplace alone does not call registry().
[[maybe_unused]] const Registry& made_at_start = registry();

}  // namespace

std::string host_name() {
  char host[256] = "?";
  gethostname(host, sizeof host - 1);
  return host;
}

void at_fork(void (*in_child)()) noexcept {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  if (all.num_in_child < all.in_child.size()) all.in_child[all.num_in_child++] = in_child;
}

ProcessName ProcessName::own() noexcept {
  struct stat found{};
  if (stat("/proc/self/ns/pid", &found) != 0) return {};
  return {found.st_ino, getpid()};
}

// A descriptor of a process becomes readable when its last thread has ended, which comes behind the
// closing of its files; a lock of a file is gone before.
bool ProcessName::has_ended() const noexcept {
  if (space == 0 || space != own().space) return false;
  constexpr long kPidfdOpen = 434;  // on all machines
  const auto fd = static_cast<int>(syscall(kPidfdOpen, static_cast<pid_t>(id), 0));
  if (fd < 0) return errno == ESRCH;
  pollfd ended{.fd = fd, .events = POLLIN, .revents = 0};
  const bool has = poll(&ended, 1, 0) == 1;
  close(fd);
  return has;
}

OwnFd::OwnFd(int fd) : fd_(fd) {
  if (fd < 0) return;
  const std::lock_guard lock(registry().mutex);
  registry().fds.insert(fd);
}

OwnFd& OwnFd::operator=(OwnFd&& other) noexcept {
  if (this == &other) return *this;
  reset();
  fd_ = std::exchange(other.fd_, -1);
  born_ = other.born_;
  return *this;
}

// In a child the descriptor is closed already, and its number may be another file's.
void OwnFd::reset() noexcept {
  const int fd = get();
  fd_ = -1;
  if (fd < 0) return;
  const std::lock_guard lock(registry().mutex);
  registry().fds.erase(fd);
  close(fd);
}

}  // namespace moe_p2p::platform
