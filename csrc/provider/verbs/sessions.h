// The NICs that connect to this one, and our ends of their lanes: a session lives as long as its
// TCP connection. When a peer disconnects, ends or is killed, its queue pairs end with it
// (drain.h); when it connects again, it gets new ones. Control thread only.
//
// Any process may connect. A session is pending until it has proved that it knows the secret: it
// gets a greeting, may send one message, and has handshake_ms. At most kMaxPending are pending;
// then the oldest that has sent nothing is refused, so that strangers who hold connections keep no
// peer out. Refusals are counted and, now and then, logged.
#pragma once

#include <atomic>
#include <map>
#include <set>

#include "provider/verbs/drain.h"
#include "provider/verbs/events.h"
#include "provider/verbs/wire.h"

namespace moe_p2p::provider::verbs {

class Sessions {
 public:
  Sessions(const Nic& nic, const Events& events, Changes& changes, const Secret& secret);

  uint16_t port() const { return listener_.local_port(); }
  // Call it before the first session.
  void set_id(uint64_t nic_id) noexcept { nic_id_ = nic_id; }
  void accept();
  void serve(uint32_t session_id);
  void end_all();
  // Ends the sessions of a tag, and refuses later ones.
  void sever(uint64_t tag);
  // True while a queue pair of the tag exists.
  bool holds(uint64_t tag) const noexcept;
  // Checks deadlines, and what has been drained.
  void look();
  void last_receive(const void* qp) noexcept;
  // "from 10.0.0.1"; empty: no session has this queue pair.
  std::string host_of(const void* qp) const;
  uint64_t num_refused() const noexcept { return num_refused_.load(std::memory_order_relaxed); }

 private:
  struct Lane {
    Owned<Qp> qp;
    bool has_ended;  // broken by a refused write, and its last receive has completed
  };
  struct Session {
    Socket link;
    Nonce nonce{};
    platform::Deadline prove_by;
    std::optional<Proof> proof;  // none while pending
    std::map<uint32_t, Lane> lanes;
    uint64_t tag = 0;
  };
  bool open(uint32_t id, Session& session, base::Bytes& message);
  void accept(Socket link);
  void make_room();
  Answer answer(Session& session, const Hello& hello);
  void refuse(uint32_t session_id, const char* why);
  void end(uint32_t session_id);

  const Nic& nic_;
  const Events& events_;
  const Socket listener_;
  uint64_t nic_id_ = 0;
  Drain drain_;
  const Secret secret_;
  std::map<uint32_t, Session> sessions_;
  std::set<uint32_t> pending_;  // the oldest first
  std::set<uint64_t> severed_;
  uint32_t next_session_ = 0;
  bool paused_ = false;  // the listener is not watched: no descriptors are left
  std::atomic<uint64_t> num_refused_{0};
  platform::Deadline log_after_{};
};

}  // namespace moe_p2p::provider::verbs
