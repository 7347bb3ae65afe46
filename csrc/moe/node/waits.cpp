#include "moe/node/waits.h"

#include <algorithm>
#include <thread>

#include "platform/interrupt.h"

namespace moe_p2p::moe {

using abi::Phase;
using base::Code;
using base::Error;

// --- failures ------------------------------------------------------------------------------------

void Waits::fail(Code code, const std::string& message) const {
  throw Error(code, base::concat("rank ", options_.rank, ": ", message));
}

void Waits::latch(const Error& error) {
  broken_ = error;
  for (int l = 0; l < memory_.num_local(); ++l) {
    if (masks_.grow() && l != memory_.local()) continue;  // they mask this rank: see gone()
    uint64_t none = 0;
    // release: pairs with the acquire in check_abort() of the neighbours.
    std::atomic_ref(memory_.head(l).abort)
        .compare_exchange_strong(none, 1 + static_cast<uint64_t>(options_.rank),
                                 std::memory_order_release, std::memory_order_relaxed);
    platform::notify_all(memory_.bell(l));
  }
}

std::string Waits::failure_text(const Exchange::Failure& failure) const {
  const int rank = rank_of(failure.node, memory_.local());
  const std::string name = base::concat("rank ", rank, " (node ", failure.node, ")");
  const std::string step = base::concat(phase_name(failure.phase), " of step ", failure.step);
  switch (failure.kind) {
    case Exchange::Failure::Kind::kLeft: return base::concat(silent(rank), " without ", step);
    case Exchange::Failure::Kind::kProbe:
      return base::concat(name, " is gone, without ", step,
                          ": a probe failed: ", base::describe(failure.status),
                          engine_.first_failure());
    case Exchange::Failure::Kind::kFlush: return engine_.gpu_flush_failure();
    case Exchange::Failure::Kind::kWrite: break;
  }
  return base::concat("the write of ", step, " to ", name,
                      " failed: ", base::describe(failure.status), engine_.first_failure());
}

bool Waits::aborted() const noexcept {
  return std::atomic_ref(memory_.head(memory_.local()).abort).load(std::memory_order_acquire) != 0;
}

void Waits::check_abort(const Text& text) const {
  const uint64_t word =
      std::atomic_ref(memory_.head(memory_.local()).abort).load(std::memory_order_acquire);
  if (word == 0) return;
  const auto failure = exchange_->failure();
  if (failure.node >= 0) fail(failure.status.code, base::concat(failure_text(failure), text()));
  fail(Code::kAborted,
       base::concat("rank ", word - 1, " of this node gave up; see its error", text()));
}

std::string Waits::gone(int local) const {
  const auto rank = rank_of(memory_.node(), local);
  if (std::atomic_ref(memory_.head(local).closed).load(std::memory_order_acquire) != 0)
    return base::concat("rank ", rank, " has closed its communicator");
  if (masks_.grow() &&
      std::atomic_ref(memory_.head(local).abort).load(std::memory_order_acquire) != 0)
    return base::concat("rank ", rank, " gave up; see its error");
  return memory_.alive(local) ? "" : base::concat("rank ", rank, "'s process has ended");
}

std::vector<int> Waits::ended() const {
  std::vector<int> ranks;
  for (int local = 0; local < plan_.shape.ranks_per_node; ++local) {
    // Looked at first: who closes ends afterwards.
    const bool alive = memory_.alive(local);
    const auto closed = std::atomic_ref(memory_.head(local).closed);
    if (!alive && closed.load(std::memory_order_acquire) == 0)
      ranks.push_back(rank_of(memory_.node(), local));
  }
  return ranks;
}

std::string Waits::silent(int source) const {
  const int node = source / plan_.shape.ranks_per_node;
  const int local = source % plan_.shape.ranks_per_node;
  // acquire: pairs with Exchange::publish_left().
  const auto left = node == memory_.node()
                        ? Left::kNo
                        : Left{memory_.left(local, node).load(std::memory_order_acquire)};
  if (left == Left::kNo) return gone(local);
  return base::concat("rank ", source, " (node ", node, ") ",
                      left == Left::kInOrder
                          ? "has closed its communicator"
                          : "gave up and closed its communicator; see its error");
}

void Waits::check_neighbours(const Arrived& arrived, const Text& text) const {
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    if (arrived(source)) continue;
    const std::string why = silent(source);
    if (why.empty()) continue;
    if (arrived(source)) continue;  // it arrived before the end
    if (!masks_.grow()) fail(Code::kPeerDead, base::concat(why, "; ", text()));
    MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", options_.rank, ": rank ", source,
                " is masked: ", why);
    masks_.add(source);
  }
}

// T (2 - 1/n) for n ranks that are missing, masked or not. A rank that dies may have sent something
// to some ranks only. The others wait for it, and the ranks that have it soon wait for these others
// and for the dead one, or have masked it. So a rank that misses fewer masks first, and arrives at
// the others in time. Absent ranks do not count: a rank that is still in the epoch before, which
// lacked a newcomer, would have the patience of those that wait for it in this one.
std::chrono::milliseconds Waits::patience(const Arrived& arrived) const {
  int missing = 0;
  for (int source = 0; source < plan_.shape.world_size; ++source)
    missing += !masks_.is_absent(source) && (!arrived(source) || masks_.has(source));
  return options_.timeout + options_.timeout * (std::max(missing, 1) - 1) / std::max(missing, 1);
}

void Waits::probe(const Arrived& arrived) const {
  for (int node = 0; node < plan_.shape.num_nodes(); ++node)
    if (node != memory_.node() && !arrived(rank_of(node, memory_.local()))) exchange_->probe(node);
}

bool Waits::mask_missing(const Arrived& arrived, const Text& text) const {
  if (!masks_.grow() || !arrived(options_.rank)) return false;
  bool masked = false;
  MOE_P2P_LOG(base::LogLevel::kWarning, "rank ", options_.rank, ": masks ranks after ",
              options_.timeout.count(), " ms: ", text());
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    if (arrived(source)) continue;
    masks_.add(source);
    masked = true;
  }
  return masked;
}

std::string Waits::missing(const Arrived& arrived,
                           const std::function<std::string(int node)>& progress) const {
  std::string text;
  for (int source = 0; source < plan_.shape.world_size; ++source) {
    if (arrived(source)) continue;
    const int node = source / plan_.shape.ranks_per_node;
    text += base::concat(" rank ", source, " (node ", node);
    if (node != memory_.node() && source % plan_.shape.ranks_per_node == memory_.local())
      text += base::concat(", ", progress(node));
    text += ")";
  }
  return text;
}

std::string Waits::progress(const Pending& pending, int node) const {
  return base::concat(exchange_->immediates(pending.phase, pending.step.slot, node),
                      " immediates came");
}

std::string Waits::waiting_for(const Pending& pending, const Arrived& arrived) const {
  return base::concat(phase_name(pending.phase), " of step ", pending.step.index, " waits for",
                      missing(arrived, [&](int node) { return progress(pending, node); }));
}

// --- kernels -------------------------------------------------------------------------------------

std::vector<int> Waits::behind(const Progress& progress, uint64_t step,
                               std::chrono::milliseconds waited,
                               const std::vector<int64_t>& masked) const {
  std::vector<int> ranks = ranks_behind(plan_.shape, memory_, progress.count, step);
  std::erase_if(ranks,
                [&](int rank) { return masks_.has(rank) || std::ranges::count(masked, rank) > 0; });
  if (waited.count() == 0 || ranks.empty()) return ranks;
  std::string late;
  for (const int rank : ranks) {
    Counters::add(counters_.sources[static_cast<size_t>(rank)].straggles, 1);
    late += base::concat(late.empty() ? "" : ", ", rank_on(hosts_, rank));
  }
  MOE_P2P_LOG(base::LogLevel::kWarning, rank_on(hosts_, options_.rank), " has waited ",
              waited.count(), " ms, of at most ", options_.timeout.count(), ", for ", late,
              ": a kernel of step ", step, " has begun here, and not there");
  return ranks;
}

// --- waiting -------------------------------------------------------------------------------------

void Waits::wait(const std::function<bool()>& ready, const Arrived& arrived,
                 const Text& text) const {
  WaitWatch watch(counters_, options_.rank, hosts_, options_.timeout, arrived, text);
  auto began = platform::Clock::now();
  auto deadline = began + options_.timeout;
  while (!wait_until(deadline, ready, arrived, text, watch)) {
    if (masks_.grow() && began + patience(arrived) > deadline) {
      deadline = began + patience(arrived);
    } else if (mask_missing(arrived, text)) {
      Counters::add(counters_.deadlines, 1);
      began = platform::Clock::now();
      deadline = began + options_.timeout;
    } else {
      Counters::add(counters_.deadlines, 1);
      fail(Code::kTimeout,
           base::concat("timed out after ", options_.timeout.count(), " ms: ", text()));
    }
  }
  watch.done([this](int source) { return masks_.has(source); });
}

// Nobody rings for it.
void Waits::wait_for_caller(const std::function<bool()>& ready, const Text& text) const {
  const auto deadline = platform::Clock::now() + options_.timeout;
  while (!ready()) {
    check_abort([&] { return "; " + text(); });
    if (platform::interrupted()) fail(Code::kAborted, "interrupted by a signal; " + text());
    if (platform::Clock::now() >= deadline)
      fail(Code::kTimeout,
           base::concat("timed out after ", options_.timeout.count(), " ms: ", text()));
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

bool Waits::wait_until(platform::Deadline deadline, const std::function<bool()>& ready,
                       const Arrived& arrived, const Text& text, WaitWatch& watch) const {
  platform::Waiter waiter(memory_.bell(memory_.local()), policy_, deadline);
  auto next_look = platform::Clock::now() + kLookAtNeighbours;
  auto next_probe = platform::Clock::now() + Exchange::kProbeInterval;
  for (;;) {
    waiter.prepare();
    const auto now = platform::Clock::now();
    if (ready()) {
      watch.found(now);
      return true;
    }
    check_abort([&] { return "; " + text(); });
    watch.look(now);
    if (now >= next_look) {
      check_neighbours(arrived, text);
      if (platform::interrupted())
        fail(Code::kAborted, base::concat("interrupted by a signal; ", text()));
      next_look = now + kLookAtNeighbours;
    }
    if (now >= next_probe) {
      probe(arrived);
      next_probe = now + Exchange::kProbeInterval;
    }
    if (!waiter.pause()) return false;
  }
}

}  // namespace moe_p2p::moe
