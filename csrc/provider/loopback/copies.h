// Writes of GPU memory. The payload does not go through the ring: it is copied from our GPU straight
// into the peer's memory, which is mapped here (RegionTable::find_window), and the fragment that says
// so waits here until the copy is done. Opened and drained on the control path; the rest belongs to
// the polling thread, through Connection and Sender.
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

  // --- any thread ---
  // Before the first span of `device` is registered or mapped. Throws Error{kInvalidArgument} for a
  // second device, Error{kUnavailable} without a driver.
  void open(int device);
  // Returns when no copy begun before runs any more. Throws Error{kTimeout}.
  void drain();

  // --- polling thread, once it has found GPU memory registered ---
  bool full() noexcept;
  // Must not be full. The fragment leaves through publish(), unless the status is a failure.
  base::Status start(Connection& connection, const Fragment& fragment, std::byte* to,
                     const std::byte* from) noexcept;
  // Puts fragments whose payload is in place into their rings, with an adversary not all of them.
  // Calls published(connection) for each. Writes whose copies failed are given up.
  template <typename Published>
  void publish(Published&& published) noexcept;
  // The connection is about to go; its copies go on, and drain() waits for them.
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
  std::mutex mutex_;  // control calls among each other
  // Constant once made; the polling thread sees it through the key of a region or window.
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
