// The settings of the verbs provider, parsed once when a Domain is opened.
//
//   devices=            names separated by ":", one per NIC of this engine; NIC i takes the i-th,
//                       the first again after the last. Not given: all with an active port, by name
//   port=1              of the device
//   gid_index=          not given: chosen (gid.h) by the next two
//   gid_type=v2         v2 or v1: which kind of RoCE; InfiniBand has neither
//   gid_address=        the GID that carries this IP address
//   traffic_class=0     service_level=0     one for all, or "a:b:c" for the classes of traffic
//   pkey_index=0
//   mtu=0               path MTU in bytes; 0: the largest that both ports allow
//   timeout=18          for an acknowledgement: 4.096 us * 2^timeout (18: about a second)
//   retries=6           after this many more timeouts the peer counts as dead. 7: endless on some
//   rnr_timer=12        how long the peer waits when we have no receive posted (12: 0.64 ms)
//   qps_per_peer=1      with more, one peer uses several engines of the NIC
//   max_in_flight=1024  accepted and not yet completed writes
//   max_write_bytes=1073741824
//   receives=8192       immediates that may arrive between two polls. More wait at the
//                       sender's NIC, which retries without end; none is lost
//   inline_bytes=64     writes from host memory up to this size travel inside their work request
//   relaxed_ordering=1  lets PCIe reorder payload (never after its own completion)
//   ordered_writes=0    1: writes of one queue pair reach the peer's memory in the order in which
//                       they were posted, so that arrival flags may follow them. RC has that
//                       order, a fabric with adaptive routing may not, and no driver reports it
//                       (ibv_query_qp_data_in_order is about the bytes of one write)
//   dmabuf=1            0: GPU memory through the peer memory module only
//   host=               IP address or name at which peers reach this process; not given: all
//   bind=               IP address of this host that listens for peers; not given: all. Announced
//                       unless host= is given
//   handshake_ms=10000  how long connect() tries, and how long a connecting peer may take to
//                       prove that it knows the secret
//   library=libibverbs.so.1
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace moe_p2p::provider::verbs {

struct Config {
  std::string library;
  std::vector<std::string> devices;
  uint8_t port = 1;
  int gid_index = -1;
  bool roce_v1 = false;
  std::string gid_address;
  std::array<uint8_t, 3> traffic_class{};  // by priority
  std::array<uint8_t, 3> service_level{};
  uint16_t pkey_index = 0;
  uint32_t mtu_bytes = 0;
  uint8_t timeout = 0, retries = 0, rnr_timer = 0;
  uint32_t qps_per_peer = 1, max_in_flight = 0, num_receives = 0;
  uint32_t max_write_bytes = 0, inline_bytes = 0;
  bool relaxed_ordering = true, ordered_writes = false, dmabuf = true;
  std::string host;
  std::string bind;
  std::chrono::milliseconds handshake_timeout{};
};

// Throws Error{kInvalidArgument} that names the key and its valid values.
Config parse_config(const std::string& settings);

}  // namespace moe_p2p::provider::verbs
