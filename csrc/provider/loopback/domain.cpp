#include "provider/loopback/domain.h"

#include <sys/uio.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "base/letter.h"
#include "base/log.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_loopback_domain(const DomainOptions& options) {
  return std::make_unique<loopback::LoopbackDomain>(options,
                                                    loopback::parse_config(options.settings));
}

namespace loopback {

using base::Code;

namespace {

// A copy that a peer has begun is over within milliseconds, unless the peer was stopped while it
// asked its driver for it.
constexpr std::chrono::milliseconds kLentTimeout{250};

// Between two looks whether the polling thread has severed what it was asked to.
constexpr std::chrono::microseconds kSeverPause{100};

constexpr uint32_t kAddressTag = 0x31504f4c;

// Any number that differs between NICs; it makes other NICs' keys invalid here.
uint32_t key_owner(const std::string& segment_name) {
  return static_cast<uint32_t>(std::hash<std::string>{}(segment_name));
}

// By a system call, which fails where a load would end the process.
bool is_readable(const std::byte* data) {
  std::byte byte{};
  const iovec to{&byte, 1}, from{const_cast<std::byte*>(data), 1};
  return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == 1;
}

}  // namespace

LoopbackDomain::LoopbackDomain(const DomainOptions& options, const Config& config, const char* name)
    : name_(name),
      config_(config),
      nic_(options.nic),
      waker_(options.waker),
      waker_name_(options.waker_name),
      segment_(Segment::create(config_)),
      regions_(key_owner(segment_->name()), config_.offset_addressing, &segment_->header()),
      copies_(config_, nic_, segment_->header().copies),
      receiver_(config_, nic_, *segment_, regions_, copies_, time_),
      sender_(config_, nic_, regions_, copies_, time_) {
  MOE_P2P_CHECK(waker_name_.size() < kMaxName, Code::kInvalidArgument, describe(), ": waker name ",
                waker_name_, " is longer than ", kMaxName - 1, " characters");
}

// Waits for copies before the members give the peers' rings back: a GPU may still write to them.
LoopbackDomain::~LoopbackDomain() {
  segment_->close();
  regions_.close();
  if (!segment_->await_lent_copies(platform::Clock::now() + kLentTimeout))
    MOE_P2P_LOG(base::LogLevel::kError, describe(),
                ": peers still copy to its memory although it is closed");
  copies_.settle();
}

DomainLimits LoopbackDomain::limits() const noexcept {
  return {.max_write_bytes = config_.max_write_bytes, .max_in_flight = config_.max_in_flight};
}

base::Bytes LoopbackDomain::address() const {
  base::WireWriter writer;
  base::put_letter(writer, kAddressTag);
  writer.put_string(segment_->name());
  writer.put_string(waker_name_);
  return writer.take();
}

PeerId LoopbackDomain::connect_for(std::span<const std::byte> address, int priority, uint64_t tag) {
  MOE_P2P_CHECK(!receiver_.is_severed(tag), Code::kClosed, describe(),
                ": connections of this tag were severed");
  base::WireReader reader(address, "loopback address");
  base::expect_letter(reader, kAddressTag, Code::kInvalidArgument,
                      describe() + ": the address to connect to");
  const std::string segment_name = reader.get_string();
  const std::string peer_waker = reader.get_string();
  reader.expect_end();
  auto segment = Segment::open(segment_name);
  MOE_P2P_CHECK(!segment->closed(), Code::kPeerDead, describe(), ": the NIC behind ", segment_name,
                " was closed");
  return sender_.connect(std::move(segment), peer_waker, segment_->name(), waker_name_, priority,
                         tag);
}

bool LoopbackDomain::sever(uint64_t tag, platform::Deadline deadline) {
  const uint64_t ticket = receiver_.sever(tag);
  // acquire: pairs with kill(), after which nothing is received.
  while (!receiver_.has_severed(ticket) && !dead_.load(std::memory_order_acquire)) {
    if (platform::Clock::now() >= deadline) return false;
    if (waker_) platform::notify_all(*waker_);
    std::this_thread::sleep_for(kSeverPause);
  }
  return true;
}

void LoopbackDomain::disconnect(PeerId peer) {
  sender_.request_close(peer);
  if (waker_) platform::notify_all(*waker_);  // the polling thread carries it out
}

MemoryKey LoopbackDomain::register_memory(const MemorySpan& span) {
  MOE_P2P_CHECK(span.data != nullptr && span.bytes > 0, Code::kInvalidArgument, describe(),
                ": registering ", span.bytes, " bytes at ", static_cast<const void*>(span.data));
  MOE_P2P_CHECK(!config_.ordered || span.kind == MemoryKind::kHost || is_readable(span.data),
                Code::kUnavailable, describe(),
                ": ordered=1 is for memory that a CPU can store to, ", "and that of GPU ",
                span.device, " is not");
  if (span.kind == MemoryKind::kCuda) copies_.open(span.device);
  return regions_.add(span);
}

void LoopbackDomain::unregister_memory(const MemoryKey& key) {
  const std::lock_guard lock(leaving_mutex_);
  if (std::erase(leaving_, key.local_key) == 0 && regions_.remove(key) != MemoryKind::kCuda) return;
  leaving_.push_back(key.local_key);  // where this throws it is called again
  MOE_P2P_CHECK(
      segment_->await_lent_copies(platform::Clock::now() + kLentTimeout), Code::kTimeout,
      describe(), ": a peer on this host, which is alive, has begun a copy to this memory ",
      "and not ended it within ", kLentTimeout.count(), " ms; the memory may still be overwritten");
  copies_.drain();
  leaving_.pop_back();
}

void LoopbackDomain::map_remote(uint64_t remote_key, const MemorySpan& local, bool lent) {
  if (local.bytes == 0) {
    const std::lock_guard lock(leaving_mutex_);
    if (!regions_.unmap(remote_key) && std::erase(closing_, remote_key) == 0) return;
    closing_.push_back(remote_key);  // where this throws it is called again
    copies_.drain();
    closing_.pop_back();
    return;
  }
  const bool on_gpu = local.kind == MemoryKind::kCuda;
  MOE_P2P_CHECK((on_gpu || config_.in_place) && local.data != nullptr, Code::kInvalidArgument,
                describe(), ": memory of a peer must be GPU memory that is mapped here");
  if (on_gpu) copies_.open(local.device);
  if (lent && !copies_.copies_lent()) return;  // its writes go through the ring
  regions_.map(remote_key, local, lent);
}

void LoopbackDomain::kill() noexcept {
  segment_->close();
  dead_.store(true, std::memory_order_release);
}

void LoopbackDomain::fail_write(uint64_t nth) noexcept { sender_.fail_write(nth); }

std::string LoopbackDomain::describe() const {
  return config_.seed == 0 ? base::concat(name_, " NIC ", nic_)
                           : base::concat(name_, " NIC ", nic_, " (seed=", config_.seed, ")");
}

}  // namespace loopback
}  // namespace moe_p2p::provider
