// Copies of GPU memory, of two kinds. When the peer's memory is mapped here
// (RegionTable::find_window), the payload bypasses the ring: our GPU copies it straight into place,
// and its fragment waits here until the copy is done. Otherwise the sender copies it into the ring,
// and the receiver out of it, each with its own GPU. Opened and drained on the control path; the
// rest is called by the polling thread, through Connection, Sender and Receiver.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "platform/cuda_copy.h"
#include "provider/loopback/channel.h"
#include "provider/loopback/chaos.h"
#include "provider/loopback/config.h"
#include "provider/provider.h"

namespace moe_p2p::provider::loopback {

class Connection;

class Copies {
 public:
  Copies(const Config& config, int nic);
  ~Copies();

  // --- any thread --- Call it before the first span of `device` is registered or mapped. Throws
  // Error{kInvalidArgument} for a second device, Error{kUnavailable} without a driver.
  void open(int device);
  // Waits for all copies begun before. Throws Error{kTimeout}.
  void drain();
  void settle() noexcept;  // drain() at the NIC's end; logs copies that still run

  // --- polling thread, once it has found GPU memory registered ---
  bool full() noexcept;
  // Must not be full. publish() sends the fragment, unless the status is a failure.
  base::Status start(Connection& connection, const Fragment& fragment, std::byte* to,
                     const std::byte* from) noexcept;
  // Copies between a GPU and a ring. Must not be full.
  platform::CopyQueue::Started start_by_ring(std::byte* to, const std::byte* from,
                                             uint64_t bytes) noexcept;
  enum class State : uint8_t { kUnderWay, kDone, kFailed };
  State state_of(uint64_t ticket) noexcept;
  base::Status failure() const noexcept { return queue_->status(); }  // after a kFailed
  // Puts fragments whose payload is in place into their rings, with an adversary only some of them.
  // Calls published(connection) for each. Gives up writes whose copies failed.
  template <typename Published>
  void publish(Published&& published) noexcept;
  // Forgets a connection that is about to be deleted; its copies continue, and drain() waits for
  // them.
  void forget(const Connection& connection) noexcept;

 private:
  struct Waiting {
    Connection* connection;
    uint64_t ticket;
    Fragment fragment;
  };
  enum class Fate : uint8_t { kWaits, kLeft, kDropped };
  Fate look_at(Waiting& waiting) noexcept;
  bool poll() noexcept;

  const bool early_imm_;
  const uint64_t copy_kernel_;
  Chaos chaos_;
  std::mutex mutex_;  // between control calls
  // Constant once made; published to the polling thread with the key of a region or window.
  std::unique_ptr<platform::CopyQueue> queue_;
  std::vector<Waiting> waiting_;  // capacity reserved
};

template <typename Published>
void Copies::publish(Published&& published) noexcept {
  if (!poll()) return;
  std::erase_if(waiting_, [&](Waiting& waiting) {
    const Fate fate = look_at(waiting);
    if (fate == Fate::kLeft) published(*waiting.connection);
    return fate != Fate::kWaits;
  });
}

}  // namespace moe_p2p::provider::loopback
