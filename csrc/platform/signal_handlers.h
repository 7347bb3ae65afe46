// Keeps the handlers of a process as they are while a library is loaded or started. libpsm2 and
// libinfinipath, which Debian's libfabric brings along, set their own handlers for SIGINT, SIGTERM
// and the signals of crashes: Ctrl-C would end Python at once, a crash would write a file
// python*.btr into the working folder, faulthandler would print nothing. Set-up only; handlers that
// another thread sets meanwhile are lost.
#pragma once

#include <signal.h>

#include <array>

namespace moe_p2p::platform {

class KeptSignalHandlers {
 public:
  KeptSignalHandlers() noexcept;
  ~KeptSignalHandlers();
  KeptSignalHandlers(const KeptSignalHandlers&) = delete;
  KeptSignalHandlers& operator=(const KeptSignalHandlers&) = delete;

 private:
  struct Kept {
    int signal;
    bool known;
    struct sigaction action;
  };
  std::array<Kept, 7> kept_;
};

}  // namespace moe_p2p::platform
