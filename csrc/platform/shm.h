// POSIX shared memory between the processes of one host. The creator owns the name and removes it;
// the owner holds an flock, which the kernel drops when the owner dies, so that others can check
// whether it lives. Works the same when both ends are in one process. Control path only.
//
// exit() removes what this process still owns, whether or not anybody knows the owner any more.
//
// A child forked from the owner keeps only the mapping, until the object is destroyed there: not
// the lock, not the right to remove the name.
//
// The next process that creates an object removes what killed processes left in /dev/shm, once per
// process: names that begin with kNamePrefix and whose lock is free.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "platform/process.h"

namespace moe_p2p::platform {

class SharedMemory {
 public:
  static constexpr const char* kNamePrefix = "/moe_p2p.";

  // A new zeroed object with a name of its own. `purpose` becomes part of the name. Pages are
  // reserved at once when `reserve` is set, so that a full /dev/shm is an Error here and not a
  // SIGBUS later. Throws Error{kResourceExhausted} with the size asked for.
  static SharedMemory create(const std::string& purpose, size_t bytes, bool reserve = true);
  // Maps an object made by create(). Throws Error{kPeerDead} when it does not exist.
  static SharedMemory open(const std::string& name);

  // Zero pages of this process alone, without a name, which cost nothing until they are written.
  static SharedMemory blank(size_t bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }
  std::span<std::byte> bytes() const noexcept { return {data_, size_}; }

  // Reserves pages of [offset, offset + bytes); throws as create() does.
  void reserve(size_t offset, size_t bytes);
  // For a mapping made by open(): false once the creator's process has ended or closed its end; of
  // blank() always false. One system call; not for the data path.
  bool owner_alive() const noexcept;
  // The same check for an object that is not mapped here. Does not allocate.
  static bool owner_alive(const char* name) noexcept;
  // Removes what killed processes left; returns how many. create() does it once per process.
  static int remove_stale() noexcept;
  // For the creator: removes the name early (all peers have it open). From then on a crash leaves
  // nothing in /dev/shm.
  void unlink() noexcept;
  // True in a child forked after this object was made.
  bool inherited() const noexcept { return born_.inherited(); }

 private:
  struct Linked;

  void reset() noexcept;

  std::string name_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  // The creator's is locked, and is not the one that was mapped: a mapping keeps its file's lock.
  OwnFd fd_;
  Linked* linked_ = nullptr;  // the name, until it is removed
  Birthplace born_;
};

}  // namespace moe_p2p::platform
