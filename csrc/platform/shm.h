// POSIX shared memory between the processes of one host. The creator owns the name and removes it;
// an flock on the descriptor, which the kernel drops when the owner dies, tells others whether the
// owner lives. (A child forked from the owner holds the lock too: fork before creating.) Works alike
// when both ends are in one process. Control path only.
//
// What a killed process left in /dev/shm is removed by the next process that creates an object, once
// per process: names that begin with kNamePrefix and whose lock nobody holds.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace moe_p2p::platform {

class SharedMemory {
 public:
  static constexpr const char* kNamePrefix = "/moe_p2p.";

  // A new zeroed object with a name of its own. `purpose` becomes part of the name. Pages are
  // reserved at once when `reserve` is set, so that a full /dev/shm is an Error here and not a
  // SIGBUS later. Throws Error{kResourceExhausted} with the size asked for.
  static SharedMemory create(const std::string& purpose, size_t bytes, bool reserve = true);
  // Maps an object made by create(). Throws Error{kPeerDead} when it is not there.
  static SharedMemory open(const std::string& name);

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
  // For a mapping made by open(): false once the creator's process has ended or closed its end.
  // One system call; not for the data path.
  bool owner_alive() const noexcept;
  // The same for an object that is not mapped here. Does not allocate.
  static bool owner_alive(const char* name) noexcept;
  // Removes what killed processes left; returns how many. create() does it once per process.
  static int remove_stale() noexcept;
  // For the creator: removes the name early (all peers have it open). Nothing lingers in /dev/shm
  // after a crash from then on.
  void unlink() noexcept;

 private:
  void reset() noexcept;

  std::string name_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
  int fd_ = -1;
  bool owner_ = false;
  bool linked_ = false;
};

}  // namespace moe_p2p::platform
