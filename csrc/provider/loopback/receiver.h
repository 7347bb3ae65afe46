// The receiving half of a NIC: walks the channels that peers claimed in our segment, checks each
// fragment against the registered memory, copies it there (unless the sender has; to a GPU with
// that GPU, while the channel waits), and acknowledges the write when its last byte is in place.
// Only then does it report the immediate. Data path, polling thread only.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "provider/loopback/chaos.h"
#include "provider/loopback/config.h"
#include "provider/loopback/copies.h"
#include "provider/loopback/link_model.h"
#include "provider/loopback/memory.h"
#include "provider/loopback/output.h"
#include "provider/loopback/pool.h"
#include "provider/loopback/segment.h"
#include "provider/loopback/waker.h"

namespace moe_p2p::provider::loopback {

class Receiver {
 public:
  Receiver(const Config& config, int nic, Segment& segment, RegionTable& regions, Copies& copies,
           const TimeSource& time);

  // --- any thread --- As Domain::sever(): begins, and returns what to ask has_severed() for.
  uint64_t sever(uint64_t tag);
  bool has_severed(uint64_t ticket) const noexcept {
    // acquire: pairs with poll(): what came before was reported.
    return severed_until_.load(std::memory_order_acquire) >= ticket;
  }
  bool is_severed(uint64_t tag) const noexcept;

  // --- polling thread ---
  void poll(Output& output) noexcept;
  // True when the last poll left work that it had seen: no notification will arrive for it.
  bool pending() const noexcept {
    return left_over_ || !held_.empty() || !flags_.empty() || !late_.empty();
  }

 private:
  // One claimed channel. Positions as in ChannelRecord.
  struct Incoming {
    Channel channel;
    uint64_t word = 0;  // its state while we may read it; 0 = not attached
    uint64_t tail = 0;
    uint64_t ack_head = 0;
    Waker waker;
    // A GPU's copy of the payload at the tail has been started.
    bool copying = false;
    uint64_t ticket = 0;
    base::Status refused;       // the driver refused the copy
    int64_t dead_since_ns = 0;  // 0: the sender lived at the last look
  };

  void rescan() noexcept;
  void attach(Incoming& incoming, uint64_t word) noexcept;
  void free_channel(Incoming& incoming, uint64_t word) noexcept;
  void begin_close(Incoming& incoming) noexcept;
  bool is_severing() const noexcept;
  void find_dead_senders() noexcept;

  void poll_channel(Incoming& incoming, Output& output) noexcept;
  bool well_formed(const Incoming& incoming, const Fragment& fragment) const noexcept;
  bool show_early(Incoming& incoming, const Fragment& fragment, Output& output) noexcept;
  bool copy(Incoming& incoming, const Fragment& fragment, std::byte* payload) noexcept;
  Copies::State state_of(const Incoming& incoming) noexcept;
  void take(Incoming& incoming, const Fragment& fragment, std::byte* payload,
            Output& output) noexcept;
  void finish(Incoming& incoming, const Fragment& fragment, base::Code code, bool show_imm,
              Output& output) noexcept;
  base::Code place(Incoming& incoming, const Fragment& fragment, std::byte* payload) noexcept;
  void show(uint32_t imm, Output& output) noexcept;
  void show_held(Output& output) noexcept;
  bool has_room(const Output& output) const noexcept;
  static void publish(Incoming& incoming) noexcept;
  struct HeldFlag {
    uint32_t channel;
    uint64_t remote_key, addr, value;
  };
  struct LateImmediate {
    uint32_t imm;
    uint64_t until;  // poll
  };
  bool store(const HeldFlag& flag) noexcept;
  void store_held() noexcept;

  const bool early_imm_;
  const bool early_flag_;
  const bool ordered_;
  const bool in_place_;  // host memory too
  Segment& segment_;
  RegionTable& regions_;
  Copies& copies_;
  const TimeSource& time_;
  Chaos chaos_;

  std::vector<Incoming> incoming_;  // [channels]
  std::vector<uint32_t> active_;    // indices of attached channels, ascending
  Pool<uint32_t> held_;             // adversary: immediates held back, payload visible
  std::vector<HeldFlag> flags_;     // adversary: likewise, a channel's in order; capacity reserved
  std::vector<LateImmediate>
      late_;  // adversary with flags: immediates that may come long after them
  uint64_t num_polls_ = 0;
  uint64_t seen_changes_ = 0;

  struct Severed {
    const uint64_t tag;
    const Severed* const next;
    uint64_t ticket;  // under severing_
  };
  std::mutex severing_;  // between callers of sever()
  std::vector<std::unique_ptr<Severed>> all_severed_;
  // The newest first; they stay, so that they are refused. Stored by sever(), release, acquire by
  // all.
  std::atomic<const Severed*> severed_{nullptr};
  // `changes` of the segment that poll() has carried out, with all that it held back before. Stored
  // by poll(), release.
  std::atomic<uint64_t> severed_until_{0};
  bool left_over_ = false;
  uint32_t first_ = 0;  // active channel to poll first, so that none starves

  uint32_t polls_until_look_ = 0;  // for find_dead_senders
  int64_t next_look_ns_ = 0;
  uint32_t next_look_ = 0;
};

}  // namespace moe_p2p::provider::loopback
