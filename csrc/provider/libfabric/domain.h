// libfabric's NICs: EFA first, and the same code over its software providers (tcp between hosts
// without RDMA, shm within one) for those who ask for them. One endpoint of the reliable-datagram
// kind per Domain; peers are entries of its address vector, nobody shakes hands. Settings:
// config.h.
//
// libfabric is opened without locks for endpoint and completion queue; the gate lets one control
// call or the polling thread in. Memory is registered beside them where there is a NIC, so that it
// stops no traffic. Progress is manual: a target that is not polled receives nothing, and no
// provider wakes anybody, so a Domain that was given a waker is never idle.
//
// tcp, net and shm differ from a NIC in what follows a refused write: the whole connection goes
// down, so other writes to that peer fail with it (kPeerDead), and the next one connects again. A
// write that has been received by half when its memory is given back is finished into it.
//
// This file and domain.cpp are the control path, datapath.cpp is the data path.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "provider/libfabric/gate.h"
#include "provider/libfabric/sender.h"
#include "provider/provider.h"

namespace moe_p2p::provider {

// Throws Error{kUnavailable} when the library, the provider or the NIC is not there.
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
  void disconnect(PeerId peer) override;
  MemoryKey register_memory(const MemorySpan& span) override;
  void unregister_memory(const MemoryKey& key) override;
  std::string failure() const override;

  size_t post(std::span<const WorkRequest> requests) noexcept override;
  size_t poll(std::span<Completion> completions) noexcept override;
  bool idle() const noexcept override;

 private:
  // Polls on behalf of a control call until ready() or the deadline, in turns with the polling
  // thread; what completes is kept for poll().
  template <typename Ready>
  bool poll_until(platform::Deadline deadline, Ready&& ready);
  size_t take_ready(std::span<Completion> completions) noexcept;
  size_t read_queue(std::span<Completion> completions) noexcept;
  size_t read_error(std::span<Completion> completions) noexcept;

  const Config config_;
  const bool sleeps_;  // the polling thread would, if this NIC were idle
  alignas(64) std::array<std::byte, 64> scratch_{};
  Session session_;
  const std::string name_;
  std::mutex registering_;  // one registration or its end at a time
  mutable Gate gate_;       // guards all that follows
  // Completions to show. The polling thread adds only what is accepted and not yet shown, which its
  // capacity holds; control calls make room first.
  std::vector<Completion> ready_;
  Regions regions_;  // the first one is scratch_
  Peers peers_;
  Writes writes_;
  base::Bytes address_;
};

}  // namespace libfabric
}  // namespace moe_p2p::provider
