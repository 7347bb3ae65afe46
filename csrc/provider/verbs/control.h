// Everything of a NIC that may block: the handshakes, the ends of peers, repairs, the device's own
// events. One thread serves the peers that connect to us and watches over those that we connected to;
// connect() and disconnect() run on their caller's thread.
//
// The target's queue pairs live as long as the TCP connection over which they were asked for: a peer
// that disconnects, ends or is killed takes them along, and one that asks again gets new ones.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "provider/verbs/peer.h"
#include "provider/verbs/sender.h"

namespace moe_p2p::provider::verbs {

// What the control side tells the polling thread. Counters that only grow: added to with release here,
// read with acquire in VerbsDomain::poll.
struct Changes {
  std::atomic<uint64_t> num_changes{0};
  // Queue pairs that are gone may each have taken a receive along.
  std::atomic<uint64_t> num_lost_receives{0};
};

class Control {
 public:
  Control(const Nic& nic, PeerTable& table, const Kick& kick, Changes& changes,
          platform::EventCount* waker);
  ~Control();
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  const NicAddress& address() const noexcept { return address_; }
  PeerId connect(std::span<const std::byte> address);
  void disconnect(PeerId peer);
  // "mlx5_0 of host7 (pid 12)"; says so when it is not connected any more.
  std::string peer_label(PeerId peer) const;
  // Which peer ended first without being disconnected, and what that looks like; empty: none.
  std::string first_loss() const;

 private:
  // A NIC that connected to us, and our ends of its lanes.
  struct Session {
    Socket link;
    std::map<uint32_t, Owned<Qp>> lanes;
  };
  // What an event of epoll is about; the id of peer or session in the upper half.
  enum class Source : uint32_t { kKick, kListener, kDevice, kCompletions, kSession, kPeer };

  void watch(int fd, Source source, uint32_t id = 0) const;
  void run() noexcept;
  void handle(Source source, uint32_t id);
  void accept_sessions();
  void serve(uint32_t session_id);
  Answer answer(Session& session, const Hello& hello);
  void end_session(uint32_t session_id);

  Socket shake_hands(Peer& peer);
  PeerId add(std::unique_ptr<Peer> peer);
  base::Bytes hello_for(Peer& peer, std::span<Lane* const> lanes) const;
  void finish(Peer& peer, const Answer& answer) const;

  // These expect mutex_ to be held.
  void hear(Peer& peer);
  void end_peer(Peer& peer, base::Code why, const char* sign);
  void look_at_peers();
  void begin_repair(Peer& peer, Lane& lane);
  void give_up_late_repairs();

  void read_device_events();
  void changed();

  const Nic& nic_;
  PeerTable& table_;
  const Kick& kick_;
  Changes& changes_;
  platform::EventCount* const waker_;
  const Socket listener_;
  NicAddress address_;
  const Socket epoll_;  // only for the closing of its descriptor

  mutable std::mutex mutex_;  // guards the peers; never held during a handshake
  std::map<PeerId, std::unique_ptr<Peer>> peers_;
  PeerId next_id_ = 0;
  std::string first_loss_;

  std::map<uint32_t, Session> sessions_;  // control thread only
  uint32_t next_session_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace moe_p2p::provider::verbs
