// Whether a signal wants the wait of this process's main thread to end. What that means is up to
// the program that loaded this code: csrc/ops asks Python, which runs its handlers on that thread
// only. Waits ask every 50 ms or so, never at first.
#pragma once

namespace moe_p2p::platform {

// Called on the main thread, between two looks of a wait. May run handlers of signals; true: the
// wait is to fail. Null: nobody interrupts.
void set_interrupt_check(bool (*check)() noexcept) noexcept;

// Of the process, as the kernel sees it.
bool on_main_thread() noexcept;

// False on other threads. May take as long as handlers do.
bool interrupted() noexcept;

}  // namespace moe_p2p::platform
