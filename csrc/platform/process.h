// What belongs to this process and not to a child that it forks. A child gets copies of all objects
// and descriptors, but no threads: it may neither use nor close what its parent has.
//
//   Birthplace   detects that an object is in a child of the process that made it
//   ProcessName  shows to others that nothing of this process is left
//   OwnFd        a descriptor that a forked child closes: locks and connections by which
//                others judge whether this process lives
//   at_fork      runs in each child, before fork() returns there
//
// Descriptors must be close-on-exec as well: children made by vfork() or posix_spawn() run none of
// this.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>

namespace moe_p2p::platform {

// How many forks lie between this process and the one that loaded this code. Written in a child
// while it has one thread; relaxed everywhere, it orders nothing.
inline std::atomic<uint32_t> num_forks{0};

class Birthplace {
 public:
  // True in a child forked after the object was made.
  bool inherited() const noexcept { return num_forks.load(std::memory_order_relaxed) != here_; }

 private:
  uint32_t here_ = num_forks.load(std::memory_order_relaxed);
};

// `in_child` runs in every child, on its only thread, and must not take locks that the parent used.
// At most 16 functions.
void at_fork(void (*in_child)()) noexcept;

std::string host_name();  // of this machine, as its users know it

// Names a process for others of its host; of no use in another PID namespace.
struct ProcessName {
  uint64_t space = 0;  // the namespace
  int64_t id = 0;

  static ProcessName own() noexcept;
  // True once all its threads have ended and all its files are closed, so that drivers have ended
  // what its devices still did. False also where that cannot be known.
  bool has_ended() const noexcept;
};

class OwnFd {
 public:
  OwnFd() = default;
  explicit OwnFd(int fd);  // takes ownership; -1: none
  OwnFd(OwnFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), born_(other.born_) {}
  OwnFd& operator=(OwnFd&& other) noexcept;
  ~OwnFd() { reset(); }

  // -1: none, or the process is a child.
  int get() const noexcept { return born_.inherited() ? -1 : fd_; }
  explicit operator bool() const noexcept { return get() >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
  Birthplace born_;
};

}  // namespace moe_p2p::platform
