#include "engine/nic_queue.h"

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::engine {

void NicQueue::open(provider::Domain& domain, int nic, int num_nics, base::Recorder& recorder) {
  domain_ = &domain;
  recorder_ = &recorder;
  nic_ = static_cast<size_t>(nic);
  num_nics_ = num_nics;
  limits_ = domain.limits();
  MOE_P2P_CHECK(limits_.max_write_bytes > 0 && limits_.max_in_flight > 0,
                base::Code::kInvalidArgument, "NIC ", nic, " (", domain.provider_name(),
                ") reports a limit of 0: max_write_bytes ", limits_.max_write_bytes,
                ", max_in_flight ", limits_.max_in_flight);
}

bool NicQueue::add(Request& request) noexcept {
  Request::Rail& own = rail(request);
  own.cursor = {};
  own.largest = 0;
  own.queued = false;
  cut(request.operation, context(request), own.cursor, {});
  if (own.cursor.state == RailCursor::State::kExhausted) return false;
  push_back(request);
  return true;
}

CutContext NicQueue::context(const Request& request) const noexcept {
  return {.nic = static_cast<int>(nic_),
          .num_nics = num_nics_,
          .max_write_bytes = limits_.max_write_bytes,
          .wr_id = reinterpret_cast<uint64_t>(&request)};
}

Amount NicQueue::share_of(const Request& request) const noexcept {
  return left(request.operation, context(request), {});
}

void NicQueue::push_back(Request& request) noexcept {
  Request::Rail& own = rail(request);
  Lane& queue = lane(request);
  own.previous = queue.tail;
  own.next = nullptr;
  own.queued = true;
  ++num_waiting_;
  if (queue.tail == nullptr) queue.waits_since = {};
  (queue.tail != nullptr ? rail(*queue.tail).next : queue.head) = &request;
  queue.tail = &request;
}

void NicQueue::remove(Request& request) noexcept {
  Request::Rail& own = rail(request);
  if (!own.queued) return;
  Lane& queue = lane(request);
  (own.previous != nullptr ? rail(*own.previous).next : queue.head) = own.next;
  (own.next != nullptr ? rail(*own.next).previous : queue.tail) = own.previous;
  own.queued = false;
  --num_waiting_;
}

// Lower classes leave a part of the NIC's queue free, or an urgent write would wait for room.
size_t NicQueue::room(bool lower) const noexcept {
  const size_t used = in_flight_ + num_staged_, all = limits_.max_in_flight;
  const size_t limit = lower ? all - std::min(kBatch, all / 4) : all;
  return std::min(kBatch - num_staged_, limit - std::min(used, limit));
}

NicQueue::Turn NicQueue::turn_of(int priority, int urgent, const Classes& classes) const noexcept {
  const size_t free = room(priority > classes.first_used);
  Request* const request = lanes_[static_cast<size_t>(priority)].head;
  if (free == 0) return {};
  if (priority <= urgent) return {request, std::min(free, kQuantum), limits_.max_write_bytes};
  uint64_t lower = 0;
  for (int other = urgent + 1; other < kNumPriorities; ++other)
    lower += lanes_[static_cast<size_t>(other)].bytes;
  const size_t writes = (kLowerBytes - std::min(kLowerBytes, lower)) / kLowerPiece;
  if (writes == 0) return {};
  return {request, std::min({free, kQuantum, writes}),
          std::min(kLowerPiece, limits_.max_write_bytes)};
}

NicQueue::Turn NicQueue::next(const Classes& classes, platform::Deadline now) noexcept {
  if (num_waiting_ == 0) return {};
  const int urgent = classes.urgent();
  const int last = classes.num_used > 1 ? kNumPriorities - 1 : urgent;
  for (int priority = last; priority > urgent; --priority) {
    Lane& queue = lanes_[static_cast<size_t>(priority)];
    if (queue.head == nullptr) continue;
    if (queue.waits_since == platform::Deadline{}) queue.waits_since = now;
    if (now - queue.waits_since < kPatience) continue;
    const Turn turn = turn_of(priority, urgent, classes);
    if (turn.request != nullptr) return turn;
  }
  for (int priority = 0; priority < kNumPriorities; ++priority) {
    if (lanes_[static_cast<size_t>(priority)].head == nullptr) continue;
    const Turn turn = turn_of(priority, urgent, classes);
    if (turn.request != nullptr) return turn;
  }
  return {};
}

size_t NicQueue::stage(const Turn& turn, platform::Deadline now) noexcept {
  Request& request = *turn.request;
  Request::Rail& own = rail(request);
  Lane& queue = lane(request);
  const RailCursor& cursor = own.cursor;
  const uint64_t before = cursor.in_flight * own.largest;
  if (cursor.in_flight == 0) own.largest = 0;
  const auto free = std::span(staged_).subspan(num_staged_, turn.most);
  CutContext terms = context(request);
  terms.max_write_bytes = turn.max_bytes;
  const size_t staged = cut(request.operation, terms, own.cursor, free);
  for (const provider::WorkRequest& work : free.first(staged))
    own.largest = std::max(own.largest, work.bytes);
  queue.bytes += cursor.in_flight * own.largest - before;
  queue.waits_since = now;
  notes_first_ |= request.timed && request.first_post_ == platform::Deadline{};
  num_staged_ += staged;
  request.in_flight_ += staged;
  request.num_writes_ += staged;
  if (cursor.state == RailCursor::State::kMore && queue.head == queue.tail) return staged;  // alone
  remove(request);
  if (cursor.state == RailCursor::State::kMore) push_back(request);
  if (cursor.state == RailCursor::State::kExhausted) --request.open_rails_;
  return staged;
}

Amount NicQueue::drop(Request& request) noexcept {
  remove(request);
  Amount dropped_amount = left(request.operation, context(request), rail(request).cursor);
  const auto mine = [&](const provider::WorkRequest& work) {
    if (work.wr_id != reinterpret_cast<uint64_t>(&request)) return false;
    dropped_amount += {work.bytes, work.has_imm ? 1u : 0u};
    return true;
  };
  const auto end = staged_.begin() + static_cast<std::ptrdiff_t>(num_staged_);
  const auto kept = std::remove_if(staged_.begin(), end, mine);
  const auto dropped = static_cast<size_t>(end - kept);
  num_staged_ -= dropped;
  request.in_flight_ -= dropped;
  request.num_writes_ -= dropped;
  rail(request).cursor.in_flight -= dropped;
  lane(request).bytes -= dropped * rail(request).largest;
  rail(request).cursor.state = RailCursor::State::kExhausted;
  return dropped_amount;
}

size_t NicQueue::post() noexcept {
  if (num_staged_ == 0) return 0;
  const auto now = platform::Clock::now();
  const std::span<const provider::WorkRequest> staged(staged_.data(), num_staged_);
  // Counted before the post, so that no receiver of a write finds it uncounted.
  count(staged, 1);
  const size_t taken = domain_->post(staged);
  count(staged.subspan(taken), -1);
  if (recorder_->on()) [[unlikely]]
    record(staged, taken, now);
  if (taken == 0) return 0;
  if (notes_first_) note_first(staged.first(taken), now);
  counters_.last_post_ns.store(
      static_cast<uint64_t>(std::chrono::nanoseconds(now.time_since_epoch()).count()),
      std::memory_order_relaxed);
  in_flight_ += taken;
  num_staged_ -= taken;
  std::copy_n(staged_.begin() + static_cast<std::ptrdiff_t>(taken), num_staged_, staged_.begin());
  return taken;
}

void NicQueue::record(std::span<const provider::WorkRequest> given, size_t taken,
                      platform::Deadline time) const noexcept {
  base::Event event{
      .time_ns = base::Recorder::ns_of(time), .kind = base::Event::Kind::kPosted, .nic = index()};
  for (const auto& work : given.first(taken)) {
    event.detail = static_cast<uint16_t>(work.has_imm | work.is_read << 1 | work.has_flag << 2);
    event.peer = work.peer;
    event.a = work.wr_id;
    event.b = work.bytes;
    event.c = work.imm;
    recorder_->add(event);
  }
  if (taken < given.size())
    recorder_->add({.time_ns = event.time_ns,
                    .kind = base::Event::Kind::kRefused,
                    .nic = index(),
                    .a = given.size(),
                    .b = taken});
}

// Before any of their completions is polled, so none of the Requests is done.
void NicQueue::note_first(std::span<const provider::WorkRequest> posted,
                          platform::Deadline now) noexcept {
  for (const auto& work : posted) {
    Request& request = *reinterpret_cast<Request*>(work.wr_id);
    if (request.first_post_ == platform::Deadline{}) request.first_post_ = now;
  }
  notes_first_ = posted.size() != num_staged_;
}

void NicQueue::count(std::span<const provider::WorkRequest> posted, int sign) noexcept {
  if (posted.empty()) return;
  int64_t bytes = 0, bytes_read = 0, reads = 0, immediates = 0;
  for (const auto& work : posted) {
    (work.is_read ? bytes_read : bytes) += static_cast<int64_t>(work.bytes);
    reads += work.is_read ? 1 : 0;
    immediates += work.has_imm ? 1 : 0;
  }
  add(counters_.bytes_written, static_cast<uint64_t>(sign * bytes));
  add(counters_.writes, static_cast<uint64_t>(sign * (std::ssize(posted) - reads)));
  add(counters_.bytes_read, static_cast<uint64_t>(sign * bytes_read));
  add(counters_.reads, static_cast<uint64_t>(sign * reads));
  add(counters_.immediates_sent, static_cast<uint64_t>(sign * immediates));
}

void NicQueue::complete(Request& request, size_t count) noexcept {
  Request::Rail& own = rail(request);
  in_flight_ -= count;
  request.in_flight_ -= count;
  own.cursor.in_flight -= count;
  lane(request).bytes -= count * own.largest;
  if (own.cursor.state == RailCursor::State::kHeld && own.cursor.in_flight == 0 && !own.queued)
    push_back(request);
}

NicCounters NicQueue::counters() const noexcept {
  const auto read = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  return {.bytes_written = read(counters_.bytes_written),
          .writes = read(counters_.writes),
          .bytes_read = read(counters_.bytes_read),
          .reads = read(counters_.reads),
          .immediates_sent = read(counters_.immediates_sent),
          .immediates_received = read(counters_.immediates_received),
          .last_post_ns = read(counters_.last_post_ns)};
}

}  // namespace moe_p2p::engine
