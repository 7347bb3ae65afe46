// The data path of the verbs provider: what the polling thread runs. Sender does the sending half.
#include <arpa/inet.h>

#include <algorithm>

#include "provider/verbs/domain.h"

namespace moe_p2p::provider::verbs {
namespace {

// Completions taken from the NIC at once. At most as many immediates as Sender's backlog has room for.
constexpr size_t kPollBatch = 32;
// Empty polls before the NIC is asked to wake us: asking costs a doorbell.
constexpr uint32_t kPollsBeforeSleep = 64;

}  // namespace

size_t VerbsDomain::post(std::span<const WorkRequest> requests) noexcept {
  return sender_.post(requests);
}

size_t VerbsDomain::poll(std::span<Completion> completions) noexcept {
  Output output(completions, sender_.backlog());
  take_changes(output);
  if (sender_.has_waiting()) sender_.post_waiting(output);
  const bool moved = poll_queue(output);
  if (num_owed_ >= refill_batch_) refill();
  if (may_sleep_ && !moved) prepare_sleep();
  sender_.shown(output.num_writes());
  return output.count();
}

void VerbsDomain::take_changes(Output& output) noexcept {
  // acquire: pairs with Control::changed.
  const uint64_t changes = changes_.num_changes.load(std::memory_order_acquire);
  if (changes == seen_changes_ && !sender_.must_look()) return;
  seen_changes_ = changes;
  const uint64_t lost = changes_.num_lost_receives.load(std::memory_order_relaxed);
  num_owed_ += lost - seen_lost_receives_;
  seen_lost_receives_ = lost;
  sender_.look_at_peers(output);
}

bool VerbsDomain::poll_queue(Output& output) noexcept {
  Wc wcs[kPollBatch];
  const size_t room = output.room();
  if (room == 0) return true;
  const int num =
      nic_.context->ops.poll_cq(nic_.cq.get(), static_cast<int>(std::min(room, kPollBatch)), wcs);
  if (num <= 0) return false;
  const std::span got(wcs, static_cast<size_t>(num));
  bool flushed = false, visible = true;
  for (const Wc& wc : got) {
    if (wc.wr_id != kReceiveId) {
      sender_.complete(wc, output);
      continue;
    }
    // One flush for all of them: their payload was written before the first is shown.
    if (!flushed) {
      // acquire: pairs with register_memory().
      const auto* flush = flush_.load(std::memory_order_acquire);
      if (flush) visible = keep_flush_error(flush->flush());
      flushed = true;
    }
    receive(wc, visible, output);
  }
  num_empty_polls_ = 0;
  armed_ = false;
  return true;
}

// A receive comes back without an immediate when its write was refused or its queue pair ended.
void VerbsDomain::receive(const Wc& wc, bool visible, Output& output) noexcept {
  ++num_owed_;
  if (visible && wc.status == kWcSuccess && (wc.wc_flags & kWcWithImm))
    output.immediate(ntohl(wc.imm_data));
}

// A GPU that cannot flush has failed: its immediates are kept back rather than shown too early.
bool VerbsDomain::keep_flush_error(int error) noexcept {
  if (error != 0) flush_error_.store(error, std::memory_order_relaxed);  // a number for failure()
  return error == 0;
}

// A queue that is full takes no more than it had lost: then nothing is owed.
void VerbsDomain::refill() noexcept {
  while (num_owed_ > 0) {
    const uint64_t num = std::min<uint64_t>(num_owed_, refill_batch_);
    RecvWr* const first = &receives_[refill_batch_ - num];
    RecvWr* bad = nullptr;
    if (nic_.context->ops.post_srq_recv(nic_.srq.get(), first, &bad) != 0) {
      num_owed_ = 0;
      return;
    }
    num_owed_ -= num;
  }
}

// Asks for an event, then for another poll: what came in between raises none.
void VerbsDomain::prepare_sleep() noexcept {
  if (armed_ || sender_.num_open() > 0 || ++num_empty_polls_ < kPollsBeforeSleep) return;
  armed_ = nic_.context->ops.req_notify_cq(nic_.cq.get(), 0) == 0;
  num_empty_polls_ = 0;
}

bool VerbsDomain::idle() const noexcept {
  if (sender_.num_open() > 0) return false;
  return !may_sleep_ || armed_;
}

}  // namespace moe_p2p::provider::verbs
