// The thread that owns a GPU's NICs. Its loop is four lines: take doorbells, run the mailbox, post
// and poll, publish arrivals. It never blocks, locks, allocates, throws or logs; when there is
// nothing to do it waits by the policy it was given. KV and weight transfers use the same thread.
#pragma once

#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "engine/transfer_engine.h"
#include "platform/process.h"
#include "platform/wait.h"

namespace moe_p2p::proxy {

// Somebody with doorbells to watch and arrivals to publish (moe::Exchange).
class ProxyTask {
 public:
  virtual ~ProxyTask() = default;
  // Looks at the doorbells and submits to the engine. True when it found one.
  virtual bool take_doorbells() noexcept = 0;
  // Publishes what came in since the last call. True when it published something.
  virtual bool publish_arrivals() noexcept = 0;
  // True while something may come without a notification: a doorbell that a GPU rings, which cannot
  // wake a thread. The proxy then yields instead of sleeping. Asked between turns; whoever makes it
  // true from another thread notifies the engine's waker.
  virtual bool must_poll() const noexcept { return false; }
};

struct ProxyOptions {
  platform::WaitPolicy wait;
  int cpu = -1;  // core to run on; -1 leaves it to the kernel
};

class ProxyThread {
 public:
  // Too small: a process with more communicators than this cannot add another one.
  static constexpr size_t kMaxTasks = 64;

  // Returns once the thread polls the engine.
  ProxyThread(engine::TransferEngine& engine, const ProxyOptions& options);
  ~ProxyThread();  // stops and joins

  // Return once the thread runs (or no longer runs) the task. Throw Error{kTimeout} when the thread
  // does not answer; the task then remains as it was.
  void add_task(ProxyTask* task);
  void remove_task(ProxyTask* task);

  // One turn of the loop; the thread's body and simulations call it. True when anything moved. A
  // null task is skipped: it was removed during this turn.
  static bool turn(engine::TransferEngine& engine, std::span<ProxyTask* const> tasks) noexcept;

 private:
  void run() noexcept;
  bool run_turn() noexcept;
  bool must_poll() const noexcept;
  void wait_for_work() noexcept;

  engine::TransferEngine& engine_;
  const ProxyOptions options_;
  std::vector<ProxyTask*> tasks_;  // polling thread only; capacity reserved
  std::atomic<bool> running_{false};
  std::atomic<bool> stop_{false};
  platform::Birthplace born_;
  std::thread thread_;
};

}  // namespace moe_p2p::proxy
