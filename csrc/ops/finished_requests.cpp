#include "ops/finished_requests.h"

#include <poll.h>

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::ops {

using base::Code;

int64_t FinishedRequests::open() {
  const std::lock_guard lock(mutex_);
  queues_.emplace_back();
  return std::ssize(queues_) - 1;
}

engine::FinishedQueue& FinishedRequests::at(int64_t queue) {
  MOE_P2P_CHECK(queue >= 0 && queue < std::ssize(queues_), Code::kInvalidArgument,
                "there is no queue ", queue, " of finished requests");
  return queues_[static_cast<size_t>(queue)];
}

int FinishedRequests::fd(int64_t queue) {
  const std::lock_guard lock(mutex_);
  return at(queue).fd();
}

void FinishedRequests::watch(int64_t queue, int64_t number, std::shared_ptr<RequestRecord> record) {
  const std::lock_guard lock(mutex_);
  engine::Request& request = record->request;
  const std::string what = record->what;
  // Before watch(): the request may come out of the queue at once, but not before the lock is free.
  const bool is_new = watched_.emplace(&request, std::pair(number, std::move(record))).second;
  if (request.watch(at(queue))) return;
  if (is_new) watched_.erase(&request);
  throw base::Error(Code::kInvalidArgument,
                    base::concat(what, " is awaited or polled elsewhere already"));
}

bool FinishedRequests::take(int64_t queue, platform::Deadline until,
                            std::vector<int64_t>& numbers) {
  for (;;) {
    int descriptor = -1;
    {
      const std::lock_guard lock(mutex_);
      engine::FinishedQueue& finished = at(queue);
      descriptor = finished.fd();
      finished.take([&](engine::Request& request) {
        const auto found = watched_.find(&request);
        numbers.push_back(found->second.first);
        watched_.erase(found);
      });
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - platform::Clock::now());
    if (!numbers.empty() || left.count() <= 0) return !numbers.empty();
    pollfd readable{.fd = descriptor, .events = POLLIN, .revents = 0};
    poll(&readable, 1, static_cast<int>(std::min<int64_t>(left.count(), 1000)));
  }
}

void FinishedRequests::wake_all() noexcept {
  const std::lock_guard lock(mutex_);
  for (engine::FinishedQueue& queue : queues_) queue.signal();
}

}  // namespace moe_p2p::ops
