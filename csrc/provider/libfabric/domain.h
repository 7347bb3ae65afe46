// libfabric's NICs: EFA first, and the same code over its software providers (tcp between hosts
// without RDMA, shm within one) on request. One endpoint of the reliable-datagram kind per Domain;
// peers are entries of its address vector, without a handshake of ours. Settings: config.h.
//
// libfabric is opened without locks for endpoint and completion queue; the gate admits one control
// call or the polling thread. With a NIC, memory is registered outside the gate, so that it stops
// no traffic. Progress is manual: a target that is not polled receives nothing, and no provider
// wakes a thread, so a Domain that has a waker is never idle.
//
// After a refused write tcp, net and shm, unlike a NIC, drop the whole connection: other writes to
// that peer fail too (kPeerDead), and the next one connects again. If a write was received in
// part when its memory is given back, it is still completed there, without a check of its key. So
// over tcp each peer that may write to the memory is asked about such writes (end_half_writes):
// unregister_memory throws while one leaves that open, and while a read into the memory is under
// way. fence.h has the other providers.
//
// This file and domain.cpp are the control path, datapath.cpp is the data path.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "provider/libfabric/gate.h"
#include "provider/libfabric/sender.h"
#include "provider/libfabric/writers.h"
#include "provider/provider.h"

namespace moe_p2p::provider {

// Throws Error{kUnavailable} when the library, the provider or the NIC is missing.
std::unique_ptr<Domain> make_libfabric_domain(const DomainOptions& options);

namespace libfabric {

class LibfabricDomain final : public Domain {
 public:
  explicit LibfabricDomain(const DomainOptions& options);
  ~LibfabricDomain() override;

  const char* provider_name() const noexcept override { return "libfabric"; }
  DomainLimits limits() const noexcept override;
  base::Bytes address() const override { return address_; }
  PeerId connect(std::span<const std::byte> address) override;
  void announce(PeerId peer, uint64_t remote_key) override;
  void disconnect(PeerId peer) override;
  MemoryKey register_memory(const MemorySpan& span) override;
  void unregister_memory(const MemoryKey& key) override;
  std::string why_no_fence() const override;
  std::string failure() const override;

  size_t post(std::span<const WorkRequest> requests) noexcept override;
  size_t poll(std::span<Completion> completions) noexcept override;
  bool idle() const noexcept override;

  size_t num_addresses() const;  // in libfabric's address vector

 private:
  // Polls on behalf of a control call until ready() or the deadline, alternating with the polling
  // thread; completions are kept for poll().
  template <typename Ready>
  bool poll_until(platform::Deadline deadline, Ready&& ready);
  bool is_closed(const MemoryKey& key);
  void close_memory(const MemoryKey& key);
  // Returns when what peers had begun to write to memory of this key, which is closed, has landed
  // or never will. Throws Error{kTimeout} where a peer leaves that open.
  void end_half_writes(uint64_t remote_key);
  bool is_quiet(WriterName writer, platform::Clock::time_point since);
  // Ends the connections to addresses that nobody uses, as far as libfabric can by now.
  void end_connections();
  void forget_gone_writers();
  size_t take_ready(std::span<Completion> completions) noexcept;
  size_t read_queue(std::span<Completion> completions) noexcept;
  size_t read_error(std::span<Completion> completions) noexcept;

  const Config config_;
  const bool sleeps_;  // the polling thread sleeps when all NICs are idle
  alignas(64) std::array<std::byte, 64> scratch_{};
  Session session_;
  const std::string name_;
  std::mutex registering_;  // one registration or its end at a time
  std::mutex ending_;       // taken before all others
  mutable Gate gate_;       // guards all members below
  // Completions to report. The polling thread adds at most the accepted writes that are not
  // reported yet, which the capacity holds; control calls make room first.
  std::vector<Completion> ready_;
  Regions regions_;  // the first region is scratch_
  Peers peers_;
  Writes writes_;
  base::Bytes address_;
  WriterName own_writer_ = 0;  // 0: writes do not name their writer
  Writers writers_;
  std::map<WriterName, PeerId> probed_;  // writers that have answered, or are asked
  std::set<WriterName> down_;            // not connected when they were asked last
  struct Leaving {
    PeerId id;  // of no other use
    platform::Clock::time_point since;
  };
  std::vector<Leaving> leaving_;
};

}  // namespace libfabric
}  // namespace moe_p2p::provider
