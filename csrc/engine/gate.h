// A word that Requests wait for before anything of them is posted: a GPU stores it when it has
// computed what they carry. The word only grows, so a late Request finds its gate open.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/request.h"

namespace moe_p2p::engine {

class Gate {
 public:
  // `word` must outlive the gate, and the gate all Requests that name it. notified: who stores the
  // word notifies the engine's waker then, so that the polling thread may sleep.
  Gate(const uint64_t* word, bool notified) noexcept : word_(word), notified_(notified) {}

  // Any thread. acquire: pairs with the release of kernels/signal.cu, or of the op on the host.
  uint64_t value() const noexcept {
    return std::atomic_ref(*const_cast<uint64_t*>(word_)).load(std::memory_order_acquire);
  }
  bool reached(uint64_t value_wanted) const noexcept { return value() >= value_wanted; }

 private:
  friend class Gates;

  const uint64_t* word_;
  bool notified_;
  // Polling thread. Requests that wait, by value; the links are those of their first rail.
  Request* first_ = nullptr;
  Request* last_ = nullptr;
  Gate* next_ = nullptr;  // in Gates
};

// The gates that hold Requests. Polling thread only. A look reads one word for each, however many
// Requests wait there.
class Gates {
 public:
  // The Request must not be in a queue of a NIC.
  void hold(Request& request) noexcept;
  void remove(Request& request) noexcept;
  // Takes a Request out whose gate has opened; null when there is none.
  Request* take_open() noexcept;
  // True while one waits for a word that comes without a notification.
  bool must_poll() const noexcept;

 private:
  void unlink(Gate& gate, Request& request) noexcept;
  Gate* first_ = nullptr;
};

}  // namespace moe_p2p::engine
