#include "engine/poller.h"

#include <algorithm>

#include "engine/poller_call.h"

namespace moe_p2p::engine {

using provider::Completion;

namespace {

// Batches per NIC and turn. Too small: the other work of a turn (doorbells, arrivals) runs once per
// few writes. Too large: a large transfer delays that work by this many posts.
constexpr int kBatchesPerTurn = 4;

bool uses_peer(const Operation& operation, const Peer& peer) noexcept {
  if (const auto* imm = std::get_if<Imm>(&operation)) return imm->peer == &peer;
  if (const auto* write = std::get_if<Write>(&operation)) return write->target->owner == &peer;
  if (const auto* pages = std::get_if<WritePages>(&operation)) return pages->target->owner == &peer;
  if (const auto* read = std::get_if<Read>(&operation)) return read->source->owner == &peer;
  if (const auto* pages = std::get_if<ReadPages>(&operation)) return pages->source->owner == &peer;
  const auto& slices = std::get_if<Scatter>(&operation)->slices;
  return std::any_of(slices.begin(), slices.end(),
                     [&](const Slice& slice) { return slice.target->owner == &peer; });
}

// Null unless the operation is a read.
const MemoryHandle* target_of(const Operation& operation) noexcept {
  if (const auto* read = std::get_if<Read>(&operation)) return read->target;
  if (const auto* pages = std::get_if<ReadPages>(&operation)) return pages->target;
  return nullptr;
}

// Null for an immediate.
const MemoryHandle* memory_of(const Operation& operation) noexcept {
  if (const auto* write = std::get_if<Write>(&operation)) return write->source;
  if (const auto* pages = std::get_if<WritePages>(&operation)) return pages->source;
  if (const auto* scatter = std::get_if<Scatter>(&operation)) return scatter->source;
  return target_of(operation);
}

// How many completions at the front are good ones of the same Request; 1 for any other.
size_t num_alike(std::span<const Completion> completions) noexcept {
  const Completion& first = completions.front();
  size_t count = 1;
  if (first.kind == Completion::Kind::kImmediate || !first.status.ok()) return count;
  while (count < completions.size() && completions[count].wr_id == first.wr_id &&
         completions[count].kind == first.kind && completions[count].status.ok())
    ++count;
  return count;
}

}  // namespace

Poller::Poller(const DomainGroup& group) : group_(group), num_nics_(group.size()) {
  for (int nic = 0; nic < num_nics_; ++nic)
    nics_[static_cast<size_t>(nic)].open(group[nic], nic, num_nics_, recorder_);
}

bool Poller::turn(Lookout* lookout) noexcept {
  bool moved = take_mail();
  moved |= open_gates();
  for (int nic = 0; nic < num_nics_; ++nic) moved |= post(nics_[static_cast<size_t>(nic)], lookout);
  for (int nic = 0; nic < num_nics_; ++nic) moved |= poll(nics_[static_cast<size_t>(nic)]);
  return moved;
}

// A closure may call this again (a control call on the polling thread); the rest of the list is
// then handled first, which keeps the order of arrival.
bool Poller::take_mail() noexcept {
  MailboxNode** end = &mail_;
  while (*end != nullptr) end = &(*end)->next;
  *end = mailbox_.take_all();
  const bool moved = mail_ != nullptr;
  while (mail_ != nullptr) {
    MailboxNode& node = *mail_;
    mail_ = node.next;  // before handling, which may destroy the node
    if (node.kind == MailboxNode::Kind::kRequest)
      activate(static_cast<Request&>(node));
    else
      static_cast<PollerCall&>(node).run();
  }
  return moved;
}

void Poller::activate(Request& request) noexcept {
  request.previous_active_ = nullptr;
  request.next_active_ = active_;
  if (active_ != nullptr) active_->previous_active_ = &request;
  active_ = &request;
  request.in_flight_ = 0;
  request.num_writes_ = 0;
  if (request.gate != nullptr && !request.gate->reached(request.gate_value))
    hold(request);
  else
    begin(request);
}

// It has no class yet: what waits at a gate must not hold up lower ones.
void Poller::hold(Request& request) noexcept {
  request.open_rails_ = num_nics_;  // all are to come
  for (int nic = 0; nic < num_nics_; ++nic) request.rails_[static_cast<size_t>(nic)] = {};
  gates_.hold(request);
}

bool Poller::open_gates() noexcept {
  bool moved = false;
  while (Request* request = gates_.take_open()) {
    begin(*request);
    moved = true;
  }
  return moved;
}

void Poller::begin(Request& request) noexcept {
  classes_.add(request.priority);
  request.open_rails_ = 0;
  const MemoryHandle* target = target_of(request.operation);
  request.fills_gpu_memory_ = target != nullptr && target->span.kind == provider::MemoryKind::kCuda;
  for (int nic = 0; nic < num_nics_; ++nic)
    request.open_rails_ += nics_[static_cast<size_t>(nic)].add(request) ? 1 : 0;
  finish_if_settled(request);  // nothing to send at all
}

bool Poller::post(NicQueue& queue, Lookout* lookout) noexcept {
  bool moved = false;
  for (int batch = 0; batch < kBatchesPerTurn; ++batch) {
    const bool urgent_only = stage(queue);
    if (queue.num_staged() == 0) break;
    moved |= queue.post() != 0;
    if (queue.num_staged() != 0) break;  // the NIC is full
    if (urgent_only) continue;
    take_mail();
    if (lookout != nullptr) lookout->look();
  }
  return moved;
}

// Fills a batch. False when writes of lower classes are in it: at most kQuantum of them, including
// writes that a full NIC left over.
bool Poller::stage(NicQueue& queue) noexcept {
  const auto now = classes_.num_used > 1 ? platform::Clock::now() : platform::Deadline{};
  size_t num_lower = classes_.num_used > 1 ? queue.num_staged() : 0;
  for (;;) {
    NicQueue::Turn turn = queue.next(classes_, now);
    if (turn.request == nullptr) break;
    const bool lower = turn.request->priority > classes_.first_used;
    if (lower)
      turn.most = std::min(turn.most, NicQueue::kQuantum - std::min(NicQueue::kQuantum, num_lower));
    if (turn.most == 0) break;
    const size_t staged = queue.stage(turn, now);
    num_lower += lower ? staged : 0;
    finish_if_settled(*turn.request);  // its last items were empty
  }
  return num_lower == 0;
}

bool Poller::poll(NicQueue& queue) noexcept {
  bool moved = false;
  for (int batch = 0; batch < kBatchesPerTurn; ++batch) {
    const size_t count = queue.poll(completions_);
    const auto polled = std::span(completions_).first(count);
    const bool visible = flush_for(polled);
    for (size_t i = 0; i < count;) {
      const size_t same = num_alike(polled.subspan(i));
      complete(queue, polled[i], same, visible);
      i += same;
    }
    moved |= count != 0;
    if (count < completions_.size()) break;
  }
  return moved;
}

// One flush for all immediates and reads of a batch: their payloads were written before it was
// polled.
bool Poller::flush_for(std::span<const Completion> completions) noexcept {
  if (!gpu_flushes_.needed()) return true;
  auto readers = Readers::kNobody;
  bool any = false;
  for (const Completion& c : completions) {
    const bool is_imm = c.kind == Completion::Kind::kImmediate;
    if (!is_imm && !reinterpret_cast<const Request*>(c.wr_id)->fills_gpu_memory_) continue;
    any = true;
    readers = std::max(readers, is_imm ? imm_table_.readers_of(c.imm) : Readers::kNeighbours);
  }
  return !any || gpu_flushes_.flush(readers);
}

void Poller::record(const NicQueue& queue, const Completion& completion, size_t count,
                    bool visible) noexcept {
  using base::Event;
  const base::Status& status = completion.status;
  if (completion.kind != Completion::Kind::kImmediate)
    return recorder_.add({.kind = Event::Kind::kCompleted,
                          .nic = queue.index(),
                          .detail = static_cast<uint16_t>(status.code),
                          .a = completion.wr_id,
                          .b = count,
                          .c = static_cast<uint64_t>(status.detail)});
  const bool keyed = (completion.imm & ImmKey::kKeyedBit) != 0;
  recorder_.add({.kind = Event::Kind::kImmediate,
                 .nic = queue.index(),
                 .detail = visible,
                 .peer = keyed ? ImmKey::unpack(completion.imm).source : 0,
                 .a = completion.imm});
}

// An immediate whose payload a GPU could not flush is dropped: counting it would be too early. A
// read fails.
void Poller::complete(NicQueue& queue, const Completion& completion, size_t count,
                      bool visible) noexcept {
  if (recorder_.on()) [[unlikely]]
    record(queue, completion, count, visible);
  if (completion.kind == Completion::Kind::kImmediate) {
    if (!visible) [[unlikely]]
      return;
    queue.count_immediate();
    imm_table_.deliver(completion.imm);
    return;
  }
  Request& request = *reinterpret_cast<Request*>(completion.wr_id);
  queue.complete(request, count);
  if (!completion.status.ok()) [[unlikely]]
    fail(request, completion.status);
  else if (!visible && request.fills_gpu_memory_) [[unlikely]]
    fail(request, {base::Code::kTransport, 0});
  finish_if_settled(request);
}

// A Request that failed before has nothing left to post. The first failure is kept, but for
// kCancelled, which says that all of the posted part completed well.
void Poller::fail(Request& request, base::Status status) noexcept {
  const bool failed = !request.status_.ok();
  if (!failed || request.status_.code == base::Code::kCancelled) request.status_ = status;
  if (failed) return;
  if (request.held_) {
    gates_.remove(request);
    classes_.add(request.priority);  // until it is done
  }
  request.open_rails_ = 0;
  Amount all, taken_back;
  for (int nic = 0; nic < num_nics_; ++nic) {
    NicQueue& queue = nics_[static_cast<size_t>(nic)];
    all += queue.share_of(request);
    taken_back += queue.drop(request);
  }
  request.cancellation_ = {.posted = {all.bytes - taken_back.bytes, all.imms - taken_back.imms},
                           .posted_writes = request.num_writes_,
                           .taken_back = taken_back};
}

std::optional<Cancellation> Poller::cancel(Request& request) noexcept {
  if (!request.status_.ok()) return request.cancellation_;
  if (!request.active()) return std::nullopt;
  fail(request, {base::Code::kCancelled, 0});
  const Cancellation cancellation = request.cancellation_;
  finish_if_settled(request);
  return cancellation;
}

Progress Poller::progress(const Request& active) const noexcept {
  return {.held = active.held_,
          .posted_writes = active.num_writes_,
          .in_flight = active.in_flight_,
          .more = active.open_rails_ != 0};
}

void Poller::finish_if_settled(Request& request) noexcept {
  if (request.open_rails_ != 0 || request.in_flight_ != 0) return;
  Request* previous = request.previous_active_;
  Request* next = request.next_active_;
  (previous != nullptr ? previous->next_active_ : active_) = next;
  if (next != nullptr) next->previous_active_ = previous;
  --classes_.active[request.priority];
  request.finish();
}

template <typename Uses>
void Poller::revoke_if(base::Status status, Uses&& uses) noexcept {
  for (Request* request = active_; request != nullptr;) {
    Request* next = request->next_active_;
    // Skips failed Requests: they have nothing left to post, and what they used may be gone.
    if (request->status_.ok() && uses(*request)) {
      fail(*request, status);
      finish_if_settled(*request);
    }
    request = next;
  }
}

void Poller::revoke(const Peer& peer, base::Status status) noexcept {
  revoke_if(status, [&](const Request& request) { return uses_peer(request.operation, peer); });
}

void Poller::revoke(const MemoryHandle& memory, base::Status status) noexcept {
  revoke_if(status,
            [&](const Request& request) { return memory_of(request.operation) == &memory; });
}

void Poller::close(base::Status status) noexcept {
  for (MailboxNode* node = mailbox_.take_all(); node != nullptr;) {
    MailboxNode* next = node->next;
    if (node->kind == MailboxNode::Kind::kRequest) {
      auto& request = static_cast<Request&>(*node);
      request.status_ = status;
      request.finish();
    }
    node = next;
  }
  while (active_ != nullptr) {
    fail(*active_, status);
    active_->in_flight_ = 0;
    finish_if_settled(*active_);
  }
}

bool Poller::idle() const noexcept {
  if (!mailbox_.empty() || classes_.urgent() < kNumPriorities) return false;
  for (int nic = 0; nic < num_nics_; ++nic)
    if (!group_[nic].idle()) return false;
  return true;
}

}  // namespace moe_p2p::engine
