// Which peers may write to which memory of this NIC, as they announced it themselves
// (Domain::announce): libfabric does not report who writes. Of tcp (fence.h). An announcement is an
// immediate of 64 bits: the peer's IPv4 address and port, and the low bits of the memory's key;
// the engine's immediates have 32. Two memories whose low bits are alike share their writers: more
// peers are asked than needed, and none is missed.
//
// note() is the data path, everything else the control path, both inside the Domain's gate.
#pragma once

#include <cstdint>
#include <vector>

#include "base/wire.h"

namespace moe_p2p::provider::libfabric {

using WriterName = uint64_t;  // IPv4 address and port, never 0

// `name`: of an endpoint, as libfabric gives it. 0: it has no IPv4 address.
WriterName writer_name(const base::Bytes& name);
base::Bytes endpoint_name(WriterName writer);

class Writers {
 public:
  static bool announces(uint64_t data) noexcept { return data >> 32 != 0; }
  static uint64_t announcement(WriterName writer, uint64_t remote_key) noexcept {
    return writer << 16 | (remote_key & 0xffff);
  }

  // Opens the table: from then on note() may be called.
  void open();
  void note(uint64_t announcement) noexcept;
  // The writers of the memory, which are forgotten.
  std::vector<WriterName> take(uint64_t remote_key);
  bool knows(WriterName writer) const;
  bool full() const noexcept { return full_; }

 private:
  std::vector<uint64_t> table_;  // open addressing; 0: free
  size_t used_ = 0;
  bool full_ = false;
};

}  // namespace moe_p2p::provider::libfabric
