// The data path of the verbs provider: what the polling thread runs. Sender has the sending half.
#include <arpa/inet.h>

#include <algorithm>
#include <cerrno>

#include "provider/verbs/domain.h"

namespace moe_p2p::provider::verbs {
namespace {

// Completions taken from the NIC at once. At most as many immediates as Sender's backlog has room
// for.
constexpr size_t kPollBatch = 32;
// Empty polls before an event is requested from the NIC, which costs a doorbell.
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
  const uint64_t changes = changes_.num();
  if (changes == seen_changes_ && !sender_.must_look()) return;
  seen_changes_ = changes;
  // acquire: pairs with the release in Drain::look and Control::look_at_lane.
  const uint64_t wanted = changes_.drain_wanted.load(std::memory_order_acquire);
  if (wanted != drain_wanted_) {
    drain_wanted_ = wanted;
    drain_left_ = nic_.cq->cqe;
  }
  sender_.look_at_peers(output);
}

// What was in the queue when the ticket was drawn has been taken once a poll finds it empty, or
// polls have taken as many entries as it holds.
void VerbsDomain::drained(int num) noexcept {
  drain_left_ -= num;
  if (num > 0 && drain_left_ > 0) return;
  drain_done_ = drain_wanted_;
  // release: pairs with the acquire in Drain::look and Control::look_at_lane.
  changes_.drain_done.store(drain_done_, std::memory_order_release);
  kick_();
}

bool VerbsDomain::poll_queue(Output& output) noexcept {
  Wc wcs[kPollBatch];
  const size_t room = output.room();
  if (room == 0) return true;
  const int num =
      nic_.context->ops.poll_cq(nic_.cq.get(), static_cast<int>(std::min(room, kPollBatch)), wcs);
  if (drain_wanted_ != drain_done_) drained(num);
  if (num <= 0) return false;
  const std::span got(wcs, static_cast<size_t>(num));
  for (const Wc& wc : got) {
    if (wc.wr_id == kReceiveId)
      receive(wc, output);
    else
      sender_.complete(wc, output);
  }
  num_empty_polls_ = 0;
  armed_ = false;
  return true;
}

// A receive completes without an immediate when its write was refused or its queue pair ended.
void VerbsDomain::receive(const Wc& wc, Output& output) noexcept {
  ++num_owed_;
  if (wc.status == kWcSuccess && (wc.wc_flags & kWcWithImm)) output.immediate(ntohl(wc.imm_data));
}

void VerbsDomain::refill() noexcept {
  while (num_owed_ > 0) {
    const uint64_t num = std::min<uint64_t>(num_owed_, refill_batch_);
    RecvWr* const first = &receives_[refill_batch_ - num];
    RecvWr* bad = nullptr;
    const int error = nic_.context->ops.post_srq_recv(nic_.srq.get(), first, &bad);
    if (error == 0) {
      num_owed_ -= num;
      continue;
    }
    num_owed_ -= bad ? static_cast<uint64_t>(bad - first) : 0;
    if (error == ENOMEM) {
      num_owed_ = 0;  // full: a receive counted as lost was not
    } else if (changes_.receive_error.load(std::memory_order_relaxed) == 0) {
      // release: pairs with the acquire in Control::look, which ends all peers; they would wait
      // forever.
      changes_.receive_error.store(error < 0 ? errno : error, std::memory_order_release);
      kick_();
    }
    return;
  }
}

// Requests an event, then needs another poll: a completion in between raises none.
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
