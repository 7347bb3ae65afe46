// All work of a NIC that may block: handshakes, ends of peers, repairs, the device's own events.
// One thread serves the peers that connect to us (sessions.h) and watches the peers that we
// connected to; connect() and disconnect() run on their caller's thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "provider/verbs/changes.h"
#include "provider/verbs/events.h"
#include "provider/verbs/peer.h"
#include "provider/verbs/sender.h"
#include "provider/verbs/sessions.h"

namespace moe_p2p::provider::verbs {

class Control {
 public:
  Control(const Nic& nic, PeerTable& table, const Kick& kick, Changes& changes,
          platform::EventCount* waker);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  const NicAddress& address() const noexcept { return address_; }
  PeerId connect(std::span<const std::byte> address, int priority, uint64_t tag);
  void disconnect(PeerId peer);
  bool sever(uint64_t tag, platform::Deadline deadline);
  // "mlx5_0 of host7 (pid 12)", or "a peer that was disconnected".
  std::string peer_label(PeerId peer) const;
  uint64_t num_refused() const noexcept { return sessions_.num_refused(); }
  // The first peer that ended without being disconnected, and the sign of its end; empty: none.
  std::string first_loss() const;
  // Why the whole NIC is given up: no completions come from it any more; empty: it works.
  std::string nic_loss() const;

 private:
  void run() noexcept;
  void handle(Events::Event event);
  void look();

  Socket shake_hands(Peer& peer);
  Socket try_host(Peer& peer, const std::string& host, platform::Deadline first,
                  platform::Deadline last) const;
  const Secret& secret_of(const NicAddress& address) const;
  PeerId add(std::unique_ptr<Peer> peer);
  base::Bytes hello_for(Peer& peer, std::span<Lane* const> lanes) const;
  void finish(Peer& peer, const Answer& answer) const;

  // These expect mutex_ to be held.
  void read_answers(Peer& peer);
  void end_peer(Peer& peer, base::Code why, const char* sign);
  void look_at_lane(Peer& peer, Lane& lane);
  void begin_repair(Peer& peer, Lane& lane);
  void end_peers(const char* sign);
  bool holds(uint64_t tag) const;

  void read_device_events();
  void note_device_event(const AsyncEvent& event);
  void lose_nic(const char* sign);
  void report_qp(const void* qp, const char* sign);
  void report_addresses();

  const Nic& nic_;
  PeerTable& table_;
  const Kick& kick_;
  Changes& changes_;
  platform::EventCount* const waker_;
  const std::optional<Secret> shared_secret_;  // from the environment
  const Secret secret_;
  const Events events_;
  Sessions sessions_;  // control thread only
  NicAddress address_;

  mutable std::mutex mutex_;  // guards the peers; never held during a handshake
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_id_ = 0;
  std::string first_loss_, nic_loss_;
  std::map<uint64_t, bool> severed_;  // by tag: nothing of it is left; stays, so that it is refused
  std::condition_variable severed_one_;

  bool gave_up_ = false;  // control thread only: this NIC takes no more receives
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace moe_p2p::provider::verbs
