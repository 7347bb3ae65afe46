// The transfer engine: one-sided writes with immediates over all NICs of one GPU (or CPU rank).
// There is no world here: peers are connected and dropped one by one, at any time.
//
// Threads. Exactly one thread calls progress() (the proxy thread, or a simulation). Everything
// marked "any thread" may be called beside it; submissions reach the polling thread through the
// mailbox.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/domain_group.h"
#include "engine/imm_counter.h"
#include "engine/mailbox.h"
#include "engine/memory_region.h"
#include "engine/request.h"
#include "platform/shm.h"

namespace moe_p2p::engine {

struct EngineOptions {
  std::string provider = "loopback";
  int num_nics = 2;
  std::string settings;  // for the provider, "key=value,..."
  std::string label;     // "rank 3": stands in error texts
};

// A connected engine: one provider peer per local NIC; NIC i talks to the peer's NIC i mod its count.
class Peer {
 public:
  Peer(EngineAddress address, std::vector<provider::PeerId> rails)
      : address_(std::move(address)), rails_(std::move(rails)) {}
  const EngineAddress& address() const noexcept { return address_; }
  const std::vector<provider::PeerId>& rails() const noexcept { return rails_; }

 private:
  EngineAddress address_;
  std::vector<provider::PeerId> rails_;
};

// Per NIC, as the engine counted them; monotonic.
struct NicCounters {
  uint64_t bytes_written = 0;
  uint64_t writes = 0;               // posted work requests
  uint64_t immediates_sent = 0;
  uint64_t immediates_received = 0;
};

class TransferEngine {
 public:
  explicit TransferEngine(const EngineOptions& options);
  ~TransferEngine();  // no thread may be in progress() any more

  // --- any thread ---
  int num_nics() const noexcept;
  EngineAddress address() const;
  // The polling thread's event count: notify it after ringing a doorbell. In shared memory, so that
  // other processes of the host can open it by waker_name().
  platform::EventCount& waker() noexcept;
  const std::string& waker_name() const noexcept;

  const MemoryHandle* register_memory(const provider::MemorySpan& span);
  void unregister_memory(const MemoryHandle* handle);
  MemoryDescriptor descriptor(const MemoryHandle* handle) const;

  const Peer* connect(const EngineAddress& address);
  void disconnect(const Peer* peer);
  // Connects to the owner unless `peer` is given. Valid until that peer is disconnected. Throws when
  // the descriptor does not belong to the peer.
  const RemoteRegion* resolve(const MemoryDescriptor& descriptor, const Peer* peer = nullptr);

  // Throws Error{kInvalidArgument} for a range outside the registered memory, before anything is sent.
  void submit(Request& request);
  // Runs closure on the polling thread, in order with submissions, and waits for it.
  void run_on_poller(const Closure& closure, platform::Deadline deadline);
  ImmTable& imm_table() noexcept;
  std::vector<NicCounters> counters() const;

  // --- polling thread ---
  // Like submit(), without the mailbox and the range check (done once, at set-up).
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
