// The peers of one NIC and their places in libfabric's address vector. Changed by control calls,
// read by the polling thread, under the Domain's gate.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "platform/wait.h"
#include "provider/libfabric/listener.h"
#include "provider/libfabric/session.h"
#include "provider/provider.h"

namespace moe_p2p::provider::libfabric {

struct Slot;

// A NIC's address, sent to its peers. Writes of no bytes go to the scratch region: providers check
// their address and key too.
struct Address {
  base::Bytes name;  // of the endpoint, as libfabric gives it
  uint64_t scratch_addr = 0;
  uint64_t scratch_key = 0;
  std::string host = {}, software = {};  // of efa: Session::software

  base::Bytes serialize(const std::string& provider) const;
  // Throws Error{kInvalidArgument} for an address made by another provider or version.
  static Address parse(std::span<const std::byte> bytes, const std::string& provider);
};

// An entry of the address vector, one per address: providers differ in the meaning of a second one.
struct Entry {
  uint64_t fi_addr = kAddressNotAvailable;
  uint32_t num_peers = 0;
  bool refused = false;  // libfabric did not take what was posted there last
};

struct Peer {
  PeerId id;
  Address address;
  Entry* entry;
  bool connected = true;
  // Writes that libfabric has not taken yet (Writes).
  Slot* first = nullptr;
  Slot* last = nullptr;
  Peer* next_waiting = nullptr;
  bool listed = false;    // in the list of peers with such writes; left at the next pump()
  bool answered = false;  // its last completed write succeeded: handshakes are over
  std::optional<platform::Clock::time_point> refused_since = {};
  Listener listener = {};  // over tcp
  // What was announced (writers.h), and how many of it libfabric has taken since the last failure.
  std::vector<uint64_t> announced = {};
  size_t num_announced = 0;
  // An empty write behind which nothing that the peer had sent is under way any more. kAnswered:
  // or its connection has ended.
  enum class Probe { kNone, kPosted, kAnswered } probe = Probe::kNone;
};

class Peers {
 public:
  Peers(const Session& session, std::string name);

  Address own_address() const;  // without scratch
  PeerId connect(Address address);
  // Throws Error{kTransport} where libfabric would emulate writes between the two.
  void check_software(const Address& peer) const;
  // Throws Error{kInvalidArgument} for an id that is not connected.
  Peer& at(PeerId id);
  void disconnect(PeerId id);
  // How many are connected to this address.
  uint32_t num_at(const base::Bytes& name) const { return entries_.at(name).num_peers; }
  size_t num_addresses() const { return entries_.size(); }

  // Also of one that was disconnected.
  const base::Bytes& name_of(PeerId id) const noexcept { return peers_[id]->address.name; }
  // Returns a peer that can be written to without a handshake; null when there is none.
  Peer* find_answered() noexcept {
    for (const auto& peer : peers_)
      if (peer->connected && peer->answered) return peer.get();
    return nullptr;
  }
  // Returns null when the peer is not connected (any more).
  Peer* find(PeerId id) noexcept {
    return id < peers_.size() && peers_[id]->connected ? peers_[id].get() : nullptr;
  }

 private:
  const Session& session_;
  const std::string name_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by id; ids are not reused
  std::map<base::Bytes, Entry> entries_;      // they stay where they are
};

}  // namespace moe_p2p::provider::libfabric
