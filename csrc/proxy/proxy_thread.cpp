#include "proxy/proxy_thread.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "engine/poller.h"
#include "platform/thread.h"

namespace moe_p2p::proxy {

using base::Code;
using platform::Clock;
using platform::WaitMode;

namespace {

constexpr auto kAnswerTimeout = std::chrono::seconds(10);

// Writes in flight longer than this are awaited in naps. Too small: a nap's wake-up time is added
// to ordinary completions. Too large: a slow peer costs a core for as long.
constexpr auto kPatience = std::chrono::milliseconds(1);
constexpr auto kNap = std::chrono::microseconds(50);

// Doorbells are also looked at between posts of requests that are less urgent.
class Doorbells final : public engine::Lookout {
 public:
  explicit Doorbells(std::span<ProxyTask* const> tasks) : tasks_(tasks) {}
  bool take() noexcept {
    bool taken = false;
    for (ProxyTask* const& task : tasks_)
      if (task != nullptr) taken |= task->take_doorbells();
    return taken;
  }
  void look() noexcept override { take(); }

 private:
  const std::span<ProxyTask* const> tasks_;
};

}  // namespace

ProxyThread::ProxyThread(engine::TransferEngine& engine, const ProxyOptions& options)
    : engine_(engine), options_(options) {
  tasks_.reserve(kMaxTasks);
  thread_ = std::thread([this] { run(); });
  // acquire: pairs with the release in run(). From then on the engine's control calls, which look
  // for the polling thread, find this one.
  while (!running_.load(std::memory_order_acquire)) std::this_thread::yield();
}

ProxyThread::~ProxyThread() {
  if (born_.inherited()) {  // the thread runs in the parent only: there is none to join
    (void)new std::thread(std::move(thread_));
    return;
  }
  stop_.store(true, std::memory_order_release);  // pairs with the acquire in run()
  platform::notify_all(engine_.waker());
  thread_.join();
  engine_.detach_poller();
}

void ProxyThread::add_task(ProxyTask* task) {
  MOE_P2P_CHECK(task != nullptr, Code::kInvalidArgument, "proxy thread: no task given");
  const auto add = [&] {
    MOE_P2P_CHECK(tasks_.size() < kMaxTasks, Code::kResourceExhausted, "proxy thread: already has ",
                  kMaxTasks, " tasks");
    tasks_.push_back(task);  // within the reserved capacity: turn() may be looking at the array
  };
  engine_.run_on_poller(add, Clock::now() + kAnswerTimeout);
}

void ProxyThread::remove_task(ProxyTask* task) {
  const auto remove = [&] {
    std::replace(tasks_.begin(), tasks_.end(), task, static_cast<ProxyTask*>(nullptr));
  };
  engine_.run_on_poller(remove, Clock::now() + kAnswerTimeout);
}

bool ProxyThread::turn(engine::TransferEngine& engine, std::span<ProxyTask* const> tasks) noexcept {
  Doorbells doorbells(tasks);
  bool moved = doorbells.take();
  moved |= engine.progress(&doorbells);  // mailbox, post, poll
  for (ProxyTask* const& task : tasks)
    if (task != nullptr) moved |= task->publish_arrivals();
  return moved;
}

bool ProxyThread::run_turn() noexcept {
  const bool moved = turn(engine_, tasks_);
  std::erase(tasks_, nullptr);  // removed during the turn
  return moved;
}

void ProxyThread::run() noexcept {
  platform::set_current_thread("moe_p2p.proxy", options_.cpu);
  run_turn();
  running_.store(true, std::memory_order_release);  // pairs with the constructor
  while (!stop_.load(std::memory_order_acquire))    // pairs with the destructor
    if (!run_turn()) wait_for_work();
}

bool ProxyThread::must_poll() const noexcept {
  return engine_.must_poll() ||
         std::ranges::any_of(tasks_, [](const ProxyTask* task) { return task->must_poll(); });
}

// Returns after a turn that moved something. Sleeps only while the engine is idle: a NIC with work
// in flight needs polling to make progress, so then it yields, and naps when that takes long. While
// a task must be polled it only yields.
void ProxyThread::wait_for_work() noexcept {
  platform::Waiter waiter(engine_.waker(), options_.wait, platform::Deadline::max());
  const auto start = Clock::now();
  for (;;) {
    // Prepares to sleep only while idle: with a counted sleeper every notification costs its sender
    // a system call.
    const bool idle = engine_.idle() && !must_poll();
    if (idle) waiter.prepare();
    if (run_turn() || stop_.load(std::memory_order_acquire)) return;  // pairs with the destructor
    const bool awake = must_poll();
    if ((idle && !awake && engine_.idle()) || options_.wait.mode == WaitMode::kSpin) {
      waiter.pause();
    } else if (awake || options_.wait.mode == WaitMode::kYield ||
               Clock::now() - start < kPatience) {
      sched_yield();
    } else {
      const platform::WaitPolicy nap{WaitMode::kSleep, {}, {}};
      platform::Waiter napper(engine_.waker(), nap, Clock::now() + kNap);
      napper.prepare();
      napper.pause();
    }
  }
}

}  // namespace moe_p2p::proxy
