#include "provider/verbs/drain.h"

#include <algorithm>
#include <utility>

#include "provider/verbs/queue_pair.h"

namespace moe_p2p::provider::verbs {
namespace {

using platform::Clock;

// How long to wait for the event of the last receive; not every driver raises it (rxe of Linux 6.1
// does not). Too short: a late completion of a slow NIC is lost.
constexpr std::chrono::milliseconds kLastReceive{500};
constexpr size_t kMaxEntries = 4096;

}  // namespace

void Drain::add(Owned<Qp> qp, bool has_ended, uint64_t tag) {
  break_qp(nic_, *qp);
  const auto ready_at = has_ended ? Clock::now() : Clock::now() + kLastReceive;
  entries_.push_back({.qp = std::move(qp), .ready_at = ready_at, .tag = tag});
}

void Drain::last_receive(const void* qp) noexcept {
  for (Entry& entry : entries_)
    if (entry.qp.get() == qp) entry.ready_at = Clock::now();
}

void Drain::look() {
  if (entries_.empty()) return;
  // acquire: pairs with the release in VerbsDomain::drained.
  const uint64_t done = changes_.drain_done.load(std::memory_order_acquire);
  std::erase_if(entries_, [&](const Entry& entry) {
    if (entry.ticket == 0 || entry.ticket > done) return false;
    reset_qp(nic_, *entry.qp);
    return true;
  });
  uint64_t ticket = 0;
  for (Entry& entry : entries_) {
    if (entry.ticket != 0 || entry.ready_at > Clock::now()) continue;
    // release: pairs with the acquire in VerbsDomain::take_changes.
    if (ticket == 0) ticket = 1 + changes_.drain_wanted.fetch_add(1, std::memory_order_release);
    entry.ticket = ticket;
  }
  if (ticket != 0) changes_.announce();
}

bool Drain::holds(uint64_t tag) const noexcept {
  return std::ranges::any_of(entries_, [&](const Entry& entry) { return entry.tag == tag; });
}

bool Drain::full() const noexcept { return entries_.size() >= kMaxEntries; }

}  // namespace moe_p2p::provider::verbs
