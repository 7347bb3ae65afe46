// The watched requests of one engine: which have ended, by number, in queues that their users sleep
// on (engine/finished_queue.h). Keeps a request alive while it is in a queue. Called by any thread.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/finished_queue.h"
#include "engine/request.h"
#include "platform/wait.h"

namespace moe_p2p::ops {

// A submitted request with the arrays that its operation points to.
struct RequestRecord {
  RequestRecord() noexcept { request.timed = true; }

  // Page indices, shared by the requests of several layers.
  struct Indices {
    std::vector<int64_t> source, target;
  };

  std::shared_ptr<const void> gates;  // what owns request.gate
  engine::Request request;
  std::shared_ptr<const Indices> pages;
  std::vector<engine::Slice> slices;
  std::string what;  // "write of 64 bytes", for errors
};

class FinishedRequests {
 public:
  int64_t open();  // returns the number of a new queue
  int fd(int64_t queue);
  // Throws Error{kInvalidArgument} when another queue has the request.
  void watch(int64_t queue, int64_t number, std::shared_ptr<RequestRecord> record);
  // Adds the numbers of the requests that have ended. False when there was none until the deadline.
  bool take(int64_t queue, platform::Deadline until, std::vector<int64_t>& numbers);
  void wake_all() noexcept;

 private:
  engine::FinishedQueue& at(int64_t queue);  // under mutex_

  std::mutex mutex_;
  std::deque<engine::FinishedQueue> queues_;  // grows only: the polling thread uses them
  std::unordered_map<const engine::Request*, std::pair<int64_t, std::shared_ptr<RequestRecord>>>
      watched_;
};

}  // namespace moe_p2p::ops
