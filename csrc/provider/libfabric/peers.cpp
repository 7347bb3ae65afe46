#include "provider/libfabric/peers.h"

#include <string_view>
#include <utility>

#include "base/letter.h"
#include "base/log.h"
#include "platform/process.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

constexpr uint32_t kAddressTag = 0x31424146;  // "FAB1"
// Places in the address vector of libfabric's shm (SMR_MAX_PEERS).
constexpr size_t kShmPeers = 256;

bool is_shm(const Session& session) {
  return std::string_view(session.info->fabric_attr->prov_name) == "shm";
}

}  // namespace

base::Bytes Address::serialize(const std::string& provider) const {
  base::WireWriter out;
  base::put_letter(out, kAddressTag);
  out.put_string(provider);
  out.put_bytes(name);
  out.put(scratch_addr);
  out.put(scratch_key);
  out.put_string(host);
  out.put_string(software);
  return out.take();
}

Address Address::parse(std::span<const std::byte> bytes, const std::string& provider) {
  base::WireReader in(bytes, "libfabric address");
  base::expect_letter(in, kAddressTag, Code::kInvalidArgument,
                      "libfabric: the address to connect to");
  const std::string theirs = in.get_string();
  MOE_P2P_CHECK(theirs == provider, Code::kInvalidArgument, "libfabric: the peer uses provider ",
                theirs, ", this NIC ", provider);
  Address address;
  const auto name = in.get_bytes();
  address.name.assign(name.begin(), name.end());
  address.scratch_addr = in.get<uint64_t>();
  address.scratch_key = in.get<uint64_t>();
  address.host = in.get_string();
  address.software = in.get_string();
  in.expect_end();
  return address;
}

Peers::Peers(const Session& session, std::string name)
    : session_(session), name_(std::move(name)) {}

Address Peers::own_address() const {
  Address address;
  Endpoint& endpoint = *session_.endpoint;
  size_t length = 0;
  endpoint.cm->getname(&endpoint.fid, nullptr, &length);  // gives the length
  address.name.resize(length);
  const int error = endpoint.cm->getname(&endpoint.fid, address.name.data(), &length);
  MOE_P2P_CHECK(error == 0, Code::kTransport, name_, ": has no address: ", error_text(error));
  address.name.resize(length);
  address.host = platform::host_name();
  address.software = session_.software;
  return address;
}

void Peers::check_software(const Address& peer) const {
  const Address own = own_address();
  MOE_P2P_CHECK(
      peer.software == own.software, Code::kTransport, name_, ": the EFA software of ", own.host,
      " is ", own.software, ", of ", peer.host, " ", peer.software,
      ": libfabric may emulate writes between them with packets, which is slow and cannot reach "
      "GPU memory. Install one EFA driver and libfabric on all hosts, and set the same FI_EFA_* "
      "variables for all ranks");
}

PeerId Peers::connect(Address address) {
  auto entry = entries_.find(address.name);
  if (entry == entries_.end()) {
    uint64_t fi_addr = kAddressNotAvailable;
    AddressVector& av = *session_.av;
    const int inserted = av.ops->insert(&av, address.name.data(), 1, &fi_addr, 0, nullptr);
    MOE_P2P_CHECK(inserted == 1 || !is_shm(session_) || entries_.size() < kShmPeers,
                  Code::kResourceExhausted, name_, ": libfabric's shm takes ", kShmPeers,
                  " peers in the life of a NIC, and keeps those that have left: make this engine "
                  "anew, or use transport loopback");
    MOE_P2P_CHECK(inserted == 1, Code::kTransport, name_, ": cannot use the peer's address: ",
                  inserted < 0 ? error_text(inserted) : std::string("it was not accepted"));
    entry = entries_.emplace(address.name, Entry{fi_addr}).first;
  }
  ++entry->second.num_peers;
  const auto id = static_cast<PeerId>(peers_.size());
  peers_.push_back(std::make_unique<Peer>(id, std::move(address), &entry->second));
  return id;
}

Peer& Peers::at(PeerId id) {
  Peer* peer = find(id);
  MOE_P2P_CHECK(peer, Code::kInvalidArgument, name_, ": peer ", id, " is not connected");
  return *peer;
}

void Peers::disconnect(PeerId id) {
  Peer& peer = at(id);
  peer.connected = false;
  peer.announced.clear();
  peer.num_announced = 0;
  peer.listener.forget();
  const auto entry = entries_.find(peer.address.name);
  if (--entry->second.num_peers != 0) return;
  // Bug in libfabric 1.17's shm: it unmaps a peer's memory at once, and then still reads there for
  // writes in flight in either direction (smr_progress.c). Workaround: entries are never removed,
  // and the same name finds its entry again.
  // Nor can it be known when none is in flight: the peer, which shares the memory, does not say.
  // So a NIC knows no more than kShmPeers (connect()).
  if (is_shm(session_)) return;
  AddressVector& av = *session_.av;
  const int error = av.ops->remove(&av, &entry->second.fi_addr, 1, 0);
  entries_.erase(entry);
  if (error != 0)
    MOE_P2P_LOG(base::LogLevel::kWarning, name_, ": removing a peer: ", error_text(error));
}

}  // namespace moe_p2p::provider::libfabric
