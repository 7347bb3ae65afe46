// An engine, its proxy thread and what users made on it, each under a number. Called by any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/transfer_engine.h"
#include "ops/finished_requests.h"
#include "ops/registry.h"
#include "ops/tensor_checks.h"
#include "proxy/proxy_thread.h"

namespace moe_p2p::ops {

// Throws Error{kInvalidArgument} for anything but "spin", "yield" and "sleep".
platform::WaitPolicy wait_policy(const std::string& mode);
// Throws Error{kInvalidArgument} unless it is a number of seconds of at least 0.
std::chrono::milliseconds timeout_from(double timeout_s);

class EngineObject {
 public:
  EngineObject(const engine::EngineOptions& options, const proxy::ProxyOptions& proxy_options);

  engine::TransferEngine& engine() noexcept { return engine_; }
  proxy::ProxyThread& proxy() noexcept { return proxy_; }
  const platform::WaitPolicy& wait() const noexcept { return wait_; }
  const std::string& label() const noexcept { return label_; }

  // The tensor stays alive while it is registered.
  int64_t register_memory(const Tensor& memory);
  // Registers the memory once more, under keys of its own: for one peer, so that unregistering the
  // grant takes the memory back from that peer alone.
  int64_t grant(int64_t memory);
  // Of a memory with grants: the grants first.
  void unregister_memory(int64_t memory);
  const engine::MemoryHandle* memory(int64_t memory);

  int64_t connect(const engine::EngineAddress& address, int64_t priority);
  void disconnect(int64_t peer);
  const engine::Peer* peer(int64_t peer);

  int64_t resolve(const engine::MemoryDescriptor& descriptor, const engine::Peer* peer,
                  int64_t priority);
  const engine::RemoteRegion* region(int64_t region);

  int64_t submit(std::shared_ptr<RequestRecord> record, int64_t priority);
  std::shared_ptr<RequestRecord> request(int64_t request);
  // Waits in slices, so that close() and signals end it early.
  void wait_request(int64_t request, double timeout_s, double waited_s);
  FinishedRequests& finished() noexcept { return finished_; }
  std::vector<int64_t> take_finished(int64_t queue, double timeout_s);
  // As TransferEngine::cancel(); nothing also when somebody has waited for its end.
  std::optional<engine::Cancellation> cancel_request(int64_t request);
  // No one waits for it any more: its record goes away once it is done.
  void forget_request(int64_t request);
  uint64_t wait_imm(uint32_t imm, uint64_t count, double timeout_s);
  uint64_t free_imm(uint32_t imm);  // returns how often it was counted

  // Later calls and running waits throw Error{kClosed}.
  void close() noexcept {
    closed_.store(true, std::memory_order_release);
    finished_.wake_all();
  }

 private:
  struct Memory {
    const engine::MemoryHandle* handle;
    Tensor tensor;
    int64_t granted = 0;  // of a grant: the memory
  };
  int64_t add_registration(const provider::MemorySpan& span, const Tensor& tensor, int64_t granted);
  template <typename Ready>
  bool wait_in_slices(std::chrono::milliseconds timeout, Ready&& ready);
  void check_open() const;
  std::vector<int64_t> grants_of(int64_t memory);
  void drop_forgotten();  // under mutex_

  const std::string label_;
  const platform::WaitPolicy wait_;
  std::atomic<bool> closed_{false};

  std::mutex mutex_;  // guards the tables
  int64_t last_id_ = 0;
  std::unordered_map<int64_t, Memory> memories_;
  std::unordered_map<int64_t, const engine::Peer*> peers_;
  std::unordered_map<int64_t, const engine::RemoteRegion*> regions_;
  std::unordered_map<int64_t, std::shared_ptr<RequestRecord>> requests_;
  std::vector<int64_t> forgotten_;  // in requests_, removed by a later submit() once done

  FinishedRequests finished_;
  // Destroyed in this order, last member first: the thread, the engine, then what they point to.
  engine::TransferEngine engine_;
  proxy::ProxyThread proxy_;
};

// All engines of the process.
ObjectTable<EngineObject>& engines();

}  // namespace moe_p2p::ops
