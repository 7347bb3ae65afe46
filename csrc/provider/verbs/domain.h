// NICs that speak RDMA through libibverbs: ConnectX over RoCE or InfiniBand, and soft-RoCE. One
// reliable connection (or several, qps_per_peer) to each peer; writes with immediates, one shared
// receive queue. Settings: config.h. Handshakes: wire.h and peers.h. Refused writes: peer.h. GPU
// memory: memory.h.
//
// This file and domain.cpp are the control path, datapath.cpp is the data path.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "provider/provider.h"
#include "provider/verbs/memory.h"
#include "provider/verbs/peers.h"
#include "provider/verbs/sender.h"

namespace moe_p2p::provider {

// Throws Error{kUnavailable} when the library, the device or a fitting GID is missing,
// Error{kInvalidArgument} for unknown settings.
std::unique_ptr<Domain> make_verbs_domain(const DomainOptions& options);

namespace verbs {

class VerbsDomain final : public Domain {
 public:
  explicit VerbsDomain(const DomainOptions& options);

  const char* provider_name() const noexcept override { return "verbs"; }
  DomainLimits limits() const noexcept override;
  bool orders_writes() const noexcept override { return nic_.config.ordered_writes; }
  base::Bytes address() const override { return control_.address().encode(); }
  PeerId connect(std::span<const std::byte> address) override { return connect_for(address, 0, 0); }
  PeerId connect_for(std::span<const std::byte> address, int priority, uint64_t tag) override {
    return control_.connect(address, priority, tag);
  }
  void disconnect(PeerId peer) override { control_.disconnect(peer); }
  MemoryKey register_memory(const MemorySpan& span) override { return memory_.add(span); }
  void unregister_memory(const MemoryKey& key) override { memory_.remove(key); }
  bool sever(uint64_t tag, platform::Deadline deadline) override {
    return control_.sever(tag, deadline);
  }
  std::string failure() const override;
  uint64_t num_refused() const noexcept override { return control_.num_refused(); }

  size_t post(std::span<const WorkRequest> requests) noexcept override;
  size_t poll(std::span<Completion> completions) noexcept override;
  bool idle() const noexcept override;

 private:
  void take_changes(Output& output) noexcept;
  void drained(int num) noexcept;
  bool poll_queue(Output& output) noexcept;
  void receive(const Wc& wc, Output& output) noexcept;
  void refill() noexcept;
  void prepare_sleep() noexcept;

  const Nic nic_;
  const Kick kick_;
  PeerTable peers_;
  Changes changes_;
  FirstFailure failure_;
  Sender sender_;
  Registrations memory_;
  Control control_;  // last: its thread ends first

  // Polling thread.
  const bool may_sleep_;
  const uint32_t refill_batch_;
  std::vector<RecvWr> receives_;  // [refill_batch_], chained; all the same empty receive
  uint64_t num_owed_ = 0;         // receives to post
  uint64_t seen_changes_ = 0;
  uint64_t drain_wanted_ = 0, drain_done_ = 0;  // tickets of Changes
  int drain_left_ = 0;  // completions left that may be older than drain_wanted_
  uint32_t num_empty_polls_ = 0;
  bool armed_ = false;  // the next completion wakes the poller
};

}  // namespace verbs
}  // namespace moe_p2p::provider
