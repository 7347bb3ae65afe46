// The thread that owns a GPU's NICs. Its loop is four steps: take doorbells, run the mailbox, post
// and poll, publish arrivals. It never blocks, locks, allocates, throws or logs; when there is
// nothing to do it waits by ProxyOptions::wait. KV and weight transfers use the same thread.
#pragma once

#include <atomic>
#include <span>
#include <thread>
#include <vector>

#include "engine/transfer_engine.h"
#include "platform/process.h"
#include "platform/wait.h"

namespace moe_p2p::proxy {

// An object with doorbells to watch and arrivals to publish (moe::Exchange).
class ProxyTask {
 public:
  virtual ~ProxyTask() = default;
  // Looks at the doorbells and submits to the engine. True when one had been rung.
  virtual bool take_doorbells() noexcept = 0;
  // Publishes what arrived since the last call. True when it published something.
  virtual bool publish_arrivals() noexcept = 0;
  // True while work may arrive without a notification: a GPU may ring a doorbell, which cannot wake
  // a thread. The proxy then yields instead of sleeping. Called between turns; another thread that
  // makes it true must notify the engine's waker.
  virtual bool must_poll() const noexcept { return false; }
};

struct ProxyOptions {
  platform::WaitPolicy wait;
  int cpu = -1;  // core to run on; -1: any
};

class ProxyThread {
 public:
  // Too small: a process cannot have more communicators than this.
  static constexpr size_t kMaxTasks = 64;

  // Returns once the thread polls the engine.
  ProxyThread(engine::TransferEngine& engine, const ProxyOptions& options);
  ~ProxyThread();  // stops and joins

  // Both return once the thread runs (or no longer runs) the task. Both throw Error{kTimeout} when
  // the thread does not take the call in time; nothing changes then.
  void add_task(ProxyTask* task);
  void remove_task(ProxyTask* task);

  // One turn of the loop; called by the thread's body and by simulations. True when anything moved.
  // Skips null tasks, which were removed during this turn.
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
