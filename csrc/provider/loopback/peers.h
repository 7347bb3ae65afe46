// One connected peer on the sending side: the channel claimed in the peer's segment and the writes
// in flight through it. Data path: once a Connection is in the Sender's table only the polling
// thread uses it, except close_requested.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "provider/loopback/chaos.h"
#include "provider/loopback/config.h"
#include "provider/loopback/copies.h"
#include "provider/loopback/link_model.h"
#include "provider/loopback/memory.h"
#include "provider/loopback/pool.h"
#include "provider/loopback/segment.h"
#include "provider/loopback/waker.h"

namespace moe_p2p::provider::loopback {

// A write or read that was accepted and not acknowledged yet.
struct OutgoingWrite {
  WorkRequest request;
  uint64_t pieces = 0;       // bit p: piece p is not begun (adversary: at most 64 pieces)
  uint32_t piece_bytes = 0;  // size of all pieces but the last
  uint32_t cursor = 0;       // the current piece's rest is [cursor, cursor_end)
  uint32_t cursor_end = 0;
  uint64_t hold_until = 0;        // adversary: nothing leaves before this pump round
  int64_t complete_after_ns = 0;  // link model: when the acknowledgement can be back
  bool begun = false;
  bool in_use = false;
  uint32_t abort_flags = 0;  // not 0: given up; flags of the fragment that reports it
  base::Status status;       // the failure; ok: the acknowledgement has the result

  // Reads have one fragment under way at a time, so that each slot owes one acknowledgement at
  // most: the one before the cursor.
  bool reading = false;
  bool read_in_place = false;  // it takes no room in the ring: our GPU reads the peer's memory
  uint32_t read_bytes = 0;
  uint64_t read_at = 0;  // ring position of its header

  bool all_sent() const noexcept { return begun && pieces == 0 && cursor == cursor_end; }
  bool nothing_to_send() const noexcept { return reading || all_sent(); }
};

// Writes and reads of all connections of each class that are in flight.
using InFlight = std::array<uint32_t, 3>;

// What all connections of a NIC share for sending.
struct SendContext {
  const RegionTable& regions;
  LinkModel& link;
  const TimeSource& time;
  Copies& copies;
  bool in_place;  // as in Config
  bool hollow;
  // Priority of all connections there ever were. Stored by connect(), any thread.
  const std::atomic<int>& most_urgent;
  const InFlight& in_flight;
};

class Connection {
 public:
  // `id` is this NIC's id of the peer. Claims a channel; throws as Segment::claim() does.
  // priority: of its traffic; it leaves room on the link for more urgent traffic. in_flight: is
  // kept by the polling thread.
  Connection(PeerId id, std::shared_ptr<Segment> segment, Waker waker,
             const std::string& own_segment, const std::string& own_waker, const Config& config,
             uint64_t stream, int priority, uint64_t tag, InFlight& in_flight);

  PeerId id() const noexcept { return id_; }
  int priority() const noexcept { return priority_; }
  const Segment& segment() const noexcept { return *segment_; }
  bool window_full() const noexcept { return free_slots_.empty(); }
  bool has_unsent() const noexcept { return !unsent_.empty() || staged_.under_way; }
  uint32_t num_in_flight() const noexcept { return num_in_flight_; }

  // Takes a write into a free slot; pump() sends it.
  void enqueue(const WorkRequest& request) noexcept;
  // Puts fragments into the ring while there is room, and starts copies. True when it put any.
  bool pump(const SendContext& context) noexcept;
  // Publishes a fragment whose payload Copies has put in place. False when there is no room.
  bool publish_copied(const Fragment& fragment) noexcept;
  // Sends nothing more of the write but a fragment that reports its end.
  void give_up(uint32_t slot, base::Status status) noexcept;
  bool given_up(uint32_t slot) const noexcept { return writes_[slot].abort_flags != 0; }

  // Returns the next acknowledgement or null; without pop_ack() the same one again.
  const Ack* next_ack() noexcept;
  void pop_ack() noexcept { ++ack_tail_; }
  // For the acknowledgement of a fragment of a read: copies its payload into place. False while a
  // GPU copies; call it again then.
  bool land(uint32_t slot, base::Code code, const SendContext& context) noexcept;
  // After land(): true when the read has more to ask for, which pump() does.
  bool read_goes_on(uint32_t slot) noexcept;
  OutgoingWrite& write(uint32_t slot) noexcept { return writes_[slot & channel_.window_mask]; }
  void finish(uint32_t slot) noexcept;
  void drop_unsent() noexcept {
    unsent_.clear();
    reads_.clear();
    staged_.dropped = true;
  }
  // True while a copy still uses the ring, which must not be released then.
  bool is_copying(Copies& copies) noexcept {
    const auto runs = [&](uint64_t ticket) {
      return copies.state_of(ticket) == Copies::State::kUnderWay;
    };
    return (staged_.under_way && runs(staged_.ticket)) || (landing_ && runs(landing_ticket_));
  }

  // True when the peer closed its NIC, or took the channel back because it considered us dead.
  bool peer_left() const noexcept {
    // acquire: pairs with the state changes of the receiver (Segment::release).
    return segment_->closed() ||
           channel_.record->state.load(std::memory_order_acquire) != claimed_.word;
  }
  void release() noexcept { segment_->release(claimed_); }
  void notify() const noexcept { waker_.notify(); }

  // Set by Sender::request_close (any thread), release; acquire by the polling thread.
  std::atomic<bool> close_requested{false};

  // Used by Sender, polling thread.
  bool broken = false;         // the peer is gone; posts fail at once
  bool touched = false;        // the peer is notified at the end of this post()
  uint32_t stalled_polls = 0;  // polls in a row without an acknowledgement
  int64_t next_look_ns = 0;    // when to check again that the peer lives

 private:
  void pump_in_order(const SendContext& context) noexcept;
  void pump_shuffled(const SendContext& context) noexcept;
  bool send_part(uint32_t slot, const SendContext& context) noexcept;
  bool send_fragment(uint32_t slot, const SendContext& context) noexcept;
  bool send_read(uint32_t slot, const SendContext& context) noexcept;
  bool send_by_ring(uint32_t slot, const SendContext& context) noexcept;
  bool is_in_place(const WorkRequest& request, MemoryKind kind,
                   const SendContext& context) const noexcept;
  bool announce(uint32_t slot, const SendContext& context) noexcept;
  // Whether a modelled link has more urgent traffic, too.
  bool is_lower(const SendContext& context) const noexcept {
    return priority_ > context.most_urgent.load(std::memory_order_relaxed) && context.link.on();
  }
  bool gives_way(const SendContext& context) const noexcept;
  bool copies_later(const SendContext& context) const noexcept;
  uint32_t next_bytes(const OutgoingWrite& write) noexcept;
  uint32_t next_bytes_in_place(const OutgoingWrite& write,
                               const SendContext& context) const noexcept;
  uint32_t next_bytes_to_copy(const OutgoingWrite& write,
                              const SendContext& context) const noexcept;
  std::byte* next_payload() const noexcept {
    return channel_.ring + ((head_ + kLine) & channel_.ring_mask);
  }
  bool stage(uint32_t slot, const SendContext& context) noexcept;
  bool publish_staged(Copies& copies) noexcept;
  bool start_copy(uint32_t slot, const SendContext& context) noexcept;
  bool is_lent(uint64_t remote_key, const platform::LentBytes& lent, Copies& copies) noexcept;
  bool send_abort(uint32_t slot) noexcept;
  void abort(OutgoingWrite& write, uint32_t flags, base::Status status) noexcept;
  void choose_piece(OutgoingWrite& write) noexcept;
  Fragment begin_fragment(uint32_t slot, uint32_t bytes, uint32_t flags,
                          const SendContext& context) noexcept;
  bool has_room(uint64_t bytes) noexcept;
  void publish(const Fragment& fragment) noexcept;

  const PeerId id_;
  const std::shared_ptr<Segment> segment_;  // keeps the mapping; the data path uses channel_
  const Segment::Claimed claimed_;
  const Channel channel_;
  const uint32_t max_fragment_bytes_;
  const int priority_;
  uint32_t& class_in_flight_;
  const Waker waker_;
  Chaos chaos_;

  // The fragment at the head of the ring whose payload a GPU copies there. Nothing else leaves
  // before it.
  struct Staged {
    Fragment fragment;
    uint64_t ticket = 0;
    bool under_way = false;
    bool dropped = false;  // its write has failed
  };
  Staged staged_{};

  // A GPU copies the payload of the oldest fragment of a read out of the ring.
  bool landing_ = false;
  uint64_t landing_ticket_ = 0;

  std::vector<OutgoingWrite> writes_;  // [window]
  std::vector<uint32_t> free_slots_;
  Pool<uint32_t> unsent_;  // slots of writes with bytes left to send
  Pool<uint32_t> reads_;   // slots of reads under way, in the order of the ring
  uint32_t num_in_flight_ = 0;
  int64_t last_sent_ns_ = 0;  // link model
  uint64_t round_ = 0;        // pump() calls
  uint64_t head_ = 0;         // ring positions, as in ChannelRecord
  uint64_t known_tail_ = 0;
  uint64_t ack_tail_ = 0;
  uint64_t known_ack_head_ = 0;
};

}  // namespace moe_p2p::provider::loopback
