// Named ranges on the timeline of a profiler that reads NVTX (Nsight Systems), around what this
// thread does. The library that has NVTX's functions is opened where a user asks for it; it finds
// the profiler itself. Off, a range costs one load and a branch.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace moe_p2p::platform {

struct RangeFunctions {
  int (*push)(const char* name) = nullptr;
  int (*pop)() = nullptr;
};
// Null: off. Set once, and never taken back: ranges may be open.
inline std::atomic<const RangeFunctions*> range_functions{nullptr};

// Opens the first of these libraries that can be opened. Throws Error{kUnavailable}.
void use_ranges(const std::vector<std::string>& files);

class Range {
 public:
  explicit Range(const char* name) noexcept
      : functions_(range_functions.load(std::memory_order_acquire)) {  // pairs with use_ranges()
    if (functions_) [[unlikely]]
      functions_->push(name);
  }
  ~Range() {
    if (functions_) [[unlikely]]
      functions_->pop();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const RangeFunctions* const functions_;
};

}  // namespace moe_p2p::platform
