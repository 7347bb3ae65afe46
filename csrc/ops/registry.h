// Objects that torch.ops.moe_p2p.* names by number: a schema knows int, not engine. A call holds a
// shared_ptr while it runs, so closing an object under a running call frees it afterwards.
// The tables are never destroyed: a proxy thread may outlive static destruction.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/log.h"

namespace moe_p2p::ops {

template <typename Object>
class ObjectTable {
 public:
  // `kind` stands in errors: "engine".
  explicit ObjectTable(std::string kind) : kind_(std::move(kind)) {}

  int64_t add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    objects_.emplace(++last_id_, std::move(object));
    return last_id_;
  }
  std::shared_ptr<Object> get(int64_t id) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(id);
    MOE_P2P_CHECK(found != objects_.end(), base::Code::kClosed, kind_, " ", id, " ", why(id));
    return found->second;
  }
  // Empty when it was closed before.
  std::shared_ptr<Object> take(int64_t id) {
    const std::lock_guard lock(mutex_);
    auto node = objects_.extract(id);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  const char* why(int64_t id) const {
    return id > 0 && id <= last_id_ ? "is closed" : "does not exist";
  }

  const std::string kind_;
  mutable std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<Object>> objects_;
  int64_t last_id_ = 0;
};

}  // namespace moe_p2p::ops
