#include "ops/engine_object.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "base/log.h"
#include "platform/cuda.h"
#include "platform/interrupt.h"

namespace moe_p2p::ops {

using base::Code;
using std::chrono::milliseconds;

namespace {

// How late a waiter notices a signal, or that its engine was closed.
constexpr milliseconds kSlice{50};

// How long an error text waits for what the polling thread knows. Too small: a busy one is called
// one that does not answer.
constexpr milliseconds kAnswer{100};

constexpr int64_t kMaxEvents = int64_t{1} << 24;  // 640 MiB

// Returns the first of `count` numbers, which no object of any engine has: what belongs to another
// engine is refused, and not taken for something of this one.
int64_t new_ids(int64_t count = 1) {
  static std::atomic<int64_t> next{1};
  return next.fetch_add(count, std::memory_order_relaxed);
}

template <typename Table>
auto& find(Table& table, int64_t id, const char* kind, const std::string& label) {
  const auto found = table.find(id);
  MOE_P2P_CHECK(found != table.end(), Code::kInvalidArgument, label, ": ", kind, " ", id,
                " is not known here; was it removed, or does it belong to another engine?");
  return found->second;
}

}  // namespace

platform::WaitPolicy wait_policy(const std::string& mode) {
  platform::WaitPolicy policy;
  if (mode == "spin") {
    policy.mode = platform::WaitMode::kSpin;
  } else if (mode == "yield") {
    policy.mode = platform::WaitMode::kYield;
  } else {
    MOE_P2P_CHECK(mode == "sleep", Code::kInvalidArgument, "wait is \"", mode,
                  "\", must be \"spin\", \"yield\" or \"sleep\"");
  }
  return policy;
}

size_t checked_events(int64_t num_events) {
  MOE_P2P_CHECK(num_events >= 0 && num_events <= kMaxEvents, Code::kInvalidArgument,
                "num_events is ", num_events, ", must be from 0 to ", kMaxEvents);
  return static_cast<size_t>(num_events);
}

std::tuple<Tensor, int64_t> events_from(std::unique_ptr<base::Recording> recorded) {
  const size_t size = recorded ? recorded->size() : 0;
  Tensor events = make_tensor({static_cast<int64_t>(size), 5}, ScalarType::Long);
  auto* out = static_cast<base::Event*>(events.mutable_data_ptr());
  for (size_t i = 0; i < size; ++i) out[i] = (*recorded)[i];
  return {events, recorded ? static_cast<int64_t>(recorded->overwritten()) : 0};
}

milliseconds timeout_from(double timeout_s) {
  MOE_P2P_CHECK(timeout_s >= 0, Code::kInvalidArgument, "timeout_s is ", timeout_s,
                ", must be at least 0");
  constexpr double kLongest = 1e9;  // seconds; later deadlines would overflow the clock
  return milliseconds(static_cast<int64_t>(std::ceil(std::min(timeout_s, kLongest) * 1e3)));
}

ObjectTable<EngineObject>& engines() {
  static auto* const table = new ObjectTable<EngineObject>("engine");
  return *table;
}

EngineObject::EngineObject(const engine::EngineOptions& options,
                           const proxy::ProxyOptions& proxy_options)
    : label_(options.label),
      wait_(proxy_options.wait),
      engine_(options),
      proxy_(engine_, proxy_options) {}

void EngineObject::close() noexcept {
  closed_.store(true);
  finished_.wake_all();
  // At the end of a program its other threads may not come back from here later than this one.
  const auto deadline = platform::Clock::now() + 4 * kSlice;
  while (num_waiting_.load() != 0 && platform::Clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
}

void EngineObject::check_open() const {
  MOE_P2P_CHECK(!closed_.load(std::memory_order_acquire), Code::kClosed, label_, " is closed");
}

void EngineObject::check_priority(int64_t priority) const {
  MOE_P2P_CHECK(priority >= 0 && priority < engine::kNumPriorities, Code::kInvalidArgument, label_,
                ": priority is ", priority, ", must be 0 to ", engine::kNumPriorities - 1);
}

int64_t EngineObject::register_memory(const Tensor& memory, bool in_order) {
  const bool on_gpu = memory.is_cuda();
  const OnDevice placed(on_gpu ? memory.get_device() : -1);
  check_placed(memory, "memory");
  const auto bytes = static_cast<uint64_t>(memory.numel()) * memory.element_size();
  MOE_P2P_CHECK(bytes > 0, Code::kInvalidArgument, "memory is ", describe(memory),
                ", must have at least one element");
  auto* const data = static_cast<std::byte*>(memory.mutable_data_ptr());
  MOE_P2P_CHECK(!on_gpu || !platform::is_managed(data), Code::kInvalidArgument, "memory is ",
                describe(memory),
                " in managed memory, which moves between GPU and host; use a tensor of torch's own "
                "allocator");
  return add_registration(
      {.data = data,
       .bytes = bytes,
       .kind = on_gpu ? provider::MemoryKind::kCuda : provider::MemoryKind::kHost,
       .device = on_gpu ? memory.get_device() : -1,
       .in_order = in_order},
      memory, 0);
}

int64_t EngineObject::add_registration(const provider::MemorySpan& span, const Tensor& tensor,
                                       int64_t granted) {
  const auto* handle = engine_.register_memory(span);
  const int64_t id = new_ids();
  const std::lock_guard lock(mutex_);
  memories_.emplace(id, Memory{handle, tensor, granted});
  return id;
}

int64_t EngineObject::grant(int64_t memory) {
  const auto named = naming();
  std::unique_lock lock(mutex_);
  const Memory granted = find(memories_, memory, "memory", label_);
  lock.unlock();
  const OnDevice placed(granted.tensor.is_cuda() ? granted.tensor.get_device() : -1);
  return add_registration(granted.handle->span, granted.tensor, memory);
}

void EngineObject::unregister_memory(int64_t memory) {
  for (const int64_t grant : grants_of(memory)) unregister_memory(grant);
  auto named = naming();
  std::unique_lock lock(mutex_);
  const Memory removed = find(memories_, memory, "memory", label_);
  memories_.erase(memory);
  lock.unlock();
  named.unlock();
  try {
    engine_.unregister_memory(removed.handle);
  } catch (...) {  // a NIC may still use it: the tensor stays alive, and it may be tried again
    lock.lock();
    memories_.emplace(memory, removed);
    throw;
  }
}

std::vector<int64_t> EngineObject::grants_of(int64_t memory) {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> grants;
  for (const auto& [id, one] : memories_)
    if (one.granted == memory) grants.push_back(id);
  return grants;
}

const engine::MemoryHandle* EngineObject::memory(int64_t memory) {
  const std::lock_guard lock(mutex_);
  return find(memories_, memory, "memory", label_).handle;
}

int64_t EngineObject::connect(const engine::EngineAddress& address, int64_t priority,
                              uint64_t tag) {
  check_priority(priority);
  const engine::Peer* peer = engine_.connect(address, static_cast<int>(priority), tag);
  const int64_t id = new_ids();
  const std::lock_guard lock(mutex_);
  peers_.emplace(id, peer);
  return id;
}

void EngineObject::disconnect(int64_t peer) {
  auto named = naming();
  std::unique_lock lock(mutex_);
  const engine::Peer* removed = find(peers_, peer, "peer", label_);
  peers_.erase(peer);
  std::erase_if(regions_, [&](const auto& region) { return region.second->owner == removed; });
  lock.unlock();
  named.unlock();
  engine_.disconnect(removed);
}

void EngineObject::sever(uint64_t tag, const std::vector<int64_t>& memories, double timeout_s) {
  check_open();
  std::vector<const engine::MemoryHandle*> handles;
  for (const int64_t one : memories) handles.push_back(memory(one));
  engine_.sever(tag, handles, platform::Clock::now() + timeout_from(timeout_s));
}

const engine::Peer* EngineObject::peer(int64_t peer) {
  const std::lock_guard lock(mutex_);
  return find(peers_, peer, "peer", label_);
}

// Without a peer it may connect, which takes long, and nothing is held meanwhile.
int64_t EngineObject::resolve(const engine::MemoryDescriptor& descriptor,
                              std::optional<int64_t> peer, int64_t priority) {
  check_priority(priority);
  std::unique_lock<std::mutex> named;
  if (peer) named = naming();
  const engine::RemoteRegion* region =
      engine_.resolve(descriptor, peer ? this->peer(*peer) : nullptr, static_cast<int>(priority));
  const int64_t id = new_ids();
  const std::lock_guard lock(mutex_);
  regions_.emplace(id, region);
  return id;
}

const engine::RemoteRegion* EngineObject::region(int64_t region) {
  const std::lock_guard lock(mutex_);
  return find(regions_, region, "region", label_);
}

int64_t EngineObject::submit(std::span<const std::shared_ptr<RequestRecord>> records,
                             int64_t priority) {
  check_open();
  check_priority(priority);
  std::vector<engine::Request*> requests;
  for (const auto& record : records) {
    record->request.priority = static_cast<uint8_t>(priority);
    requests.push_back(&record->request);
  }
  engine_.submit(requests);
  const int64_t first = new_ids(std::ssize(records));
  const std::lock_guard lock(mutex_);
  drop_forgotten();
  for (int64_t id = first; const auto& record : records) requests_.emplace(id++, record);
  return first;
}

void EngineObject::forget_request(int64_t request) {
  const std::lock_guard lock(mutex_);
  if (requests_.contains(request)) forgotten_.push_back(request);
  drop_forgotten();
}

void EngineObject::drop_forgotten() {
  std::erase_if(forgotten_, [&](int64_t id) {
    const auto found = requests_.find(id);
    if (found != requests_.end() && !found->second->request.done()) return false;
    if (found != requests_.end()) requests_.erase(found);
    return true;
  });
}

std::shared_ptr<RequestRecord> EngineObject::request(int64_t request) {
  const std::lock_guard lock(mutex_);
  return find(requests_, request, "request", label_);
}

std::optional<engine::Cancellation> EngineObject::cancel_request(int64_t request) {
  check_open();
  std::shared_ptr<RequestRecord> record;
  {
    const std::lock_guard lock(mutex_);
    const auto found = requests_.find(request);
    if (found == requests_.end()) return std::nullopt;
    record = found->second;
  }
  return engine_.cancel(record->request);
}

template <typename Ready>
bool EngineObject::wait_in_slices(milliseconds timeout, Ready&& ready) {
  const auto deadline = platform::Clock::now() + timeout;
  const Waiting counted(num_waiting_);
  for (;;) {
    check_open();
    if (ready(std::min(deadline, platform::Clock::now() + kSlice))) return true;
    if (platform::Clock::now() >= deadline) return false;
    MOE_P2P_CHECK(
        !platform::interrupted(), Code::kAborted, label_,
        ": a signal interrupted a wait; what was waited for goes on, and may be waited for "
        "again");
  }
}

std::vector<int64_t> EngineObject::take_finished(int64_t queue, double timeout_s) {
  std::vector<int64_t> ended;
  wait_in_slices(timeout_from(timeout_s),
                 [&](platform::Deadline until) { return finished_.take(queue, until, ended); });
  return ended;
}

// For the error text of a wait that has ended before the request.
std::string EngineObject::where_is(const engine::Request& request) {
  std::optional<engine::Progress> at;
  try {
    at = engine_.progress_of(request, platform::Clock::now() + kAnswer);
  } catch (const base::Error&) {
    return base::concat("; the polling thread did not answer within ", kAnswer.count(), " ms");
  }
  if (!at) return {};
  if (at->held) return "; nothing of it is posted: its gate has not opened";
  if (at->posted_writes == 0) return "; nothing of it is posted: other requests come first";
  return base::concat("; of ", at->posted_writes, " work requests that are posted, ", at->in_flight,
                      " have not ended", at->more ? ", and more are to come" : "");
}

void EngineObject::wait_request(int64_t request_id, double timeout_s, double waited_s) {
  const auto record = request(request_id);
  const bool done = wait_in_slices(timeout_from(timeout_s), [&](platform::Deadline until) {
    return record->request.wait(until, wait_);
  });
  MOE_P2P_CHECK(done, Code::kTimeout, label_, ": ", record->what, " is not done within ",
                timeout_s + waited_s, " s; it may still be waited for", where_is(record->request));
  {
    const std::lock_guard lock(mutex_);
    requests_.erase(request_id);
  }
  const base::Status status = record->request.status();
  const engine::Cancellation& end = record->request.cancellation();
  MOE_P2P_CHECK(status.code != Code::kCancelled, status.code, label_, ": ", record->what,
                " was cancelled; ", end.posted.bytes, " bytes in ", end.posted_writes,
                " work requests were posted and are done, ", end.taken_back.bytes,
                " bytes were taken back");
  MOE_P2P_CHECK(status.ok(), status.code, label_, ": ", record->what, " failed (",
                base::code_name(status.code), ", provider code ", status.detail, ")",
                engine_.first_failure());
}

uint64_t EngineObject::wait_imm(uint32_t imm, uint64_t count, double timeout_s) {
  engine::ImmTable& table = engine_.imm_table();
  const bool reached = wait_in_slices(timeout_from(timeout_s), [&](platform::Deadline until) {
    MOE_P2P_CHECK(table.can_count(imm), Code::kResourceExhausted, label_, ": all ",
                  engine::ImmTable::kMaxFreeForm, " counters are taken by other values than ", imm,
                  ", and ", table.discarded(),
                  " immediates were discarded; free_imm() those that are done");
    if (table.wait(imm, count, until, wait_)) return true;
    MOE_P2P_CHECK(!engine_.gpu_flush_failed(), Code::kTransport, label_, ": immediate ", imm,
                  " came ", table.value(imm), " times, expected ", count, "; ",
                  engine_.gpu_flush_failure());
    return false;
  });
  const uint64_t have = table.value(imm);
  MOE_P2P_CHECK(reached, Code::kTimeout, label_, ": immediate ", imm, " came ", have,
                " times within ", timeout_s, " s, expected ", count,
                table.discarded() == 0
                    ? std::string()
                    : base::concat("; ", table.discarded(), " immediates were discarded"));
  return have;
}

uint64_t EngineObject::free_imm(uint32_t imm) {
  check_open();
  const auto count = engine_.imm_table().give_back(imm);
  MOE_P2P_CHECK(count, Code::kInvalidArgument, label_, ": immediate ", imm,
                " is being waited for by another thread, so it cannot be given back");
  return *count;
}

}  // namespace moe_p2p::ops
