// Objects that torch.ops.moe_p2p.* names by number: a schema knows int, not engine. A call holds a
// shared_ptr while it runs, so closing an object under a running call frees it afterwards.
// The tables are never destroyed: a proxy thread may outlive static destruction.
//
// A forked child begins with empty tables and continues the numbers. Its parent's objects stay
// there untouched for as long as the child lives: their threads are missing, their locks may be
// held.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "platform/process.h"

namespace moe_p2p::ops {

template <typename Object>
class ObjectTable {
 public:
  // `kind` is used in errors: "engine". One table for each type of objects, for good.
  explicit ObjectTable(std::string kind) : kind_(std::move(kind)), state_(new State) {
    static ObjectTable* self = nullptr;
    self = this;
    platform::at_fork([] { self->start_in_child(); });
  }

  int64_t add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(state_->mutex);
    const int64_t id = ++last_id_;
    state_->objects.emplace(id, std::move(object));
    return id;
  }
  std::shared_ptr<Object> get(int64_t id) const {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->objects.find(id);
    MOE_P2P_CHECK(found != state_->objects.end(), base::Code::kClosed, kind_, " ", id, " ",
                  why(id));
    return found->second;
  }
  // Each of the two numbers then names the other object.
  void swap(int64_t one, int64_t other) {
    const std::lock_guard lock(state_->mutex);
    state_->objects.at(one).swap(state_->objects.at(other));
  }
  // Returns null when it was closed before, or belongs to another process.
  std::shared_ptr<Object> take(int64_t id) {
    const std::lock_guard lock(state_->mutex);
    auto node = state_->objects.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  struct State {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<Object>> objects;
  };

  void start_in_child() {
    state_ = new State;  // the parent's is left alone
    last_inherited_ = last_id_.load();
  }
  const char* why(int64_t id) const {
    if (id <= 0 || id > last_id_.load()) return "does not exist";
    return id > last_inherited_ ? "is closed"
                                : "was made before this process was forked, and belongs to its "
                                  "parent; make one here";
  }

  const std::string kind_;
  State* state_;
  std::atomic<int64_t> last_id_{0};  // atomic for the child: a fork may come in the middle of add()
  int64_t last_inherited_ = 0;       // 0: this process was not forked from one that had objects
};

}  // namespace moe_p2p::ops
