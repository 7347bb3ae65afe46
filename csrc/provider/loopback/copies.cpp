#include "provider/loopback/copies.h"

#include <algorithm>
#include <chrono>

#include "base/log.h"
#include "provider/loopback/peers.h"

namespace moe_p2p::provider::loopback {

using base::Code;
using platform::CopyQueue;

namespace {

constexpr auto kDrainTimeout = std::chrono::seconds(10);

}  // namespace

Copies::Copies(const Config& config, int nic, abi::CopyWords& words)
    : early_imm_(config.early_imm),
      copy_kernel_(config.copy_kernel),
      lent_{.function = config.row_kernel, .words = &words},
      chaos_(config.seed, static_cast<uint64_t>(nic) << 8 | 8) {
  waiting_.reserve(CopyQueue::kCapacity);
}

Copies::~Copies() = default;

void Copies::open(int device) {
  const std::lock_guard lock(mutex_);
  if (!queue_) queue_ = std::make_unique<CopyQueue>(device, copy_kernel_, lent_);
  MOE_P2P_CHECK(queue_->device() == device, Code::kInvalidArgument,
                "a loopback NIC serves one GPU: ", "memory of device ", device,
                " cannot join memory of device ", queue_->device());
}

bool Copies::copies_lent() {
  const std::lock_guard lock(mutex_);
  return queue_ && queue_->copies_lent();
}

void Copies::drain() {
  const std::lock_guard lock(mutex_);
  if (!queue_) return;
  const auto deadline = platform::Clock::now() + kDrainTimeout;
  MOE_P2P_CHECK(queue_->drain(deadline), Code::kTimeout, "copies of device ", queue_->device(),
                " are not done after ", kDrainTimeout.count(),
                " s; the memory may still be in use");
}

void Copies::settle() noexcept {
  const std::lock_guard lock(mutex_);
  if (queue_ && !queue_->drain(platform::Clock::now() + kDrainTimeout))
    MOE_P2P_LOG(base::LogLevel::kError, "copies of device ", queue_->device(),
                " to rings are not done although their NIC is closed");
}

CopyQueue::Started Copies::start_by_ring(std::byte* to, const std::byte* from,
                                         uint64_t bytes) noexcept {
  return queue_->copy(to, from, bytes, /*on_device=*/false);
}

Copies::State Copies::state_of(uint64_t ticket) noexcept {
  if (!queue_->done(ticket)) queue_->poll();
  if (queue_->done(ticket)) return State::kDone;
  return queue_->status().ok() ? State::kUnderWay : State::kFailed;
}

bool Copies::full(const platform::LentBytes& lent) noexcept {
  if (queue_->full(lent)) queue_->poll();  // copies of forgotten connections may be done
  const uint32_t most = CopyQueue::kCapacity - (lent.bytes > 0 ? CopyQueue::kKept : 0);
  return queue_->full(lent) || waiting_.size() >= most;
}

base::Status Copies::start(Connection& connection, const Fragment& fragment, std::byte* to,
                           const std::byte* from) noexcept {
  return wait_for(connection, fragment, queue_->copy(to, from, fragment.bytes));
}

base::Status Copies::start_lent(Connection& connection, const Fragment& fragment, std::byte* to,
                                const std::byte* from, const platform::LentBytes& lent) noexcept {
  noted_ = true;
  return wait_for(connection, fragment, queue_->copy_lent(to, from, lent));
}

base::Status Copies::wait_for(Connection& connection, const Fragment& fragment,
                              const CopyQueue::Started& started) noexcept {
  if (!started.status.ok()) return started.status;
  waiting_.push_back({&connection, started.ticket, fragment});
  bytes_under_way_ += fragment.bytes;
  return {};
}

bool Copies::poll() noexcept {
  if (waiting_.empty()) return false;
  queue_->poll();
  return true;
}

Copies::Fate Copies::look_at(Waiting& waiting) noexcept {
  Connection& connection = *waiting.connection;
  if (connection.given_up(waiting.fragment.slot)) return Fate::kDropped;
  // mutate=early_imm, a deliberate fault: the fragment does not wait for its payload.
  if (!early_imm_ && !queue_->done(waiting.ticket)) {
    if (queue_->status().ok()) return Fate::kWaits;
    connection.give_up(waiting.fragment.slot, queue_->status());
    return Fate::kDropped;
  }
  if (chaos_.on() && chaos_.one_in(4)) return Fate::kWaits;
  return connection.publish_copied(waiting.fragment) ? Fate::kLeft : Fate::kWaits;
}

bool Copies::fills_memory_for(const Connection& connection) const noexcept {
  return std::ranges::any_of(waiting_, [&](const Waiting& waiting) {
    return waiting.connection == &connection && waiting.fragment.flags & Fragment::kRead &&
           !queue_->done(waiting.ticket) && queue_->status().ok();
  });
}

void Copies::forget(const Connection& connection) noexcept {
  std::erase_if(waiting_, [&](const Waiting& waiting) {
    if (waiting.connection != &connection) return false;
    bytes_under_way_ -= waiting.fragment.bytes;
    return true;
  });
}

}  // namespace moe_p2p::provider::loopback
