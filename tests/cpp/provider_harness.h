// What the provider tests share: a Domain together with everything it has shown so far, registered
// memory, and pump(), which polls nodes in turn until something holds (patience.h).
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "doctest/doctest.h"
#include "fake_driver.h"
#include "filled.h"
#include "patience.h"
#include "provider/provider.h"

namespace moe_p2p::provider_test {

using base::Code;
using provider::Completion;
using provider::Domain;
using provider::DomainOptions;
using provider::MemoryKey;
using provider::MemoryKind;
using provider::MemorySpan;
using provider::PeerId;
using provider::WorkRequest;
using test::Patience;
using test::soon;

// The text of the error that an action throws; empty if it throws none.
inline std::string text_of_error(const std::function<void()>& action) {
  try {
    action();
  } catch (const base::Error& error) {
    return error.what();
  }
  return "";
}
inline bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

class Node {
 public:
  // kCuda: its Memory passes for that of GPU 0 (fake_driver.h).
  Node(const std::string& provider, const std::string& settings, int nic = 0,
       MemoryKind memory = MemoryKind::kHost)
      : memory_kind(memory) {
    if (memory == MemoryKind::kCuda) test::FakeDriver::install();
    DomainOptions options;
    options.nic = nic;
    options.settings = settings;
    domain = provider::open_domain(provider, options);
  }

  const MemoryKind memory_kind;
  std::shared_ptr<Domain> domain;
  std::vector<uint32_t> imms;                     // in the order seen
  std::vector<uint64_t> done;                     // wr_ids in the order seen
  std::function<void(uint32_t imm)> on_imm = {};  // called as soon as the immediate is seen
  size_t poll_entries = 16;
  bool maps_windows = true;   // GPU memory of peers is mapped here before it is written to
  bool lent_windows = false;  // it is lent: its owner does not wait until the window is dropped

  size_t poll() {
    Completion completions[64];
    const size_t n = domain->poll({completions, poll_entries});
    for (size_t i = 0; i < n; ++i) {
      const Completion& c = completions[i];
      if (c.kind == Completion::Kind::kImmediate) {
        imms.push_back(c.imm);
        if (on_imm) on_imm(c.imm);
      } else {
        done.push_back(c.wr_id);
        unmapped_.emplace_back(c.wr_id, c.status);
      }
    }
    return n;
  }
  PeerId connect(const Node& to) { return domain->connect(to.domain->address()); }
  bool post(const WorkRequest& request) { return domain->post({&request, 1}) == 1; }
  // By wr_id. Made when somebody asks: to fill it takes longer than the writes.
  const std::map<uint64_t, base::Status>& status() const {
    for (const auto& [wr_id, status] : std::exchange(unmapped_, {})) by_id_[wr_id] = status;
    return by_id_;
  }
  Code code(uint64_t wr_id) const {
    const auto it = status().find(wr_id);
    return it == by_id_.end() ? Code::kTimeout : it->second.code;
  }
  size_t num_failed() const {
    size_t n = 0;
    for (const auto& [wr_id, status] : status()) n += status.ok() ? 0 : 1;
    return n;
  }

 private:
  mutable std::vector<std::pair<uint64_t, base::Status>> unmapped_;
  mutable std::map<uint64_t, base::Status> by_id_;
};

// Memory registered at one node, zero at first; given back at the end. A node that writes to GPU
// memory of another has to map it; here both are one memory.
class Memory {
 public:
  Memory(Node& node, size_t bytes) : node_(node), own_(bytes), data(own_), key(add()) {}
  Memory(Node& node, std::span<std::byte> foreign) : node_(node), data(foreign), key(add()) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (!registered_ || !node_.domain) return;
    try {
      unregister();
    } catch (const base::Error& error) {  // a read may still fill it
      CHECK(error.code() == Code::kTimeout);
      static std::vector<std::vector<std::byte>> kept;
      kept.push_back(std::move(own_));
    }
  }
  void unmap() {
    for (const auto& mapped : windows_)
      if (const auto domain = mapped.lock())
        until_gone([&] { return ends([&] { domain->map_remote(key.remote_key, {}); }); });
    windows_.clear();
  }
  void unregister() {
    if (!node_.lent_windows) unmap();
    until_gone([this] { return give_back(); });
    unmap();
  }
  bool give_back() {
    const bool back = ends([this] { node_.domain->unregister_memory(key); });
    if (back) registered_ = false;
    return back;
  }
  MemorySpan span() const {
    const bool host = node_.memory_kind == MemoryKind::kHost;
    return {data.data(), data.size(), node_.memory_kind, host ? -1 : 0};
  }
  // For writes of memory `from`, once per node.
  void map_for(const Memory& from) const {
    if (span().kind != MemoryKind::kCuda || from.span().kind != MemoryKind::kCuda) return;
    if (!from.node_.maps_windows) return;
    const auto& domain = from.node_.domain;
    for (const auto& mapped : windows_)
      if (mapped.lock() == domain) return;
    if (!registered_) return;
    domain->map_remote(key.remote_key, span(), from.node_.lent_windows);
    windows_.emplace_back(domain);
  }

 private:
  MemoryKey add() { return node_.domain->register_memory(span()); }
  // False: copies of a GPU's have not ended in the seconds that a call has, on a machine with much
  // to do. It may be called again.
  template <typename Call>
  bool ends(Call&& call) {
    try {
      call();
      return true;
    } catch (const base::Error& error) {
      const bool copied = node_.lent_windows || span().kind == MemoryKind::kCuda;
      if (!copied || error.code() != Code::kTimeout) throw;
      return false;
    }
  }
  template <typename Ended>
  static void until_gone(Ended&& ended) {
    const bool gone = test::poll_until([] { return false; }, ended);  // CHECK() would catch
    CHECK(gone);
  }

  Node& node_;
  bool registered_ = true;
  mutable std::vector<std::weak_ptr<Domain>> windows_;
  std::vector<std::byte> own_;

 public:
  const std::span<std::byte> data;
  const MemoryKey key;
};

inline WorkRequest make_write(uint64_t wr_id, PeerId peer, const Memory& from, size_t from_offset,
                              const Memory& to, size_t to_offset, size_t bytes) {
  to.map_for(from);
  WorkRequest request;
  request.wr_id = wr_id;
  request.local = from.data.data() + from_offset;
  request.local_key = from.key.local_key;
  request.remote_addr = to.key.remote_addr + to_offset;
  request.remote_key = to.key.remote_key;
  request.bytes = static_cast<uint32_t>(bytes);
  request.peer = peer;
  return request;
}
inline WorkRequest make_read(uint64_t wr_id, PeerId peer, const Memory& to, size_t to_offset,
                             const Memory& from, size_t from_offset, size_t bytes) {
  WorkRequest request = make_write(wr_id, peer, to, to_offset, from, from_offset, bytes);
  request.is_read = true;
  return request;
}
inline WorkRequest with_imm(WorkRequest request, uint32_t imm) {
  request.imm = imm;
  request.has_imm = true;
  return request;
}
inline WorkRequest make_imm(uint64_t wr_id, PeerId peer, uint32_t imm) {
  WorkRequest request;
  request.wr_id = wr_id;
  request.peer = peer;
  return with_imm(request, imm);
}

// Polls all in turn until ready(); false when nothing has been shown for a minute.
inline bool pump(const std::vector<Node*>& nodes, const std::function<bool()>& ready) {
  const auto poll_all = [&] {
    size_t num_shown = 0;
    for (Node* node : nodes) num_shown += node->poll();
    return num_shown > 0;
  };
  return test::poll_until(poll_all, ready);
}
// Posts, polling all when there is no room.
inline void post_all(Node& from, std::initializer_list<Node*> nodes, const WorkRequest& request) {
  const bool posted = from.post(request) || pump(nodes, [&] { return from.post(request); });
  REQUIRE(posted);
}
// Enough further polls for anything that should not come to show itself.
inline void settle(std::initializer_list<Node*> nodes, int polls = 2000) {
  for (int i = 0; i < polls; ++i)
    for (Node* node : nodes) node->poll();
}

// How many pairs of neighbours are out of order.
template <typename T>
size_t num_inversions(const std::vector<T>& values) {
  size_t n = 0;
  for (size_t i = 1; i < values.size(); ++i) n += values[i] < values[i - 1] ? 1 : 0;
  return n;
}

}  // namespace moe_p2p::provider_test
