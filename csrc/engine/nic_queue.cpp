#include "engine/nic_queue.h"

#include <algorithm>

#include "base/log.h"

namespace moe_p2p::engine {

void NicQueue::open(provider::Domain& domain, int nic, int num_nics) {
  domain_ = &domain;
  nic_ = static_cast<size_t>(nic);
  num_nics_ = num_nics;
  limits_ = domain.limits();
  MOE_P2P_CHECK(limits_.max_write_bytes > 0 && limits_.max_in_flight > 0,
                base::Code::kInvalidArgument, "NIC ", nic, " (", domain.provider_name(),
                ") reports a limit of 0: max_write_bytes ", limits_.max_write_bytes,
                ", max_in_flight ", limits_.max_in_flight);
}

bool NicQueue::add(Request& request) noexcept {
  rail(request).cursor = {};
  rail(request).queued = false;
  cut_next(request, {});
  if (rail(request).cursor.state == RailCursor::State::kExhausted) return false;
  push_back(request);
  return true;
}

CutContext NicQueue::context(const Request& request) const noexcept {
  return {.nic = static_cast<int>(nic_),
          .num_nics = num_nics_,
          .max_write_bytes = limits_.max_write_bytes,
          .wr_id = reinterpret_cast<uint64_t>(&request)};
}

size_t NicQueue::cut_next(Request& request, std::span<provider::WorkRequest> out) const noexcept {
  return cut(request.operation, context(request), rail(request).cursor, out);
}

Amount NicQueue::share_of(const Request& request) const noexcept {
  return left(request.operation, context(request), {});
}

void NicQueue::push_back(Request& request) noexcept {
  Request::Rail& own = rail(request);
  own.previous = tail_;
  own.next = nullptr;
  own.queued = true;
  (tail_ != nullptr ? rail(*tail_).next : head_) = &request;
  tail_ = &request;
}

void NicQueue::remove(Request& request) noexcept {
  Request::Rail& own = rail(request);
  if (!own.queued) return;
  (own.previous != nullptr ? rail(*own.previous).next : head_) = own.next;
  (own.next != nullptr ? rail(*own.next).previous : tail_) = own.previous;
  own.queued = false;
}

size_t NicQueue::room() const noexcept {
  const size_t used = in_flight_ + num_staged_;
  return std::min(kBatch - num_staged_,
                  limits_.max_in_flight - std::min<size_t>(used, limits_.max_in_flight));
}

void NicQueue::stage_front() noexcept {
  Request& request = *head_;
  const RailCursor& cursor = rail(request).cursor;
  const auto free = std::span(staged_).subspan(num_staged_, std::min(room(), kQuantum));
  const size_t staged = cut_next(request, free);
  num_staged_ += staged;
  request.in_flight_ += staged;
  request.num_writes_ += staged;
  if (cursor.state == RailCursor::State::kMore && head_ == tail_) return;  // alone: its turn again
  remove(request);
  if (cursor.state == RailCursor::State::kMore) push_back(request);
  if (cursor.state == RailCursor::State::kExhausted) --request.open_rails_;
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
  rail(request).cursor.state = RailCursor::State::kExhausted;
  return dropped_amount;
}

size_t NicQueue::post() noexcept {
  if (num_staged_ == 0) return 0;
  const auto now = platform::Clock::now().time_since_epoch();
  const std::span<const provider::WorkRequest> staged(staged_.data(), num_staged_);
  // Counted before the post, so that no receiver of a write finds it uncounted.
  count(staged, 1);
  const size_t taken = domain_->post(staged);
  count(staged.subspan(taken), -1);
  if (taken == 0) return 0;
  counters_.last_post_ns.store(static_cast<uint64_t>(std::chrono::nanoseconds(now).count()),
                               std::memory_order_relaxed);
  in_flight_ += taken;
  num_staged_ -= taken;
  std::copy_n(staged_.begin() + static_cast<std::ptrdiff_t>(taken), num_staged_, staged_.begin());
  return taken;
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

void NicQueue::complete(Request& request) noexcept {
  Request::Rail& own = rail(request);
  --in_flight_;
  --request.in_flight_;
  --own.cursor.in_flight;
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
