// The contract between the engine and a NIC. One Domain is one NIC, owned by one polling thread.
//
// What the engine may assume, and nothing more:
//   1. When a kImmediate completion is polled at the target, the payload of that same write, and of
//      no other, is visible there. In GPU memory, with needs_gpu_flush(), only to readers for whom
//      the GPU orders devices' writes: the engine flushes for others (engine/gpu_flushes.h).
//   2. Every accepted work request yields exactly one kWrite completion at its poster, good or bad.
//      A good one means that the payload is visible at the target and the source may be reused. For
//      a read the target is the poster's memory, in which GPU memory is visible as in 1; after a
//      bad one any part of it may have been overwritten.
//   3. Writes, reads, immediates and completions may be reordered and interleaved in every other
//      way.
//
//   4. Where orders_writes(): once the flag of a write (WorkRequest::has_flag) is seen in the
//      peer's memory, the payload of that same write is visible there to whoever sees the flag, as
//      in 1, in memory that is registered in_order. Flags come in any order, before or after
//      immediates; a write that fails may leave its flag behind, but never without its payload.
//
// Control calls (anything without noexcept) may block, allocate and throw Error, and may be made by
// any thread while another one polls. Data calls (noexcept) are made by the polling thread only;
// they never block, lock, allocate, throw or log.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "base/wire.h"
#include "platform/wait.h"

namespace moe_p2p::provider {

enum class MemoryKind : int32_t { kHost = 0, kCuda = 1 };

struct MemorySpan {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  MemoryKind kind = MemoryKind::kHost;
  int32_t device = -1;  // CUDA ordinal for kCuda
  // kCuda: other GPUs of the host read it too. False saves a flush per batch of immediates when the
  // GPU orders writes for itself alone.
  bool read_by_neighbours = true;
  // Peers' writes to it are not reordered on their way into memory: what sever() and flags need.
  bool in_order = false;
};

// Result of registering one span at one Domain. `remote_addr` is the first byte's address as peers
// must name it (the virtual address, or 0 when the NIC counts from the region's start).
struct MemoryKey {
  uint64_t local_key = 0;
  uint64_t remote_key = 0;
  uint64_t remote_addr = 0;
};

using PeerId = uint32_t;  // meaningful within one Domain only

// A write of local memory to the peer's, or a read of the peer's memory into local memory.
struct WorkRequest {
  uint64_t wr_id = 0;          // returned in the kWrite completion
  std::byte* local = nullptr;  // may be null when bytes is 0; changed by reads only
  uint64_t local_key = 0;
  uint64_t remote_addr = 0;
  uint64_t remote_key = 0;
  uint32_t bytes = 0;
  PeerId peer = 0;
  uint32_t imm = 0;
  bool has_imm = false;
  bool is_read = false;   // has bytes and no immediate
  bool has_flag = false;  // with an immediate, where the Domain orders_writes()
  // The flag, 8 bytes of the same registered memory: stored behind the payload.
  uint64_t flag_addr = 0;
  uint64_t flag_value = 0;
};

struct Completion {
  enum class Kind : uint8_t { kWrite, kImmediate };  // kWrite: of a read too
  Kind kind = Kind::kWrite;
  uint32_t imm = 0;     // kImmediate
  uint64_t wr_id = 0;   // kWrite
  base::Status status;  // kWrite
};

struct DomainLimits {
  uint32_t max_write_bytes = 1u << 30;  // larger writes and reads are split by the engine
  uint32_t max_in_flight = 1024;        // accepted and not yet completed work requests
};

// Options of a new Domain. `settings` is "key=value,key=value"; each provider documents and checks
// its own keys, an unknown key is an Error.
struct DomainOptions {
  int nic = 0;  // index among the NICs of this engine
  std::string settings;
  // The polling thread's event count, and the shared memory object that begins with it. A provider
  // without an interrupt of its own notifies the *target's* waker when something arrives, so that
  // the target's polling thread may sleep. Null and empty when the poller never sleeps.
  platform::EventCount* waker = nullptr;
  std::string waker_name;
};

class Domain {
 public:
  virtual ~Domain() = default;

  // --- control ---
  virtual const char* provider_name() const noexcept = 0;
  virtual DomainLimits limits() const noexcept = 0;
  // True when a device other than a GPU writes GPU memory here: its completions may precede the
  // order of its writes for all readers.
  virtual bool needs_gpu_flush() const noexcept { return true; }
  // True for a NIC that times writes and carries none to a window (map_remote): the sender stores
  // what it writes there into the peer's memory by itself, before it posts the write.
  virtual bool writes_in_place() const noexcept { return false; }
  // True for a NIC that stores a flag behind what it writes (sentence 4).
  virtual bool orders_writes() const noexcept { return false; }
  // The bytes that a peer passes to connect(). Valid as long as the Domain lives.
  virtual base::Bytes address() const = 0;
  // Makes `address` writable and readable from here. Each call yields a new id; the peer need not
  // cooperate.
  virtual PeerId connect(std::span<const std::byte> address) = 0;
  // The same for traffic of one class, 0 to 2, the most urgent first. Where a NIC has classes its
  // settings say which of them each becomes. `tag`: for sever() at either end; 0: none.
  virtual PeerId connect_for(std::span<const std::byte> address, int /*priority*/,
                             uint64_t /*tag*/) {
    return connect(address);
  }
  // This NIC may write to the peer's memory of `remote_key` from now on: called before the first
  // write. If a NIC's unregister_memory() must know its writers, this informs the peer.
  virtual void announce(PeerId /*peer*/, uint64_t /*remote_key*/) {}
  // Outstanding writes to the peer complete, good or bad; other peers are not affected.
  virtual void disconnect(PeerId peer) = 0;
  virtual MemoryKey register_memory(const MemorySpan& span) = 0;
  // When this returns no peer's write and no own read reaches the span any more; later writes and
  // reads by peers fail with kRemoteAccess at their poster. Throws Error{kTimeout} where the NIC
  // cannot take a read back and its peer does not answer: the span may still be overwritten.
  virtual void unregister_memory(const MemoryKey& key) = 0;
  // Why unregister_memory() does not keep its promise where a peer was stopped in the middle of a
  // write: the rest may land when that peer goes on. Empty: it does.
  virtual std::string why_no_fence() const { return {}; }
  // The fence by queue pair. Ends all connections of `tag` that lead here, and refuses later ones;
  // those from here must have been disconnected. Once it returns true, nothing is under way over
  // either, but what the NIC has accepted may still be on its way into memory: in memory that is
  // registered in_order it is there when a read of it by this NIC has completed. False at the
  // deadline; to be called again. No immediate that came over them is polled after it. What a peer
  // still does through a window (map_remote) it does not end. Throws Error{kUnavailable} where
  // there is no such fence.
  virtual bool sever(uint64_t tag, platform::Deadline deadline);
  // A window: GPU memory of a peer on this host, registered there under remote_key, is mapped here
  // at `local`. Providers without a NIC write through it and, where it is lent, read; others ignore
  // it. A span without bytes drops the window; when that returns nothing goes through it any more.
  // The peer must not call unregister_memory() for it before that, unless `lent`: then the NIC sees
  // to it that its unregister_memory() is the end of what goes through the window too. Where it
  // cannot, a lent one is ignored.
  virtual void map_remote(uint64_t /*remote_key*/, const MemorySpan& /*local*/, bool /*lent*/) {}
  void map_remote(uint64_t remote_key, const MemorySpan& local) {
    map_remote(remote_key, local, false);
  }
  // True for a NIC that has a use for lent windows.
  virtual bool writes_to_lent_memory() const noexcept { return false; }
  // False once a peer lends the memory of this key no more, or has closed: its window should go.
  virtual bool lends(PeerId /*peer*/, uint64_t /*remote_key*/) { return true; }
  // The first failure of this NIC, as text for users: device, peer, write, likely cause. Empty
  // without a failure.
  virtual std::string failure() const { return {}; }
  // Connections that this NIC has refused because the other side did not prove that it knows the
  // NIC's secret. 0 when nothing listens, or a library listens on its own.
  virtual uint64_t num_refused() const noexcept { return 0; }

  // --- data --- Takes the first n requests and returns n; not all when queues are full (try again
  // after a poll). If a taken request fails, its completion reports it.
  virtual size_t post(std::span<const WorkRequest> requests) noexcept = 0;
  // Makes progress; fills at most completions.size() entries and returns how many.
  virtual size_t poll(std::span<Completion> completions) noexcept = 0;
  // True when nothing is in flight from here, so that a poller which is notified of arrivals may
  // sleep. A NIC that has a waker and cannot have it notified is never idle: it has to be polled.
  virtual bool idle() const noexcept = 0;
};

// Opens NIC options.nic of the named provider ("libfabric", "verbs", "loopback", "timed", "null").
// Throws Error{kUnavailable} with the list of providers when the name is unknown, or with the
// reason when the provider cannot run here.
std::unique_ptr<Domain> open_domain(const std::string& provider, const DomainOptions& options);

}  // namespace moe_p2p::provider
