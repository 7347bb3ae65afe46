#include "platform/signal_handlers.h"

namespace moe_p2p::platform {

KeptSignalHandlers::KeptSignalHandlers() noexcept
    : kept_{{{SIGINT, false, {}},
             {SIGTERM, false, {}},
             {SIGABRT, false, {}},
             {SIGBUS, false, {}},
             {SIGFPE, false, {}},
             {SIGILL, false, {}},
             {SIGSEGV, false, {}}}} {
  for (Kept& kept : kept_) kept.known = sigaction(kept.signal, nullptr, &kept.action) == 0;
}

KeptSignalHandlers::~KeptSignalHandlers() {
  for (const Kept& kept : kept_)
    if (kept.known) sigaction(kept.signal, &kept.action, nullptr);
}

}  // namespace moe_p2p::platform
