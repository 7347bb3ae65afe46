// The data path of the engine: turns submitted Requests into posts and completions into done
// Requests and counted immediates. Everything here runs on the polling thread and never blocks,
// allocates, throws or logs; other threads only push into the mailbox.
#pragma once

#include <array>
#include <optional>

#include "base/recorder.h"
#include "engine/domain_group.h"
#include "engine/gate.h"
#include "engine/gpu_flushes.h"
#include "engine/imm_counter.h"
#include "engine/mailbox.h"
#include "engine/nic_queue.h"
#include "engine/request.h"

namespace moe_p2p::engine {

// Takes work of the most urgent class that does not come through the mailbox.
class Lookout {
 public:
  virtual ~Lookout() = default;
  virtual void look() noexcept = 0;
};

class Poller {
 public:
  // Control path, before the first turn.
  explicit Poller(const DomainGroup& group);

  // Any thread.
  Mailbox& mailbox() noexcept { return mailbox_; }
  ImmTable& imm_table() noexcept { return imm_table_; }
  GpuFlushes& gpu_flushes() noexcept { return gpu_flushes_; }
  const NicQueue& nic(int nic) const noexcept { return nics_[static_cast<size_t>(nic)]; }

  // Polling thread.
  base::Recorder& recorder() noexcept { return recorder_; }
  // Looks at the mailbox and at `lookout`, if there is one, after at most NicQueue::kQuantum posts
  // of a class that others go before.
  bool turn(Lookout* lookout) noexcept;
  bool take_mail() noexcept;
  // Begins Requests whose gates have opened.
  bool open_gates() noexcept;
  void activate(Request& request) noexcept;
  // Fails the active Requests that use the peer (or the memory); they finish when their outstanding
  // writes have completed.
  void revoke(const Peer& peer, base::Status status) noexcept;
  void revoke(const MemoryHandle& memory, base::Status status) noexcept;
  // Takes back what is not posted of a Request that was submitted; it is done once the rest has
  // completed, with kCancelled if well. Returns nothing when it ended well before.
  std::optional<Cancellation> cancel(Request& request) noexcept;
  Progress progress(const Request& active) const noexcept;
  // Finishes every active and every mailed Request. Call it after the NICs are closed: nothing
  // completes any more.
  void close(base::Status status) noexcept;
  // Nothing to post and nothing in flight, but for what waits at gates.
  bool idle() const noexcept;
  bool must_poll() const noexcept { return gates_.must_poll(); }

 private:
  void hold(Request& request) noexcept;
  void begin(Request& request) noexcept;
  bool post(NicQueue& queue, Lookout* lookout) noexcept;
  bool stage(NicQueue& queue) noexcept;
  bool poll(NicQueue& queue) noexcept;
  bool flush_for(std::span<const provider::Completion> completions) noexcept;
  void complete(NicQueue& queue, const provider::Completion& completion, size_t count,
                bool visible) noexcept;
  void record(const NicQueue& queue, const provider::Completion& completion, size_t count,
              bool visible) noexcept;
  void fail(Request& request, base::Status status) noexcept;
  void finish_if_settled(Request& request) noexcept;
  template <typename Uses>
  void revoke_if(base::Status status, Uses&& uses) noexcept;

  const DomainGroup& group_;
  const int num_nics_;
  base::Recorder recorder_;
  std::array<NicQueue, kMaxNics> nics_;
  // Of poll(). A member, because as a local array it was set to zero for each NIC and turn: 25 ns.
  std::array<provider::Completion, NicQueue::kBatch> completions_;
  Classes classes_;
  Gates gates_;
  Request* active_ = nullptr;  // list of Requests that are not done, newest first
  ImmTable imm_table_;
  GpuFlushes gpu_flushes_;
  Mailbox mailbox_;
  MailboxNode* mail_ = nullptr;  // taken from the mailbox, not handled yet
};

}  // namespace moe_p2p::engine
