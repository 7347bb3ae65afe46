#include "provider/libfabric/domain.h"

#include <mutex>
#include <utility>
#include <vector>

#include "base/log.h"
#include "provider/libfabric/fence.h"
#include "provider/libfabric/selection.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_libfabric_domain(const DomainOptions& options) {
  return std::make_unique<libfabric::LibfabricDomain>(options);
}

namespace libfabric {

using base::Code;
using platform::Clock;

namespace {

// How long a control call waits for writes in flight: unregister_memory() for writes that read the
// memory, the destructor for all. Too small: writes to a slow peer are lost. Too large: closing
// takes this long when a peer is dead.
constexpr auto kDrain = std::chrono::milliseconds(500);
// Polls after memory was given back, for writes that a software provider has received in part.
constexpr int kSettlePolls = 64;
constexpr size_t kCompletions = 64;
// How long end_half_writes() waits for an answer. Too small: a peer that lives, but is slow, keeps
// memory registered. Too large: so long it takes where a peer was stopped.
constexpr auto kAnswer = std::chrono::milliseconds(1000);
// Until libfabric takes the question: after that there is no connection. The second one is of peers
// that had none the last time. Too small: one that is just made is overlooked. Too large: memory
// comes back late from peers that have left.
constexpr auto kConnected = std::chrono::milliseconds(50),
               kConnectedAgain = std::chrono::milliseconds(2);

void warn_of_software(const Config& config) {
  static std::once_flag once;
  std::call_once(once, [&] {
    MOE_P2P_LOG(base::LogLevel::kWarning, "libfabric: provider=", config.provider,
                " was asked for. This is not RDMA: the CPU copies every byte; use provider=efa or "
                "transport verbs where there are NICs for it");
  });
}

}  // namespace

LibfabricDomain::LibfabricDomain(const DomainOptions& options)
    : config_(parse_config(options.settings)),
      sleeps_(options.waker != nullptr),
      session_(open_session(config_, options.nic)),
      name_(base::concat("libfabric NIC ", options.nic, " (", config_.provider, ", ",
                         describe(*session_.info), ")")),
      regions_(session_, name_),
      peers_(session_, name_),
      writes_(session_, config_, regions_, peers_, ready_) {
  if (config_.is_software()) warn_of_software(config_);
  ready_.reserve(config_.max_in_flight);
  const MemoryKey scratch = regions_.add({scratch_.data(), scratch_.size()});
  Address address = peers_.own_address();
  address.scratch_addr = scratch.remote_addr;
  address.scratch_key = scratch.remote_key;
  address_ = address.serialize(config_.provider);
  if (ends_connections(config_, *session_.info)) own_writer_ = writer_name(address.name);
  if (own_writer_ != 0) writers_.open();
}

// Still sends accepted writes and acknowledges received ones.
LibfabricDomain::~LibfabricDomain() {
  try {
    int quiet = 0;
    poll_until(Clock::now() + kDrain, [&] {
      return writes_.num_posted() == 0 && writes_.may_close_endpoint() && ++quiet > kSettlePolls;
    });
  } catch (const std::exception& error) {
    MOE_P2P_LOG(base::LogLevel::kWarning, name_, ": closing: ", error.what());
  }
  if (writes_.may_close_endpoint()) return;
  static auto& kept = *new std::vector<Session>;  // until the process ends: fence.h says why
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(session_));
  MOE_P2P_LOG(base::LogLevel::kWarning, name_,
              ": closing: a peer has not answered a read: libfabric keeps what this NIC had open");
}

DomainLimits LibfabricDomain::limits() const noexcept {
  const size_t most = session_.info->ep_attr->max_msg_size;
  return {.max_write_bytes = static_cast<uint32_t>(std::min<size_t>(config_.max_write_bytes, most)),
          .max_in_flight = config_.max_in_flight};
}

PeerId LibfabricDomain::connect(std::span<const std::byte> address) {
  Address parsed = Address::parse(address, config_.provider);
  peers_.check_software(parsed);
  const Gate::Control inside(gate_);
  const PeerId peer = peers_.connect(std::move(parsed));
  end_connections();
  return peer;
}

void LibfabricDomain::announce(PeerId peer, uint64_t remote_key) {
  if (own_writer_ == 0) return;
  const Gate::Control inside(gate_);
  writes_.announce(peers_.at(peer), Writers::announcement(own_writer_, remote_key));
}

void LibfabricDomain::disconnect(PeerId peer) {
  const Gate::Control inside(gate_);
  Peer& leaving = peers_.at(peer);
  ready_.reserve(ready_.size() + config_.max_in_flight);
  writes_.fail(leaving, {Code::kClosed, 0});
  writes_.refill();
  const auto probe = probed_.find(writer_name(leaving.address.name));
  const uint32_t users = peers_.num_at(leaving.address.name);
  if (probe != probed_.end() && users == 2) {  // it would keep the connection
    leaving_.push_back({probe->second, Clock::now()});
    probed_.erase(probe);
  } else if (users == 1 && !writes_.may_end_connection(leaving, false)) {
    leaving_.push_back({peers_.connect(leaving.address), Clock::now()});
  }
  peers_.disconnect(peer);
  end_connections();
}

size_t LibfabricDomain::num_addresses() const {
  const Gate::Control inside(gate_);
  return peers_.num_addresses();
}

void LibfabricDomain::end_connections() {
  const auto now = Clock::now();
  std::erase_if(leaving_, [&](const Leaving& leaving) {
    const Peer& peer = peers_.at(leaving.id);
    const bool is_last = peers_.num_at(peer.address.name) == 1;
    if (is_last && !writes_.may_end_connection(peer, now - leaving.since >= kConnected))
      return false;
    peers_.disconnect(leaving.id);
    return true;
  });
}

MemoryKey LibfabricDomain::register_memory(const MemorySpan& span) {
  const std::lock_guard lock(registering_);
  if (!session_.registers_beside_traffic()) {
    const Gate::Control inside(gate_);
    return regions_.add(span);
  }
  Owned<MemoryRegion> mr = regions_.open(span);
  const Gate::Control inside(gate_);
  return regions_.add(span, std::move(mr));
}

void LibfabricDomain::unregister_memory(const MemoryKey& key) {
  if (!is_closed(key)) close_memory(key);
  if (!config_.is_software()) return;
  int polls = 0;
  poll_until(Clock::now() + kDrain, [&] { return ++polls > kSettlePolls; });
  if (own_writer_ == 0) return;
  end_half_writes(key.remote_key);
  const Gate::Control inside(gate_);
  regions_.find(key.local_key)->closed = false;
}

bool LibfabricDomain::is_closed(const MemoryKey& key) {
  const Gate::Control inside(gate_);
  const Region* region = regions_.find(key.local_key);
  return region && region->closed;
}

void LibfabricDomain::close_memory(const MemoryKey& key) {
  poll_until(Clock::now() + kDrain, [&] {
    Region& region = regions_.at(key);
    region.leaving = true;
    return region.num_writes + region.num_reads == 0;
  });
  const std::lock_guard lock(registering_);
  Owned<MemoryRegion> mr;
  const Gate::Control inside(gate_);
  Region& region = regions_.at(key);
  // A software provider would still copy an answer there, whether or not the region is closed.
  const uint32_t num_reads = config_.is_software() ? region.num_reads : 0;
  MOE_P2P_CHECK(num_reads == 0, Code::kTimeout, name_, ": ", num_reads,
                " reads into the memory to unregister are not answered after ", kDrain.count(),
                " ms, and their peers may still answer: it stays registered, and must not be "
                "freed before this NIC is closed");
  ready_.reserve(ready_.size() + config_.max_in_flight);
  writes_.fail(region, {Code::kClosed, 0});
  writes_.refill();
  mr = regions_.remove(key);
  region.closed = own_writer_ != 0;
  if (!session_.registers_beside_traffic()) mr.reset();
}

// A peer that answers a write has sent what it had begun before: connections are in order. Nothing
// is under way from one that cannot be connected to. One call at a time: an answer to an earlier
// question says less.
void LibfabricDomain::end_half_writes(uint64_t remote_key) {
  const std::lock_guard lock(ending_);
  std::vector<WriterName> asked;
  {
    const Gate::Control inside(gate_);
    MOE_P2P_CHECK(!writers_.full(), Code::kResourceExhausted, name_,
                  ": too many peers write to too many regions here: who may still write to memory "
                  "that was given back is not known");
    asked = writers_.take(remote_key);
    for (const WriterName writer : asked) {
      const auto [known, added] = probed_.try_emplace(writer);
      if (added) known->second = peers_.connect({endpoint_name(writer), 0, kScratchKey});
      peers_.at(known->second).probe = Peer::Probe::kNone;
    }
  }
  const auto begin = Clock::now();
  poll_until(begin + kAnswer, [&] {
    std::erase_if(asked, [&](WriterName writer) { return is_quiet(writer, begin); });
    return asked.empty();
  });
  const Gate::Control inside(gate_);
  if (asked.empty()) return forget_gone_writers();
  for (const WriterName writer : asked) writers_.note(Writers::announcement(writer, remote_key));
  throw base::Error(
      Code::kTimeout,
      base::concat(name_, ": ", asked.size(),
                   " peers that may have sent half a write to the memory to unregister "
                   "do not answer within ",
                   kAnswer.count(),
                   " ms: they may send the rest, so it must not be freed before they "
                   "answer or have ended, or this NIC is closed"));
}

void LibfabricDomain::forget_gone_writers() {
  std::erase_if(probed_, [&](const auto& probed) {
    const Peer& peer = peers_.at(probed.second);
    if (peers_.num_at(peer.address.name) > 1 || writes_.is_connected(peer)) return false;
    leaving_.push_back({peer.id, Clock::now()});
    return true;
  });
  std::erase_if(down_, [&](WriterName writer) { return !writers_.knows(writer); });
  end_connections();
}

bool LibfabricDomain::is_quiet(WriterName writer, Clock::time_point since) {
  const auto probed = probed_.find(writer);
  if (probed == probed_.end()) return true;  // disconnected, which ended its connection
  Peer& peer = peers_.at(probed->second);
  if (writes_.probe(peer)) {
    down_.erase(writer);
    return true;
  }
  if (peer.probe == Peer::Probe::kPosted) return false;
  const auto patience = down_.contains(writer) ? kConnectedAgain : kConnected;
  if (Clock::now() - since < patience || writes_.has_posted_to(peer.address.name)) return false;
  down_.insert(writer);
  leaving_.push_back({peer.id, since});
  probed_.erase(probed);
  return true;
}

std::string LibfabricDomain::why_no_fence() const {
  return libfabric::why_no_fence(config_, *session_.info);
}

std::string LibfabricDomain::failure() const {
  const Gate::Control inside(gate_);
  const auto& first = writes_.first_failure();
  return first ? base::concat(name_, ": ", libfabric::describe(*first)) : "";
}

template <typename Ready>
bool LibfabricDomain::poll_until(platform::Deadline deadline, Ready&& ready) {
  std::array<Completion, kCompletions> completions;
  while (Clock::now() <= deadline) {
    {
      const Gate::Control inside(gate_);
      if (ready()) return true;
      writes_.pump();
      const size_t count = read_queue(completions);
      ready_.reserve(ready_.size() + count + config_.max_in_flight);
      ready_.insert(ready_.end(), completions.begin(),
                    completions.begin() + static_cast<std::ptrdiff_t>(count));
    }
    sched_yield();
  }
  return false;
}

}  // namespace libfabric
}  // namespace moe_p2p::provider
