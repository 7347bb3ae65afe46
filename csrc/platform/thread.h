// Threads: names and cores for the proxy, and the small pool that the host kernels share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe_p2p::platform {

// For the calling thread. `cpu` < 0 leaves the affinity unchanged. A core that this process may not
// use is logged, not an error: containers move.
void set_current_thread(const std::string& name, int cpu) noexcept;

// Runs body(i) for i in [0, count) on `num_threads` threads, the caller's included. One caller at a
// time. body must not throw.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  template <typename Body>
  void parallel_for(size_t count, Body&& body) {
    run(count, &body, [](void* context, size_t i) { (*static_cast<Body*>(context))(i); });
  }
  int num_threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

 private:
  using Call = void (*)(void* context, size_t i);
  void run(size_t count, void* context, Call call);
  void work();
  void take_items();

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> workers_;
  void* context_ = nullptr;
  Call call_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  size_t generation_ = 0;
  int busy_ = 0;
  bool stop_ = false;
};

}  // namespace moe_p2p::platform
