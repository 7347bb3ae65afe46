#include "provider/loopback/domain.h"

#include <functional>

#include "base/letter.h"
#include "base/log.h"

namespace moe_p2p::provider {

std::unique_ptr<Domain> make_loopback_domain(const DomainOptions& options) {
  return std::make_unique<loopback::LoopbackDomain>(options);
}

namespace loopback {

using base::Code;

namespace {

constexpr uint32_t kAddressTag = 0x31504f4c;

// Any number that differs between NICs; it makes other NICs' keys invalid here.
uint32_t key_owner(const std::string& segment_name) {
  return static_cast<uint32_t>(std::hash<std::string>{}(segment_name));
}

}  // namespace

LoopbackDomain::LoopbackDomain(const DomainOptions& options)
    : config_(parse_config(options.settings)),
      nic_(options.nic),
      waker_(options.waker),
      waker_name_(options.waker_name),
      segment_(Segment::create(config_)),
      regions_(key_owner(segment_->name()), config_.offset_addressing),
      copies_(config_, nic_),
      receiver_(config_, nic_, *segment_, regions_, copies_),
      sender_(config_, nic_, regions_, copies_) {
  MOE_P2P_CHECK(waker_name_.size() < kMaxName, Code::kInvalidArgument, describe(), ": waker name ",
                waker_name_, " is longer than ", kMaxName - 1, " characters");
}

// Waits for copies before the members give the peers' rings back: a GPU may still write to them.
LoopbackDomain::~LoopbackDomain() {
  segment_->close();
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

PeerId LoopbackDomain::connect(std::span<const std::byte> address) {
  base::WireReader reader(address, "loopback address");
  base::expect_letter(reader, kAddressTag, Code::kInvalidArgument,
                      describe() + ": the address to connect to");
  const std::string segment_name = reader.get_string();
  const std::string peer_waker = reader.get_string();
  reader.expect_end();
  auto segment = Segment::open(segment_name);
  MOE_P2P_CHECK(!segment->closed(), Code::kPeerDead, describe(), ": the NIC behind ", segment_name,
                " was closed");
  return sender_.connect(std::move(segment), peer_waker, segment_->name(), waker_name_);
}

void LoopbackDomain::disconnect(PeerId peer) {
  sender_.request_close(peer);
  if (waker_) platform::notify_all(*waker_);  // the polling thread carries it out
}

MemoryKey LoopbackDomain::register_memory(const MemorySpan& span) {
  MOE_P2P_CHECK(span.data != nullptr && span.bytes > 0, Code::kInvalidArgument, describe(),
                ": registering ", span.bytes, " bytes at ", static_cast<const void*>(span.data));
  if (span.kind == MemoryKind::kCuda) copies_.open(span.device);
  return regions_.add(span);
}

void LoopbackDomain::unregister_memory(const MemoryKey& key) {
  if (regions_.remove(key) == MemoryKind::kCuda) copies_.drain();
}

void LoopbackDomain::map_remote(uint64_t remote_key, const MemorySpan& local) {
  if (local.bytes == 0) {
    if (regions_.unmap(remote_key)) copies_.drain();
    return;
  }
  MOE_P2P_CHECK(local.kind == MemoryKind::kCuda && local.data != nullptr, Code::kInvalidArgument,
                describe(), ": memory of a peer must be GPU memory that is mapped here");
  copies_.open(local.device);
  regions_.map(remote_key, local);
}

void LoopbackDomain::kill() noexcept {
  segment_->close();
  dead_.store(true, std::memory_order_release);
}

void LoopbackDomain::fail_write(uint64_t nth) noexcept { sender_.fail_write(nth); }

std::string LoopbackDomain::describe() const {
  return config_.seed == 0 ? base::concat("loopback NIC ", nic_)
                           : base::concat("loopback NIC ", nic_, " (seed=", config_.seed, ")");
}

}  // namespace loopback
}  // namespace moe_p2p::provider
