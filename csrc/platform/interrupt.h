// Ends waits of the main thread when a signal asks for it. The program that loaded this code
// decides when: csrc/ops asks Python, which runs its handlers on that thread only. Waits check
// every 50 ms or so, not at their first look.
#pragma once

namespace moe_p2p::platform {

// `check` is called on the main thread, between two looks of a wait. It may run signal handlers,
// and returns true when the wait must fail. Null: no wait is interrupted.
void set_interrupt_check(bool (*check)() noexcept) noexcept;

// The process's main thread, as the kernel sees it.
bool on_main_thread() noexcept;

// False on other threads. May take as long as the handlers do.
bool interrupted() noexcept;

}  // namespace moe_p2p::platform
