// The peers of one NIC and their places in libfabric's address vector. Changed by control calls,
// looked at by the polling thread; the gate of the Domain keeps them apart.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "platform/wait.h"
#include "provider/libfabric/session.h"
#include "provider/provider.h"

namespace moe_p2p::provider::libfabric {

struct Slot;

// What a NIC tells its peers. Writes of no bytes go to the scratch region: providers check address
// and key of those too.
struct Address {
  base::Bytes name;  // of the endpoint, as libfabric gives it
  uint64_t scratch_addr = 0;
  uint64_t scratch_key = 0;

  base::Bytes serialize(const std::string& provider) const;
  // Throws Error{kInvalidArgument} when it was made by another provider or version.
  static Address parse(std::span<const std::byte> bytes, const std::string& provider);
};

struct Peer {
  PeerId id;
  Address address;
  uint64_t fi_addr = kAddressNotAvailable;
  bool connected = true;
  // Writes that libfabric has not taken yet (Writes).
  Slot* first = nullptr;
  Slot* last = nullptr;
  Peer* next_waiting = nullptr;
  bool listed = false;    // among those that have any, or had when last looked at
  bool answered = false;  // its last write that completed did so well: handshakes are over
  std::optional<platform::Clock::time_point> refused_since = {};
};

class Peers {
 public:
  Peers(const Session& session, std::string name);

  Address own_address() const;  // without scratch
  PeerId connect(Address address);
  // Throws Error{kInvalidArgument} for an id that is not connected.
  Peer& at(PeerId id);
  void disconnect(PeerId id);

  // One that can be written to without a handshake; null where there is none.
  Peer* find_answered() noexcept {
    for (const auto& peer : peers_)
      if (peer->connected && peer->answered) return peer.get();
    return nullptr;
  }
  // Null: not connected (any more).
  Peer* find(PeerId id) noexcept {
    return id < peers_.size() && peers_[id]->connected ? peers_[id].get() : nullptr;
  }

 private:
  // One entry of the address vector per address: providers differ in what a second one means.
  struct Entry {
    uint64_t fi_addr;
    uint32_t num_peers;
  };

  const Session& session_;
  const std::string name_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by id; ids are not used again
  std::map<base::Bytes, Entry> entries_;
};

}  // namespace moe_p2p::provider::libfabric
