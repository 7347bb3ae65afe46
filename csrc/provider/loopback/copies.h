// Copies of GPU memory, of two kinds. When the peer's memory is mapped here
// (RegionTable::find_window), the payload bypasses the ring: our GPU copies it straight into place,
// and its fragment waits here until the copy is done. Where the peer may take the memory back at
// any time (a lent window) it also learns of the copy, before it begins and when it ends. Otherwise
// the sender copies it into the ring, and the receiver out of it, each with its own GPU. Opened and
// drained on the control path; the rest is called by the polling thread, through Connection, Sender
// and Receiver.
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
  // words: of this NIC's segment.
  Copies(const Config& config, int nic, abi::CopyWords& words);
  ~Copies();

  // --- any thread --- Call it before the first span of `device` is registered or mapped. Throws
  // Error{kInvalidArgument} for a second device, Error{kUnavailable} without a driver.
  void open(int device);
  // Waits for all copies begun before. Throws Error{kTimeout}.
  void drain();
  void settle() noexcept;  // drain() at the NIC's end; logs copies that still run
  bool copies_lent();      // whether windows may be lent ones

  // --- polling thread, once it has found GPU memory registered ---
  bool full(const platform::LentBytes& lent = {}) noexcept;
  // Must not be full. publish() sends the fragment, unless the status is a failure.
  base::Status start(Connection& connection, const Fragment& fragment, std::byte* to,
                     const std::byte* from) noexcept;
  // The same into memory that its owner may take back. announce() before the owner's word is read,
  // withdraw() when that refuses.
  base::Status start_lent(Connection& connection, const Fragment& fragment, std::byte* to,
                          const std::byte* from, const platform::LentBytes& lent) noexcept;
  void announce(const platform::LentBytes& lent) noexcept { queue_->announce(lent); }
  void withdraw(const platform::LentBytes& lent) noexcept { queue_->withdraw(lent); }
  // Launches what start_lent() noted. Before the polling thread leaves the NIC.
  void launch() noexcept {
    if (noted_) queue_->launch();
    noted_ = false;
  }
  // Copies between a GPU and a ring. Must not be full.
  platform::CopyQueue::Started start_by_ring(std::byte* to, const std::byte* from,
                                             uint64_t bytes) noexcept;
  enum class State : uint8_t { kUnderWay, kDone, kFailed };
  State state_of(uint64_t ticket) noexcept;
  base::Status failure() const noexcept { return queue_->status(); }  // after a kFailed
  // Whether a copy for a read of this connection still writes to memory here.
  bool fills_memory_for(const Connection& connection) const noexcept;
  // Of fragments that wait for their copies.
  uint64_t bytes_under_way() const noexcept { return bytes_under_way_; }
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
  base::Status wait_for(Connection& connection, const Fragment& fragment,
                        const platform::CopyQueue::Started& started) noexcept;
  bool poll() noexcept;

  const bool early_imm_;
  const uint64_t copy_kernel_;
  const platform::LentCopies lent_;
  Chaos chaos_;
  std::mutex mutex_;  // between control calls
  // Constant once made; published to the polling thread with the key of a region or window.
  std::unique_ptr<platform::CopyQueue> queue_;
  std::vector<Waiting> waiting_;  // capacity reserved
  uint64_t bytes_under_way_ = 0;
  bool noted_ = false;  // start_lent() since the last launch()
};

template <typename Published>
void Copies::publish(Published&& published) noexcept {
  if (!poll()) return;
  std::erase_if(waiting_, [&](Waiting& waiting) {
    const Fate fate = look_at(waiting);
    if (fate == Fate::kLeft) published(*waiting.connection);
    if (fate != Fate::kWaits) bytes_under_way_ -= waiting.fragment.bytes;
    return fate != Fate::kWaits;
  });
}

}  // namespace moe_p2p::provider::loopback
