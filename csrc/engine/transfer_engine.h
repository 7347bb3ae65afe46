// The transfer engine: one-sided writes with immediates over all NICs of one GPU (or CPU rank).
// There is no world here: peers are connected and dropped one by one, at any time.
//
// Threads. Exactly one thread calls progress() (the proxy thread, or a simulation). Everything
// marked "any thread" may be called beside it; submissions reach the polling thread through the
// mailbox.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "engine/domain_group.h"
#include "engine/imm_counter.h"
#include "engine/mailbox.h"
#include "engine/memory_region.h"
#include "engine/nic_counters.h"
#include "engine/peer.h"
#include "engine/request.h"
#include "platform/shm.h"

namespace moe_p2p::engine {

struct EngineOptions {
  std::string provider = "loopback";
  int num_nics = 2;
  std::string settings;          // for the provider, "key=value,..."
  std::string label = "engine";  // "rank 3": stands in error texts
  // How long disconnect() and unregister_memory() wait for the polling thread to let go.
  std::chrono::milliseconds control_timeout{10'000};
};

class TransferEngine {
 public:
  explicit TransferEngine(const EngineOptions& options);
  // With NICs made by `factory` instead of by options.provider.
  TransferEngine(const EngineOptions& options, const DomainFactory& factory);
  // Unfinished Requests fail kClosed, their waiters wake. No thread may be in another member.
  ~TransferEngine();

  // --- any thread ---
  int num_nics() const noexcept;
  EngineAddress address() const;
  // The polling thread's event count: notify it after ringing a doorbell. In shared memory, so that
  // other processes of the host can open it by waker_name().
  platform::EventCount& waker() noexcept;
  const std::string& waker_name() const noexcept;

  const MemoryHandle* register_memory(const provider::MemorySpan& span);
  // Reaches every NIC. Requests that still read from the memory fail kClosed.
  void unregister_memory(const MemoryHandle* handle);
  MemoryDescriptor descriptor(const MemoryHandle* handle) const;

  // A new Peer at every call; the other engine need not do anything.
  const Peer* connect(const EngineAddress& address);
  // Requests that write to the peer and are not done fail kClosed; others do not notice. The Peer
  // and its RemoteRegions are gone afterwards.
  void disconnect(const Peer* peer);
  // Connects to the owner unless it is connected or `peer` is given. Valid until that peer is
  // disconnected; the same descriptor yields the same region. Throws when the descriptor does not
  // belong to the peer.
  const RemoteRegion* resolve(const MemoryDescriptor& descriptor, const Peer* peer = nullptr);
  // GPU memory of a peer on this host, mapped here at `local`: for NICs that are software and write
  // through it, the others ignore it. One window per region; dropped with the peer.
  void map_region(const RemoteRegion* region, const provider::MemorySpan& local);

  // Throws Error{kInvalidArgument} for a range outside the registered memory or a Request that is
  // still in use, before anything is sent.
  void submit(Request& request);
  // Runs closure on the polling thread, in order with submissions, and waits for it; rethrows what
  // it throws. Throws Error{kTimeout} when it had not begun by the deadline; it never runs then. The
  // closure must not block. At once when the caller is the polling thread.
  void run_on_poller(const Closure& closure, platform::Deadline deadline);
  ImmTable& imm_table() noexcept;
  std::vector<NicCounters> counters() const;
  // Immediates are kept back since a GPU could not flush what NICs wrote: who waits for one waits in
  // vain. The text says why; empty while it is false.
  bool gpu_flush_failed() const noexcept;
  std::string gpu_flush_failure() const;
  // "; first failure of the NICs: ..." for the end of an error's text; empty while there is none.
  std::string first_failure() const;
  // Says that the polling thread has ended. Until some thread calls progress() again, disconnect()
  // and unregister_memory() do its part themselves instead of waiting for it.
  void detach_poller() noexcept;

  // --- polling thread ---
  // Like submit(), without the mailbox and the checks (done once, at set-up). The Request must not
  // be active.
  void submit_from_poller(Request& request) noexcept;
  // Mailbox, post, poll. True when anything moved.
  bool progress() noexcept;
  // Nothing active and nothing in flight: the poller may sleep until notified.
  bool idle() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe_p2p::engine
