// A closure on its way to the polling thread, and the pool that owns such calls. The pool exists
// because a caller may give up: its call then stays in the mailbox, so the node cannot lie on the
// caller's stack. The caller's thread allocates and reuses nodes; the polling thread never does.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/mailbox.h"
#include "platform/wait.h"

namespace moe_p2p::engine {

class PollerCall : public MailboxNode {
 public:
  PollerCall() noexcept : MailboxNode(Kind::kCall) {}

  // Polling thread. Runs the closure unless its caller gave up, and keeps its exception for the
  // caller.
  void run() noexcept;

  // Caller. Returns true once the closure has run, or rethrows its exception. False when the
  // deadline passed before it began; it will then never run. Waits beyond the deadline for a
  // closure that has begun, because it uses the caller's variables.
  bool wait(platform::Deadline deadline);

 private:
  friend class CallPool;

  // kFree -> kWaiting (caller) -> kRunning -> kDone (poller) -> kFree (caller)
  //             \-> kCancelled (caller) -> kFree (poller)
  enum class State : uint32_t { kFree, kWaiting, kRunning, kDone, kCancelled };

  bool finished() const noexcept;

  std::atomic<State> state_{State::kFree};
  const Closure* closure_ = nullptr;
  std::exception_ptr error_;
  platform::EventCount event_{};
};

class CallPool {
 public:
  // Returns a free call with `closure`, which must live until wait() returns. Any thread.
  PollerCall& take(const Closure& closure);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<PollerCall>> calls_;
};

}  // namespace moe_p2p::engine
