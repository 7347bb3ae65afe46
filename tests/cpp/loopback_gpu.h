// What the tests of the software NIC with GPU memory share: the driver that stands in, and the NIC.
#pragma once

#include <atomic>
#include <string>
#include <thread>

#include "provider_table.h"

namespace moe_p2p::provider_test {

// Put back to what it was at first, or other tests would see what this one did.
struct Driver {
  test::FakeDriver& fake = test::FakeDriver::install();
  ~Driver() {
    fake.hold(false);
    fake.fail_copies(0);
    fake.fail_queries(0);
    fake.set_max_queries(12);
    fake.write_words(true);
    fake.register_pages(true);
  }
};

constexpr const char* kSettings[] = {"", "seed=6", "seed=7,ring_kib=4"};

inline ProviderUnderTest gpu(const std::string& settings) {
  return {"loopback", settings.c_str(), false, MemoryKind::kCuda};
}

// One thread that posts and polls, so that copies are under way while another gives memory back.
class Traffic {
 public:
  // Each request is posted `times` times.
  Traffic(Node& a, Node& b, size_t times) : times_(times), thread_([this, &a, &b] { run(a, b); }) {}
  ~Traffic() {
    stop_.store(true);
    thread_.join();
  }
  // Returns once the request is taken and `num` writes in all are done.
  void post(const WorkRequest& request, size_t num) {
    next_.store(&request);
    wait(num);
    while (next_.load() != nullptr) std::this_thread::yield();
  }
  void wait(size_t num) const {
    while (num_done_.load() < num) std::this_thread::yield();
  }

 private:
  void run(Node& a, Node& b) {
    Patience patience;
    while (!stop_.load()) {
      if (const WorkRequest* request = next_.exchange(nullptr))
        for (size_t i = 0; i < times_; ++i) post_all(a, {&a, &b}, *request);
      patience.polled(a.poll() + b.poll());
      num_done_.store(a.done.size());
    }
  }

  const size_t times_;
  std::atomic<bool> stop_{false};
  std::atomic<const WorkRequest*> next_{nullptr};
  std::atomic<size_t> num_done_{0};
  std::thread thread_;  // last: it uses the others
};

}  // namespace moe_p2p::provider_test
