// An engine, its proxy thread and what users made on it, each under a number. Called by any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
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
// Throws Error{kInvalidArgument} unless a recording may have so many events.
size_t checked_events(int64_t num_events);
// Events, [n, 5] (base/recorder.h), and how many were overwritten; null: there are none.
std::tuple<Tensor, int64_t> events_from(std::unique_ptr<base::Recording> recorded);

class EngineObject {
 public:
  EngineObject(const engine::EngineOptions& options, const proxy::ProxyOptions& proxy_options);

  engine::TransferEngine& engine() noexcept { return engine_; }
  proxy::ProxyThread& proxy() noexcept { return proxy_; }
  const platform::WaitPolicy& wait() const noexcept { return wait_; }
  const std::string& label() const noexcept { return label_; }

  // The tensor stays alive while it is registered.
  int64_t register_memory(const Tensor& memory, bool in_order);
  // Registers the memory once more, under keys of its own: for one peer, so that unregistering the
  // grant takes the memory back from that peer alone.
  int64_t grant(int64_t memory);
  // Of a memory with grants: the grants first.
  void unregister_memory(int64_t memory);
  const engine::MemoryHandle* memory(int64_t memory);

  int64_t connect(const engine::EngineAddress& address, int64_t priority, uint64_t tag);
  void disconnect(int64_t peer);
  // TransferEngine::sever().
  void sever(uint64_t tag, const std::vector<int64_t>& memories, double timeout_s);
  const engine::Peer* peer(int64_t peer);

  int64_t resolve(const engine::MemoryDescriptor& descriptor, std::optional<int64_t> peer,
                  int64_t priority);
  const engine::RemoteRegion* region(int64_t region);

  // Whoever passes results of memory(), peer() and region() on holds it meanwhile.
  std::unique_lock<std::mutex> naming() { return std::unique_lock(naming_); }

  int64_t submit(std::shared_ptr<RequestRecord> record, int64_t priority) {
    return submit(std::span<const std::shared_ptr<RequestRecord>>(&record, 1), priority);
  }
  // All or none; returns the first one's number, the others' follow.
  int64_t submit(std::span<const std::shared_ptr<RequestRecord>> records, int64_t priority);
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

  // Later calls and running waits throw Error{kClosed}; waits until these have, for a while.
  void close() noexcept;

 private:
  struct Waiting {
    explicit Waiting(std::atomic<int>& num) : count(num) { ++count; }
    ~Waiting() { --count; }
    std::atomic<int>& count;
  };
  struct Memory {
    const engine::MemoryHandle* handle;
    Tensor tensor;
    int64_t granted = 0;  // of a grant: the memory
  };
  int64_t add_registration(const provider::MemorySpan& span, const Tensor& tensor, int64_t granted);
  std::string where_is(const engine::Request& request);
  template <typename Ready>
  bool wait_in_slices(std::chrono::milliseconds timeout, Ready&& ready);
  void check_open() const;
  void check_priority(int64_t priority) const;
  std::vector<int64_t> grants_of(int64_t memory);
  void drop_forgotten();  // under mutex_

  const std::string label_;
  const platform::WaitPolicy wait_;
  std::atomic<bool> closed_{false};
  std::atomic<int> num_waiting_{0};  // threads in wait_in_slices()

  // Held from the look-up of what a request names until it is submitted: nothing of it is removed
  // in between. Taken before mutex_.
  std::mutex naming_;
  std::mutex mutex_;  // guards the tables
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
