// A bare loop of fi_writemsg and fi_cq_read between two endpoints: what the libfabric provider is
// measured beside. One thread polls both ends, so that figures are the cost of code and not of the
// scheduler.
#pragma once

#include <cerrno>

#include "provider/libfabric/memory.h"
#include "provider/libfabric/peers.h"
#include "provider_table.h"

namespace moe_p2p::provider_test::fabric_bare {

using namespace provider::libfabric;  // NOLINT(google-build-using-namespace): all of the ABI

inline constexpr size_t kBufferBytes = size_t{32} << 20;
inline constexpr size_t kMaxWindow = 256;

// Both kinds write from and to the same memory: where pages lie matters more than what is measured.
struct alignas(1 << 21) Buffers {
  std::byte source[kBufferBytes], target[kBufferBytes];
};
inline Buffers& buffers() {
  static const auto instance = std::make_unique<Buffers>();
  return *instance;
}

struct RawEnd {
  RawEnd(const Config& config, std::span<std::byte> memory)
      : buffer(memory),
        session(open_session(config, 0)),
        regions(session, "raw"),
        peers(session, "raw"),
        key(regions.add({buffer.data(), buffer.size()})) {}

  // Completions of own writes; immediates are added to num_imms.
  size_t poll() {
    CqEntry entries[64];
    const ssize_t result = session.cq->ops->read(session.cq.get(), entries, 64);
    if (result == -EAGAIN) return 0;
    if (result < 0) FAIL("a write failed");
    size_t num_done = 0;
    for (ssize_t i = 0; i < result; ++i) ++(entries[i].flags & kRemoteWrite ? num_imms : num_done);
    return num_done;
  }

  const std::span<std::byte> buffer;
  Session session;
  Regions regions;
  Peers peers;
  const MemoryKey key;
  size_t num_imms = 0;
};

// post() takes as many of `count` writes of `bytes` as go; poll() polls both ends and returns how
// many are done.
class RawPair {
 public:
  explicit RawPair(const std::string& settings) : RawPair(settings, settings) {}
  RawPair(const std::string& from, const std::string& to)
      : a_(parse_config(from), buffers().source),
        b_(parse_config(to), buffers().target),
        contexts_(kMaxWindow),
        // Where a provider has no such level (reliable connections) none is asked for.
        flags_(kCompletion | kRemoteCqData |
               (a_.session.info->tx_attr->op_flags & kDeliveryComplete)) {
    peer_ = a_.peers.find(a_.peers.connect(b_.peers.own_address()))->entry->fi_addr;
    descriptor_ = a_.regions.find(a_.key.local_key)->descriptor;
  }
  size_t post(size_t count, size_t bytes) {
    size_t i = 0;
    for (; i < count; ++i) {
      const size_t offset = next_ % (kBufferBytes / bytes) * bytes;
      const iovec local{a_.buffer.data() + offset, bytes};
      const RmaIov remote{b_.key.remote_addr + offset, bytes, b_.key.remote_key};
      const RmaMessage message{
          &local, &descriptor_, 1, peer_, &remote, 1, &contexts_[next_ % kMaxWindow], next_};
      const ssize_t result =
          a_.session.endpoint->rma->writemsg(a_.session.endpoint.get(), &message, flags_);
      if (result == -EAGAIN) break;
      if (result != 0) FAIL("a write was refused");
      next_ = (next_ + 1) & 0xffffffff;
    }
    return i;
  }
  size_t poll() {
    b_.poll();
    return a_.poll();
  }
  size_t num_imms() const { return b_.num_imms; }

 private:
  RawEnd a_, b_;
  std::vector<Context> contexts_;
  const uint64_t flags_;
  uint64_t peer_ = 0, next_ = 0;
  void* descriptor_ = nullptr;
};

}  // namespace moe_p2p::provider_test::fabric_bare
