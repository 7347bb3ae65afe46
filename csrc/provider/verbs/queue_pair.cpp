#include "provider/verbs/queue_pair.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <random>

#include "base/log.h"
#include "provider/verbs/gid.h"

namespace moe_p2p::provider::verbs {

using base::Code;

namespace {

constexpr uint8_t kHopLimit = 64;
constexpr uint8_t kEndlessRnrRetries = 7;  // a busy receiver is not dead

// Also handles a library that returns -1 and sets errno.
int error_of(int result) { return result < 0 ? errno : result; }

// Both ends use the class of the end that sends, for acknowledgements and what is read, too.
AhAttr path_to(const Nic& nic, const PortAddress& peer) {
  const size_t priority = std::min<size_t>(peer.priority, nic.config.service_level.size() - 1);
  AhAttr path{};
  path.dgid = peer.gid;
  path.sgid_index = static_cast<uint8_t>(nic.gid.index);
  path.hop_limit = kHopLimit;
  path.traffic_class = nic.config.traffic_class[priority];
  // Between subnets of InfiniBand a router's own LID stands in the peer's GID, if it has one.
  const bool routed = !nic.ethernet && subnet_of(nic.gid.gid) != subnet_of(peer.gid);
  const uint16_t router = flid_of(peer.gid);
  path.dlid = routed && router != 0 ? router : peer.lid;
  path.sl = nic.config.service_level[priority];
  const bool needs_grh = routed || peer.needs_grh || own_port(nic).needs_grh != 0;
  path.is_global = nic.ethernet || needs_grh || nic.config.gid_index >= 0 ? 1 : 0;
  path.port_num = nic.config.port;
  return path;
}

}  // namespace

PortAddress own_port(const Nic& nic, int priority) {
  int mtu = nic.port.active_mtu;
  if (nic.config.mtu_bytes != 0)
    mtu = std::min(mtu, static_cast<int>(std::countr_zero(nic.config.mtu_bytes)) - 7);
  return {
      .gid = nic.gid.gid,
      .lid = nic.port.lid,
      .mtu = static_cast<uint8_t>(mtu),
      .ethernet = static_cast<uint8_t>(nic.ethernet ? 1 : 0),
      .max_reads = nic.max_reads_served,
      .priority = static_cast<uint8_t>(priority),
      .needs_grh = static_cast<uint8_t>(!nic.ethernet && (nic.port.flags & kPortNeedsGrh) ? 1 : 0)};
}

uint32_t random_psn() {
  static thread_local std::random_device random;
  return random() & 0xffffff;
}

Owned<Qp> make_qp(const Nic& nic, bool sends) {
  QpInitAttr init{};
  init.send_cq = init.recv_cq = nic.cq.get();
  init.srq = nic.srq.get();
  init.qp_type = kQpReliable;
  init.cap.max_send_wr = sends ? nic.config.max_in_flight + 1 : 1;  // one for the marker
  init.cap.max_send_sge = 1;
  init.cap.max_inline_data = sends ? nic.config.inline_bytes : 0;
  Pd* domain = sends && nic.sending ? nic.sending.get() : nic.pd.get();
  Owned<Qp> qp(nic.api.create_qp(domain, &init), nic.api.destroy_qp);
  MOE_P2P_CHECK(qp, Code::kResourceExhausted, nic.name(), ": making a queue pair of ",
                init.cap.max_send_wr, " writes: ", error_text(errno),
                "; lower max_in_flight, qps_per_peer or inline_bytes");
  QpAttr attr{};
  attr.qp_state = kQpInit;
  attr.pkey_index = nic.config.pkey_index;
  attr.port_num = nic.config.port;
  attr.qp_access_flags = kAccessRemoteWrite | kAccessRemoteRead;
  const int error = error_of(
      nic.api.modify_qp(qp.get(), &attr, kMaskState | kMaskPkey | kMaskPort | kMaskAccess));
  MOE_P2P_CHECK(error == 0, Code::kTransport, nic.name(),
                ": preparing a queue pair: ", error_text(error),
                "; is pkey_index=", nic.config.pkey_index, " in the table?");
  return qp;
}

void make_ready_to_receive(const Nic& nic, Qp& qp, const PortAddress& from, const QpAddress& peer,
                           const std::string& label) {
  MOE_P2P_CHECK((from.ethernet != 0) == nic.ethernet, Code::kTransport, nic.name(), " and ", label,
                ": one is Ethernet, the other InfiniBand; they cannot be connected");
  QpAttr attr{};
  attr.qp_state = kQpReadyToReceive;
  attr.path_mtu = std::min(from.mtu, own_port(nic).mtu);
  attr.dest_qp_num = peer.qp_num;
  attr.rq_psn = peer.psn;
  attr.max_dest_rd_atomic = nic.max_reads_served;
  attr.min_rnr_timer = nic.config.rnr_timer;
  attr.ah_attr = path_to(nic, from);
  const int error =
      error_of(nic.api.modify_qp(&qp, &attr,
                                 kMaskState | kMaskAddress | kMaskMtu | kMaskPeerQp |
                                     kMaskReceivePsn | kMaskMaxPeerReads | kMaskRnrTimer));
  MOE_P2P_CHECK(error == 0, Code::kTransport, nic.name(), ": no path from ", gid_text(nic.gid.gid),
                " (gid_index ", nic.gid.index, ") to ", gid_text(from.gid), " of ", label, ": ",
                error_text(error),
                "; are both addresses in networks that reach each other? Choose with gid_index, "
                "gid_type or gid_address");
}

// More reads than both ends allow wait in the NIC's send queue; a peer that is sent more than it
// serves refuses them (InfiniBand specification 1.4, section 9.4.1).
void make_ready_to_send(const Nic& nic, Qp& qp, const PortAddress& to, uint32_t psn) {
  QpAttr attr{};
  attr.qp_state = kQpReadyToSend;
  attr.timeout = nic.config.timeout;
  attr.retry_cnt = nic.config.retries;
  attr.rnr_retry = kEndlessRnrRetries;
  attr.sq_psn = psn;
  attr.max_rd_atomic = std::min(nic.max_reads_sent, to.max_reads);
  const int error = error_of(nic.api.modify_qp(
      &qp, &attr,
      kMaskState | kMaskTimeout | kMaskRetries | kMaskRnrRetries | kMaskSendPsn | kMaskMaxReads));
  MOE_P2P_CHECK(error == 0, Code::kTransport, nic.name(),
                ": starting a queue pair: ", error_text(error));
}

namespace {

void move_qp(const Nic& nic, Qp& qp, QpState state) noexcept {
  QpAttr attr{};
  attr.qp_state = state;
  static_cast<void>(nic.api.modify_qp(&qp, &attr, kMaskState));  // fails on a device that is gone
}

}  // namespace

void break_qp(const Nic& nic, Qp& qp) noexcept { move_qp(nic, qp, kQpError); }
void reset_qp(const Nic& nic, Qp& qp) noexcept { move_qp(nic, qp, kQpReset); }

}  // namespace moe_p2p::provider::verbs
