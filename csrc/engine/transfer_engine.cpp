#include "engine/transfer_engine.h"

#include <atomic>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <unordered_map>
#include <utility>

#include "base/log.h"
#include "engine/lent_windows.h"
#include "engine/loop_back.h"
#include "engine/poller.h"
#include "engine/poller_call.h"
#include "engine/submission_check.h"

namespace moe_p2p::engine {

using base::Code;
using platform::Clock;
using platform::Deadline;

namespace {

// Identifies the calling thread with one load.
const void* this_thread() noexcept {
  static thread_local char mark;
  return &mark;
}

provider::DomainOptions domain_options(const EngineOptions& options,
                                       const platform::SharedMemory& waker,
                                       platform::EventCount* event) {
  return {.nic = 0, .settings = options.settings, .waker = event, .waker_name = waker.name()};
}

struct PeerEntry {
  std::unique_ptr<Peer> peer;
  std::map<base::Bytes, std::unique_ptr<RemoteRegion>> regions;  // by serialized descriptor
  bool leaving = false;
};

struct HandleEntry {
  std::unique_ptr<MemoryHandle> handle;
  bool leaving = false;
  base::Bytes shared = {};           // for descriptors
  std::vector<bool> withdrawn = {};  // NICs that an earlier unregister_memory() got it back from
};

// Marks an entry for a step that must not run twice. The caller takes the mark back when the step
// fails.
template <typename Map, typename Key>
void mark_leaving(std::mutex& mutex, Map& map, Key key, const std::string& unknown) {
  const std::lock_guard lock(mutex);
  const auto found = map.find(key);
  MOE_P2P_CHECK(found != map.end() && !found->second.leaving, Code::kInvalidArgument, unknown);
  found->second.leaving = true;
}

}  // namespace

struct TransferEngine::State {
  State(const EngineOptions& engine_options, const DomainFactory& factory)
      : options(engine_options),
        waker_memory(platform::SharedMemory::create("waker", sizeof(platform::EventCount))),
        waker(new (waker_memory.data()) platform::EventCount{}),
        group(options.num_nics, domain_options(options, waker_memory, waker), factory,
              options.label),
        windows(group, options.label),
        poller(group) {}

  bool polled_by_caller() const noexcept {
    return polling_thread.load(std::memory_order_relaxed) == this_thread();
  }

  // Runs closure where it cannot overlap with progress(): here when no other thread polls,
  // otherwise on the polling thread.
  void run_exclusive(TransferEngine& engine, const Closure& closure,
                     std::optional<Deadline> deadline = {}) {
    // acquire: pairs with the release in detach_poller().
    if (polling_thread.load(std::memory_order_acquire) == nullptr) {
      const std::lock_guard lock(unpolled_mutex);
      poller.take_mail();
      closure();
      return;
    }
    engine.run_on_poller(closure, deadline.value_or(Clock::now() + options.control_timeout));
  }

  // One of each NIC.
  void count(std::span<NicCounters> counters) {
    for (int nic = 0; NicCounters& each : counters) {
      each = poller.nic(nic).counters();
      each.connections_refused = group[nic++].num_refused();
    }
  }

  // Once register_memory() of the engine is asked for memory in order.
  void make_loop_back(TransferEngine& engine) {
    const std::lock_guard lock(loop_back_mutex);
    if (loop_back) return;
    auto made = std::make_unique<LoopBack>(options.num_nics);
    made->use(engine.register_memory(made->landing()),
              engine.connect(engine.address(), LoopBack::kPriority));
    loop_back = std::move(made);
  }

  RemoteRegion* find_or_add_region(const Peer* peer, const MemoryDescriptor& descriptor);
  const Peer* find_peer(const EngineAddress& address, int priority);

  const EngineOptions options;
  platform::SharedMemory waker_memory;
  platform::EventCount* waker;
  DomainGroup group;
  LentWindows windows;
  Poller poller;
  CallPool calls;
  std::atomic<const void*> polling_thread{nullptr};
  std::mutex unpolled_mutex;   // between control calls that stand in for the polling thread
  std::mutex loop_back_mutex;  // guards loop_back, and is held while it reads
  std::unique_ptr<LoopBack> loop_back;  // made for the first memory that is registered in_order
  std::mutex mutex;  // guards the two tables; never held while a provider is called
  std::unordered_map<const Peer*, PeerEntry> peers;
  std::unordered_map<const MemoryHandle*, HandleEntry> handles;
};

TransferEngine::TransferEngine(const EngineOptions& options)
    : TransferEngine(options, [&](const provider::DomainOptions& domain) {
        return provider::open_domain(options.provider, domain);
      }) {}

TransferEngine::TransferEngine(const EngineOptions& options, const DomainFactory& factory)
    : state_(std::make_unique<State>(options, factory)) {}

// Closes the NICs first: after that nothing reads the memory of unfinished Requests. In a forked
// child everything belongs to the parent and is left as it is.
TransferEngine::~TransferEngine() {
  if (state_->waker_memory.inherited()) {
    (void)state_.release();
    return;
  }
  state_->group.close();
  state_->poller.close({Code::kClosed, 0});
}

int TransferEngine::num_nics() const noexcept { return state_->options.num_nics; }
bool TransferEngine::orders_writes() const noexcept { return state_->group.orders_writes(); }
bool TransferEngine::writes_in_place() const noexcept { return state_->group[0].writes_in_place(); }
EngineAddress TransferEngine::address() const { return state_->group.address(); }
platform::EventCount& TransferEngine::waker() noexcept { return *state_->waker; }
const std::string& TransferEngine::waker_name() const noexcept {
  return state_->waker_memory.name();
}
ImmTable& TransferEngine::imm_table() noexcept { return state_->poller.imm_table(); }

// --- memory ---

const MemoryHandle* TransferEngine::register_memory(const provider::MemorySpan& span) {
  if (span.in_order) state_->make_loop_back(*this);  // it connects: not while a peer is fenced
  auto handle =
      std::make_unique<MemoryHandle>(MemoryHandle{span, state_->group.register_memory(span)});
  if (span.kind == provider::MemoryKind::kCuda && state_->group.needs_gpu_flush()) {
    try {
      state_->poller.gpu_flushes().include(span);
    } catch (...) {
      std::vector<bool> withdrawn;
      state_->group.unregister_memory(handle->keys, withdrawn);
      throw;
    }
  }
  const MemoryHandle* key = handle.get();
  if (span.kind == provider::MemoryKind::kCuda) state_->windows.open(span.device);
  base::Bytes shared = state_->windows.describe(span);
  const std::lock_guard lock(state_->mutex);
  state_->handles[key] = {.handle = std::move(handle), .shared = std::move(shared)};
  return key;
}

void TransferEngine::unregister_memory(const MemoryHandle* handle) {
  State& s = *state_;
  mark_leaving(s.mutex, s.handles, handle,
               s.options.label + ": unregistering memory that is not registered here");
  HandleEntry* entry = nullptr;
  {
    const std::lock_guard lock(s.mutex);
    entry = &s.handles[handle];  // stays where it is; nobody else uses a leaving one
  }
  try {
    s.run_exclusive(*this, [&] { s.poller.revoke(*handle, {Code::kClosed, 0}); });
    s.group.unregister_memory(handle->keys, entry->withdrawn);
  } catch (...) {
    const std::lock_guard lock(s.mutex);
    entry->leaving = false;
    throw;
  }
  const std::lock_guard lock(s.mutex);
  s.handles.erase(handle);
}

std::string TransferEngine::why_no_fence() const { return state_->group.why_no_fence(); }

MemoryDescriptor TransferEngine::descriptor(const MemoryHandle* handle) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->handles.find(handle);
  MOE_P2P_CHECK(found != state_->handles.end(), Code::kInvalidArgument, state_->options.label,
                ": describing memory that is not registered here");
  MemoryDescriptor descriptor{.owner = address(),
                              .bytes = handle->span.bytes,
                              .kind = handle->span.kind,
                              .rails = {},
                              .shared = found->second.shared};
  for (const auto& key : handle->keys)
    descriptor.rails.push_back({key.remote_addr, key.remote_key});
  return descriptor;
}

// --- peers ---

const Peer* TransferEngine::connect(const EngineAddress& address, int priority, uint64_t tag) {
  check_priority(priority, state_->options.label);
  auto peer =
      std::make_unique<Peer>(address, priority, state_->group.connect(address, priority, tag));
  const Peer* key = peer.get();
  const std::lock_guard lock(state_->mutex);
  state_->peers[key].peer = std::move(peer);
  return key;
}

// The polling thread drops the peer before the provider does: it must not post to a removed id.
void TransferEngine::disconnect(const Peer* peer) {
  State& s = *state_;
  mark_leaving(s.mutex, s.peers, peer,
               s.options.label + ": disconnecting a peer that is not connected here");
  try {
    s.run_exclusive(*this, [&] { s.poller.revoke(*peer, {Code::kClosed, 0}); });
  } catch (...) {
    const std::lock_guard lock(s.mutex);
    s.peers[peer].leaving = false;
    throw;
  }
  PeerEntry entry;
  {
    const std::lock_guard lock(s.mutex);
    entry = std::move(s.peers.extract(peer).mapped());
  }
  for (const auto& [descriptor, region] : entry.regions) {
    if (s.windows.remove(*region)) s.group.map_remote(*region, {});
  }
  s.group.disconnect(entry.peer->rails());
}

const Peer* TransferEngine::State::find_peer(const EngineAddress& address, int priority) {
  const std::lock_guard lock(mutex);
  for (const auto& [peer, entry] : peers)
    if (!entry.leaving && peer->priority() == priority && peer->address() == address) return peer;
  return nullptr;
}

RemoteRegion* TransferEngine::State::find_or_add_region(const Peer* peer,
                                                        const MemoryDescriptor& descriptor) {
  const std::lock_guard lock(mutex);
  const auto found = peers.find(peer);
  MOE_P2P_CHECK(found != peers.end() && !found->second.leaving, Code::kInvalidArgument,
                options.label, ": resolving a memory descriptor for a peer that is not connected");
  auto& region = found->second.regions[descriptor.serialize()];
  if (region == nullptr) {
    region = std::make_unique<RemoteRegion>(RemoteRegion{peer, descriptor.bytes, {}});
    for (size_t nic = 0; nic < peer->rails().size(); ++nic) {
      const auto& remote = descriptor.rails[nic % descriptor.rails.size()];
      region->rails.push_back({peer->rails()[nic], remote.remote_addr, remote.remote_key});
    }
  }
  return region.get();
}

const RemoteRegion* TransferEngine::resolve(const MemoryDescriptor& descriptor, const Peer* peer,
                                            int priority) {
  const std::string& label = state_->options.label;
  MOE_P2P_CHECK(
      !descriptor.rails.empty() && descriptor.rails.size() == descriptor.owner.nics.size(),
      Code::kInvalidArgument, label, ": memory descriptor has ", descriptor.rails.size(),
      " keys for ", descriptor.owner.nics.size(), " NICs of its owner");
  if (peer == nullptr) peer = state_->find_peer(descriptor.owner, priority);
  if (peer == nullptr) peer = connect(descriptor.owner, priority);
  MOE_P2P_CHECK(peer->address() == descriptor.owner, Code::kInvalidArgument, label,
                ": the memory descriptor belongs to another peer than the one given");
  const RemoteRegion* region = state_->find_or_add_region(peer, descriptor);
  state_->windows.add(*region, descriptor.shared);
  state_->group.announce(*region);
  return region;
}

void TransferEngine::sever(uint64_t tag, std::span<const MemoryHandle* const> memory,
                           Deadline deadline) {
  const std::string& label = state_->options.label;
  MOE_P2P_CHECK(tag != 0, Code::kInvalidArgument, label, ": severing connections without a tag");
  for (const MemoryHandle* handle : memory)
    MOE_P2P_CHECK(handle->span.in_order, Code::kInvalidArgument, label,
                  ": memory that is not registered in order cannot be fenced by queue pair");
  state_->group.sever(tag, deadline);
  if (memory.empty()) return;
  const std::lock_guard lock(state_->loop_back_mutex);
  const std::vector<Request*> reads = state_->loop_back->reads(memory);
  submit(reads);
  for (Request* read : reads) {
    MOE_P2P_CHECK(read->wait(deadline), Code::kTimeout,
                  "reading own memory through own NICs takes too long");
    MOE_P2P_CHECK(read->status().ok(), Code::kTransport,
                  "reading own memory through own NICs failed (",
                  base::code_name(read->status().code), ")", first_failure());
  }
}

void TransferEngine::map_region(const RemoteRegion* region, const provider::MemorySpan& local) {
  state_->windows.remove(*region);
  state_->group.map_remote(*region, local);
}

// --- submission ---

void TransferEngine::submit(Request& request) {
  Request* const one[] = {&request};
  submit(one);
}

void TransferEngine::submit(std::span<Request* const> requests) {
  for (const Request* request : requests) {
    check_priority(request->priority, state_->options.label);
    check_operation(request->operation, num_nics(), state_->options.label);
    MOE_P2P_CHECK(!request->active(), Code::kInvalidArgument, state_->options.label,
                  ": submitting a Request that is not done");
  }
  for (Request* request : requests) {
    request->start();
    state_->poller.mailbox().push(*request);
  }
  platform::notify_all(*state_->waker);
}

void TransferEngine::submit_from_poller(Request& request) noexcept {
  request.start();
  state_->poller.activate(request);
}

std::optional<Cancellation> TransferEngine::cancel(Request& request) {
  std::optional<Cancellation> cancellation;
  state_->run_exclusive(*this, [&] { cancellation = state_->poller.cancel(request); });
  return cancellation;
}

std::optional<Progress> TransferEngine::progress_of(const Request& request, Deadline deadline) {
  std::optional<Progress> progress;
  const auto look = [&] {
    if (request.active()) progress = state_->poller.progress(request);
  };
  state_->run_exclusive(*this, look, deadline);
  return progress;
}

std::unique_ptr<base::Recording> TransferEngine::record(size_t num_events,
                                                        std::vector<NicCounters>* counters) {
  auto ring = num_events > 0 ? std::make_unique<base::Recording>(num_events) : nullptr;
  if (counters) counters->resize(static_cast<size_t>(num_nics()));
  state_->run_exclusive(*this, [&] {
    ring = state_->poller.recorder().exchange(std::move(ring));
    if (counters) state_->count(*counters);
  });
  return ring;
}

base::Recorder& TransferEngine::recorder() noexcept { return state_->poller.recorder(); }

void TransferEngine::run_on_poller(const Closure& closure, Deadline deadline) {
  if (state_->polled_by_caller()) {
    state_->poller.take_mail();  // earlier submissions come first
    closure();
    return;
  }
  PollerCall& call = state_->calls.take(closure);
  state_->poller.mailbox().push(call);
  platform::notify_all(*state_->waker);
  MOE_P2P_CHECK(call.wait(deadline), Code::kTimeout, state_->options.label,
                ": the polling thread did not take a call in time; does a thread call progress()?");
}

// --- polling thread ---

bool TransferEngine::progress(Lookout* lookout) noexcept {
  // relaxed: readers compare it with their own mark, or with null (see detach_poller()).
  state_->polling_thread.store(this_thread(), std::memory_order_relaxed);
  return state_->poller.turn(lookout);
}

bool TransferEngine::idle() const noexcept { return state_->poller.idle(); }
bool TransferEngine::must_poll() const noexcept { return state_->poller.must_poll(); }

void TransferEngine::detach_poller() noexcept {
  // release: pairs with the acquire in run_exclusive(), which then sees all the poller wrote.
  state_->polling_thread.store(nullptr, std::memory_order_release);
}

bool TransferEngine::gpu_flush_failed() const noexcept {
  return state_->poller.gpu_flushes().failed();
}

std::string TransferEngine::gpu_flush_failure() const {
  return state_->poller.gpu_flushes().failure();
}

std::string TransferEngine::first_failure() const {
  std::string text = state_->group.failure();
  if (!text.empty()) text = "; first failure of the NICs: " + text;
  const std::string flush = gpu_flush_failure();
  return flush.empty() ? text : text + "; " + flush;
}

std::vector<NicCounters> TransferEngine::counters() const {
  std::vector<NicCounters> counters(static_cast<size_t>(num_nics()));
  state_->count(counters);
  return counters;
}

}  // namespace moe_p2p::engine
