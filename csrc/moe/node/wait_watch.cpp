#include "moe/node/wait_watch.h"

#include "base/log.h"

namespace moe_p2p::moe {

using platform::Clock;

std::string rank_on(const std::vector<std::string>& hosts, int rank) {
  const auto index = static_cast<size_t>(rank);
  if (index >= hosts.size() || hosts[index].empty()) return base::concat("rank ", rank);
  return base::concat("rank ", rank, " on ", hosts[index]);
}

WaitWatch::WaitWatch(Counters& counters, int rank, const std::vector<std::string>& hosts,
                     std::chrono::milliseconds timeout, const Arrived& arrived, const Text& text)
    : counters_(counters),
      rank_(rank),
      hosts_(hosts),
      timeout_(timeout),
      arrived_(arrived),
      text_(text),
      began_(Clock::now()),
      charged_(began_),
      looked_at_(began_) {}

// One rank at a time, so that the sum over ranks is the time that was waited. Ranks that came while
// an earlier one was missing cost nothing.
void WaitWatch::charge(Clock::time_point now) {
  if (source_ == counters_.sources.size()) return;
  const auto passed = std::chrono::nanoseconds(now - charged_).count();
  Counters::add(counters_.sources[source_].wait_ns, static_cast<uint64_t>(passed));
  charged_ = now;
}

void WaitWatch::look(Clock::time_point now) {
  looks_ = true;
  looked_at_ = now;
  while (source_ < counters_.sources.size() && arrived_(static_cast<int>(source_))) {
    charge(now);
    ++source_;
  }
  if (!late_ && now >= began_ + straggles_after(timeout_)) name(now);
}

void WaitWatch::name(Clock::time_point now) {
  late_ = true;
  const auto world_size = static_cast<int>(counters_.sources.size());
  for (int source = static_cast<int>(source_); source < world_size; ++source)
    if (!arrived_(source)) named_.push_back(source);
  if (named_.empty()) return;  // this rank waits for itself
  std::string late;
  for (const int source : named_) {
    Counters::add(counters_.sources[static_cast<size_t>(source)].straggles, 1);
    late += base::concat(late.empty() ? "" : ", ", described(source));
  }
  awaited_ = text_();
  MOE_P2P_LOG(base::LogLevel::kWarning, described(rank_), " has waited ", ms_since_begin(now),
              " ms, of at most ", timeout_.count(), ", for ", late, ": ", awaited_);
}

void WaitWatch::done(const std::function<bool(int source)>& masked) {
  if (named_.empty()) return;
  std::string came, left_out;
  for (const int source : named_) {
    std::string& list = masked(source) ? left_out : came;
    list += base::concat(list.empty() ? "" : ", ", described(source));
  }
  MOE_P2P_LOG(base::LogLevel::kWarning, described(rank_), " goes on after ",
              ms_since_begin(Clock::now()), " ms: ", came, came.empty() ? "" : " came",
              came.empty() || left_out.empty() ? "" : "; ", left_out,
              left_out.empty() ? "" : " masked", " (", awaited_, ")");
}

int64_t WaitWatch::ms_since_begin(Clock::time_point now) const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(now - began_).count();
}

}  // namespace moe_p2p::moe
