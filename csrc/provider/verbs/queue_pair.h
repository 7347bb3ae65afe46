// Queue pairs, one way each: the writer's, which goes to "ready to send", and the target's, which
// only receives and takes its immediates from the NIC's shared receive queue. Control path.
#pragma once

#include <cstdint>

#include "provider/verbs/nic.h"

namespace moe_p2p::provider::verbs {

// Address and limits of a port. Sent in the handshake.
struct PortAddress {
  Gid gid{};
  uint16_t lid = 0;
  uint8_t mtu = 0;  // the library's number: 1 = 256 ... 5 = 4096
  uint8_t ethernet = 0;
  uint8_t max_reads = 0;  // that a queue pair here serves at a time
  uint8_t priority = 0;   // of the connection, from the end that sends
  uint8_t needs_grh = 0;  // kPortNeedsGrh
  uint8_t unused[1] = {};
};
// One end of a connection; `lane` is its index among the peer's connections.
struct QpAddress {
  uint32_t lane = 0;
  uint32_t qp_num = 0;
  uint32_t psn = 0;
};

PortAddress own_port(const Nic& nic, int priority = 0);

// All throw Error{kTransport}, or {kResourceExhausted}, naming device, peer and likely cause.
Owned<Qp> make_qp(const Nic& nic, bool sends);
// `label` names the peer.
void make_ready_to_receive(const Nic& nic, Qp& qp, const PortAddress& from, const QpAddress& peer,
                           const std::string& label);
void make_ready_to_send(const Nic& nic, Qp& qp, const PortAddress& to, uint32_t psn);
// Posted work then completes as flushed.
void break_qp(const Nic& nic, Qp& qp) noexcept;
// When it returns, the device works on nothing of this queue pair.
void reset_qp(const Nic& nic, Qp& qp) noexcept;

uint32_t random_psn();

}  // namespace moe_p2p::provider::verbs
