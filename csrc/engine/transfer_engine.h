// The transfer engine: one-sided writes with immediates, and reads, over all NICs of one GPU (or
// CPU rank). It has no world: peers are connected and dropped one by one, at any time.
//
// Threads. Exactly one thread calls progress() (the proxy thread, or a simulation). Everything
// marked "any thread" may be called at the same time; submissions reach the polling thread through
// the mailbox.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/recorder.h"
#include "engine/domain_group.h"
#include "engine/imm_counter.h"
#include "engine/mailbox.h"
#include "engine/memory_region.h"
#include "engine/nic_counters.h"
#include "engine/peer.h"
#include "engine/request.h"
#include "platform/shm.h"

namespace moe_p2p::engine {

class Lookout;  // poller.h

struct EngineOptions {
  std::string provider = "loopback";
  int num_nics = 2;
  std::string settings;          // for the provider, "key=value,..."
  std::string label = "engine";  // "rank 3": begins error texts
  // How long disconnect() and unregister_memory() wait for the polling thread to take their call.
  std::chrono::milliseconds control_timeout{10'000};
};

class TransferEngine {
 public:
  explicit TransferEngine(const EngineOptions& options);
  // Opens NICs with `factory` instead of options.provider.
  TransferEngine(const EngineOptions& options, const DomainFactory& factory);
  // Unfinished Requests fail with kClosed and their waiters wake. No thread may be in another
  // member.
  ~TransferEngine();

  // --- any thread ---
  int num_nics() const noexcept;
  // True when senders store into mapped regions by themselves (Domain::writes_in_place).
  bool writes_in_place() const noexcept;
  bool orders_writes() const noexcept;  // Domain::orders_writes of all NICs
  EngineAddress address() const;
  // The polling thread's event count: notify it after ringing a doorbell. In shared memory, so that
  // other processes of the host can open it by waker_name().
  platform::EventCount& waker() noexcept;
  const std::string& waker_name() const noexcept;

  const MemoryHandle* register_memory(const provider::MemorySpan& span);
  // Tries every NIC. Requests that still use the memory fail with kClosed. Throws Error{kTimeout}
  // when a peer may still answer a read into it (Domain::unregister_memory); to be called again.
  void unregister_memory(const MemoryHandle* handle);
  std::string why_no_fence() const;  // Domain::why_no_fence
  MemoryDescriptor descriptor(const MemoryHandle* handle) const;

  // Returns a new Peer at every call, with connections of its own (queue pairs), so that what
  // breaks them does not touch other Peers of the same address. The other engine need not do
  // anything. `priority`: the class of the connections, where NICs have classes (settings).
  // `tag`: for sever() at either end; 0: none.
  const Peer* connect(const EngineAddress& address, int priority = 0, uint64_t tag = 0);
  // Unfinished Requests to the peer fail with kClosed; others are not affected. The Peer
  // and its RemoteRegions are destroyed.
  void disconnect(const Peer* peer);
  // Connects to the owner unless it is connected for `priority`, or `peer` is given. The region is
  // valid until that peer is disconnected; the same descriptor yields the same region. Throws when
  // the descriptor does not belong to the peer.
  const RemoteRegion* resolve(const MemoryDescriptor& descriptor, const Peer* peer = nullptr,
                              int priority = 0);
  // The fence by queue pair, of verbs: when it returns, nothing that came over connections of `tag`
  // changes `memory` any more, and such connections are refused from then on. The memory must be
  // registered in_order, and own Peers of the tag disconnected. Throws Error{kTimeout} where the
  // NICs need longer; to be called again.
  void sever(uint64_t tag, std::span<const MemoryHandle* const> memory,
             platform::Deadline deadline);
  // Names memory of a peer on this host that is mapped here at `local`: software NICs write to a
  // GPU's through it, other NICs ignore it. One window per region; dropped with the peer.
  void map_region(const RemoteRegion* region, const provider::MemorySpan& local);

  // Throws Error{kInvalidArgument} for a range outside the registered memory or a Request that is
  // still in use, before anything is sent.
  void submit(Request& request);
  // All of them or, where one is refused, none.
  void submit(std::span<Request* const> requests);
  // Takes back what is not posted and returns how much that is. The Request is done when its posted
  // part has completed: with kCancelled when all of it arrived, so that its memory here may be
  // reused, else with that part's failure. Returns nothing when it ended well before; of one that
  // failed, or was cancelled before, how far it was then. The Request must have been submitted.
  // Throws Error{kTimeout} as run_on_poller() does.
  std::optional<Cancellation> cancel(Request& request);
  // Of a Request that was submitted; nothing when it is done. Throws as run_on_poller() does.
  std::optional<Progress> progress_of(const Request& request, platform::Deadline deadline);
  // Runs closure on the polling thread, in order with submissions, and waits for it; rethrows its
  // exception. Throws Error{kTimeout} when it had not begun by the deadline; it then never runs.
  // The closure must not block. Runs at once when the caller is the polling thread.
  void run_on_poller(const Closure& closure, platform::Deadline deadline);
  ImmTable& imm_table() noexcept;
  std::vector<NicCounters> counters() const;
  // Records what the polling thread does from now on, the newest num_events of it; 0: no more.
  // Returns what was recorded since this was called last, or null. counters: as they are at the
  // exchange, between two turns of the polling thread, so that they count what was recorded and no
  // more. Throws as run_on_poller() does.
  std::unique_ptr<base::Recording> record(size_t num_events,
                                          std::vector<NicCounters>* counters = nullptr);
  // True once a GPU could not flush what NICs wrote: immediates are not counted from then on, so a
  // wait for one cannot succeed. gpu_flush_failure() gives the reason; empty while this is false.
  bool gpu_flush_failed() const noexcept;
  std::string gpu_flush_failure() const;
  // "; first failure of the NICs: ..." for the end of an error text; empty without a failure.
  std::string first_failure() const;
  // Call it when the polling thread has ended. Until some thread calls progress() again,
  // disconnect() and unregister_memory() do its work themselves instead of waiting for it.
  void detach_poller() noexcept;

  // --- polling thread ---
  base::Recorder& recorder() noexcept;
  // submit() without the mailbox and the checks (made once, at set-up). The
  // Request must not be active.
  void submit_from_poller(Request& request) noexcept;
  // Takes the mailbox, posts, polls. True when anything moved. `lookout` is asked for urgent work
  // between posts of lower classes.
  bool progress(Lookout* lookout = nullptr) noexcept;
  // True when nothing can be posted or is in flight: the poller may sleep until notified, unless
  // must_poll(): a Request waits for a word that comes without a notification (gate.h).
  bool idle() const noexcept;
  bool must_poll() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe_p2p::engine
