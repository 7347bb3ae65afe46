// The software NIC: ranks are processes of one host or threads of one process, with one mechanism
// for both. Each NIC owns a shared memory segment to receive in; a sender claims a channel there,
// puts payload into its ring, and the *receiver's* poll() copies it into registered memory, which
// may therefore be any host memory. GPU memory is copied into the ring and out of it by its own
// GPU's copy engines. To GPU memory of a peer that map_remote() named, the *sender* copies, with
// its GPU's copy engine or a kernel (platform/cuda_copy.h); only headers go through the ring
// (copies.h). The NIC runs in order and fast, or (setting seed=N) as an adversary that reorders all
// that the contract of provider.h leaves open; writes by a copy kernel are not ordered with writes
// by the copy engines. Settings: config.h. Hooks for tests: test_hooks.h.
//
// This file and domain.cpp are the control path, datapath.cpp is the data path.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "provider/loopback/config.h"
#include "provider/loopback/copies.h"
#include "provider/loopback/receiver.h"
#include "provider/loopback/sender.h"
#include "provider/loopback/test_hooks.h"
#include "provider/provider.h"

namespace moe_p2p::provider {

// Throws Error{kInvalidArgument} for unknown settings, Error{kResourceExhausted} when /dev/shm is
// full.
std::unique_ptr<Domain> make_loopback_domain(const DomainOptions& options);

namespace loopback {

class LoopbackDomain final : public Domain, public LoopbackControl {
 public:
  LoopbackDomain(const DomainOptions& options, const Config& config, const char* name = "loopback");
  ~LoopbackDomain() override;

  const char* provider_name() const noexcept override { return name_; }
  DomainLimits limits() const noexcept override;
  // GPUs do the writes.
  bool needs_gpu_flush() const noexcept override { return config_.flush; }
  bool writes_in_place() const noexcept override { return config_.in_place; }
  bool orders_writes() const noexcept override { return config_.ordered; }
  base::Bytes address() const override;
  PeerId connect(std::span<const std::byte> address) override { return connect_for(address, 0, 0); }
  PeerId connect_for(std::span<const std::byte> address, int priority, uint64_t tag) override;
  void disconnect(PeerId peer) override;
  bool sever(uint64_t tag, platform::Deadline deadline) override;
  MemoryKey register_memory(const MemorySpan& span) override;
  void unregister_memory(const MemoryKey& key) override;
  bool writes_to_lent_memory() const noexcept override { return !config_.hollow; }
  void map_remote(uint64_t remote_key, const MemorySpan& local, bool lent) override;
  bool lends(PeerId peer, uint64_t remote_key) override { return sender_.lends(peer, remote_key); }

  size_t post(std::span<const WorkRequest> requests) noexcept override;
  size_t poll(std::span<Completion> completions) noexcept override;
  bool idle() const noexcept override;

  void kill() noexcept override;
  void fail_write(uint64_t nth) noexcept override;
  void use_clock(int64_t (*now)()) noexcept override { time_.use(now); }
  std::string describe() const override;

 private:
  const char* const name_;
  const Config config_;
  const int nic_;
  platform::EventCount* const waker_;
  const std::string waker_name_;
  const std::shared_ptr<Segment> segment_;
  std::mutex leaving_mutex_;
  std::vector<uint64_t> leaving_;  // keys that are gone, while peers may still copy
  std::vector<uint64_t> closing_;  // keys of windows that are gone, while copies may still run
  RegionTable regions_;
  TimeSource time_;
  Copies copies_;
  Receiver receiver_;
  Sender sender_;
  // Stored by kill(), release; acquire by the polling thread.
  std::atomic<bool> dead_{false};
  bool receive_first_ = false;  // polling thread
};

}  // namespace loopback
}  // namespace moe_p2p::provider
