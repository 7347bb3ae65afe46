#include "platform/thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::platform {

namespace {

// Does what libstdc++'s condition_variable::wait does. That is a symbol of GCC 12, and the package
// has to load with GCC 11's library (RHEL 9, Amazon Linux 2023).
template <typename Ready>
void wait(std::condition_variable& event, std::unique_lock<std::mutex>& lock, Ready&& ready) {
  while (!ready()) pthread_cond_wait(event.native_handle(), lock.mutex()->native_handle());
}

}  // namespace

void set_current_thread(const std::string& name, int cpu) noexcept {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());  // Linux keeps 15 characters
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0)
    MOE_P2P_LOG(base::LogLevel::kWarning, "thread ", name, " could not be pinned to cpu ", cpu);
}

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(size_t count, void* context, Call call) {
  if (workers_.empty() || count < 2) {
    for (size_t i = 0; i < count; ++i) call(context, i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    context_ = context;
    call_ = call;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);  // published by the mutex
    busy_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  wake_.notify_all();
  take_items();
  std::unique_lock lock(mutex_);
  wait(idle_, lock, [this] { return busy_ == 0; });
}

void ThreadPool::take_items() {
  // Blocks of items: one shared counter per item would cost more than a small item.
  const size_t block = std::max<size_t>(1, count_ / (8 * (workers_.size() + 1)));
  for (;;) {
    const size_t begin = next_.fetch_add(block, std::memory_order_relaxed);
    if (begin >= count_) return;
    for (size_t i = begin; i < std::min(begin + block, count_); ++i) call_(context_, i);
  }
}

void ThreadPool::work() {
  set_current_thread("moe_p2p.pool", -1);
  size_t seen = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wait(wake_, lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
    }
    take_items();
    std::lock_guard lock(mutex_);
    if (--busy_ == 0) idle_.notify_one();
  }
}

}  // namespace moe_p2p::platform
