// What a forked child has of its parent: nothing by which others judge whether the parent lives.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <new>
#include <optional>

#include "base/status.h"
#include "platform/process.h"
#include "platform/shm.h"

namespace moe_p2p::platform {
namespace {

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// Whether the body held in a forked child.
bool holds_in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("process: a forked child does not keep its parent's descriptors") {
  const int number = open("/dev/null", O_RDONLY | O_CLOEXEC);
  std::optional<OwnFd> fd(OwnFd{number});
  CHECK(holds_in_child([&] {
    if (is_open(number) || *fd || fd->get() != -1) return false;
    // Its number may be another file's there, which is not closed with the object.
    if (open("/dev/null", O_RDONLY) != number) return false;
    fd.reset();
    return is_open(number);
  }));
  CHECK(fd->get() == number);
  CHECK(is_open(number));
  OwnFd moved = std::move(*fd);
  CHECK_FALSE(*fd);
  CHECK(holds_in_child([&] { return !is_open(number); }));
  moved.reset();
  CHECK_FALSE(is_open(number));
  CHECK(holds_in_child([&] { return open("/dev/null", O_RDONLY) == number; }));
}

TEST_CASE("process: an object knows that it is in a child") {
  const Birthplace born;
  CHECK_FALSE(born.inherited());
  CHECK(holds_in_child([&] { return born.inherited() && !Birthplace().inherited(); }));
  CHECK_FALSE(born.inherited());
}

TEST_CASE("process: that it has ended is seen when nothing of it is left") {
  int hold[2];
  REQUIRE(pipe(hold) == 0);
  ProcessName* name = nullptr;
  const auto shared = SharedMemory::create("test", 4096);
  name = new (shared.data()) ProcessName{};
  std::atomic_ref<int64_t> id(name->id);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const ProcessName own = ProcessName::own();
    name->space = own.space;
    id.store(own.id, std::memory_order_release);
    char byte = 0;
    close(hold[1]);
    _exit(static_cast<int>(read(hold[0], &byte, 1)));  // returns when the parent closes its end
  }
  while (id.load(std::memory_order_acquire) == 0) sched_yield();
  CHECK_FALSE(name->has_ended());
  CHECK_FALSE(ProcessName::own().has_ended());
  close(hold[1]);
  siginfo_t ended{};
  REQUIRE(waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
  CHECK(name->has_ended());  // though its parent has not asked how
  REQUIRE(waitpid(child, nullptr, 0) == child);
  CHECK(name->has_ended());
  CHECK_FALSE(ProcessName{name->space + 1, name->id}.has_ended());  // who knows
  close(hold[0]);
}

TEST_CASE("process: shared memory outlives its copy in a child, and not its owner") {
  std::optional<SharedMemory> mine(SharedMemory::create("test", 4096));
  const std::string name = mine->name();
  CHECK(holds_in_child([&] {
    mine.reset();
    return SharedMemory::owner_alive(name.c_str());
  }));
  CHECK(SharedMemory::open(name).owner_alive());
}

TEST_CASE("process: a killed owner is missed although its child lives") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t owner = fork();
  REQUIRE(owner >= 0);
  if (owner == 0) {
    const SharedMemory shm = SharedMemory::create("test", 4096);
    if (fork() == 0) {
      const pid_t child = getpid();
      char text[64] = {};
      shm.name().copy(text, sizeof text - 1);
      if (write(ends[1], &child, sizeof child) < 0 || write(ends[1], text, sizeof text) < 0)
        _exit(1);
    }
    pause();
    _exit(1);
  }
  pid_t child = 0;
  char name[64];
  REQUIRE(read(ends[0], &child, sizeof child) == sizeof child);
  REQUIRE(read(ends[0], name, sizeof name) == sizeof name);
  const SharedMemory opened = SharedMemory::open(name);
  CHECK(opened.owner_alive());
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  CHECK_FALSE(opened.owner_alive());
  CHECK(kill(child, 0) == 0);
  kill(child, SIGKILL);
  SharedMemory::remove_stale();
  CHECK_THROWS_AS(SharedMemory::open(name), base::Error);
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace moe_p2p::platform
