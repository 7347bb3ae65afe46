#include "platform/interrupt.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace moe_p2p::platform {

namespace {

// Set while the library is loaded; relaxed, it guards nothing.
std::atomic<bool (*)() noexcept> the_check{nullptr};

}  // namespace

void set_interrupt_check(bool (*check)() noexcept) noexcept {
  the_check.store(check, std::memory_order_relaxed);
}

bool on_main_thread() noexcept { return syscall(SYS_gettid) == getpid(); }

bool interrupted() noexcept {
  bool (*check)() noexcept = the_check.load(std::memory_order_relaxed);
  return check != nullptr && on_main_thread() && check();
}

}  // namespace moe_p2p::platform
