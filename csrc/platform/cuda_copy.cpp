#include "platform/cuda_copy.h"

#include <sched.h>

#include <chrono>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// As in cuda.h of CUDA 11.8 and later.
constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr int kRelaxedCapture = 2;

constexpr auto kCloseTimeout = std::chrono::seconds(10);

// Makes a context current on a control thread for a while and leaves no trace there.
class ControlGuard {
 public:
  explicit ControlGuard(const PrimaryContext& context) noexcept : current_(context) {
    driver().capture_mode(&mode_);
  }
  ~ControlGuard() { driver().capture_mode(&mode_); }
  ControlGuard(const ControlGuard&) = delete;
  ControlGuard& operator=(const ControlGuard&) = delete;

 private:
  const ContextGuard current_;
  int mode_ = kRelaxedCapture;
};

}  // namespace

CopyQueue::CopyQueue(int device) : driver_(driver()), device_(device), context_(device) {
  try {
    open();
  } catch (...) {
    close();
    throw;
  }
}

CopyQueue::~CopyQueue() {
  if (!drain(Clock::now() + kCloseTimeout))
    MOE_P2P_LOG(base::LogLevel::kError, "device ", device_,
                " still copies to memory of peers although its NIC is closed");
  close();
}

void CopyQueue::open() {
  const auto check = [this](int error, const char* what) {
    MOE_P2P_CHECK(error == 0, Code::kTransport, what, " for copies on device ", device_, ": ",
                  driver_error(error));
  };
  const ControlGuard guard(context_);
  int least = 0, greatest = 0;
  check(driver_.priority_range(&least, &greatest), "asking for stream priorities");
  check(driver_.stream_create(&stream_, kNonBlockingStream, greatest), "making a stream");
  check(driver_.event_create(&drain_event_, kEventWithoutTiming), "making an event");
  for (uint32_t i = 0; i < kCapacity; ++i)
    check(driver_.event_create(&events_.emplace_back(nullptr), kEventWithoutTiming),
          "making an event");
}

void CopyQueue::close() noexcept {
  const ControlGuard guard(context_);
  events_.push_back(drain_event_);
  for (void* event : events_)
    if (event) driver_.event_destroy(event);
  if (stream_) driver_.stream_destroy(stream_);
}

bool CopyQueue::drain(Deadline deadline) noexcept {
  const std::lock_guard lock(drain_mutex_);
  const ControlGuard guard(context_);
  if (driver_.event_record(drain_event_, stream_) != 0) return true;
  while (driver_.event_query(drain_event_) == kDriverNotReady) {
    if (Clock::now() > deadline) return false;
    sched_yield();
  }
  return true;
}

// Once per thread, as long as it polls for one device.
void CopyQueue::enter() const noexcept {
  static thread_local const void* current = nullptr;
  if (current == context_.get()) return;
  if (driver_.context_set(context_.get()) != 0) return;  // the call that follows says what is wrong
  int mode = kRelaxedCapture;
  driver_.capture_mode(&mode);
  current = context_.get();
}

CopyQueue::Started CopyQueue::copy(std::byte* to, const std::byte* from, uint64_t bytes) noexcept {
  if (!status_.ok()) return {status_, 0};
  enter();
  int error = driver_.copy_async(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from),
                                 bytes, stream_);
  if (error != 0) return {{Code::kTransport, error}, 0};
  error = driver_.event_record(events_[num_started_ % kCapacity], stream_);
  if (error != 0) {  // the copy runs, and nobody can say until when
    status_ = {Code::kTransport, error};
    return {status_, 0};
  }
  return {{}, ++num_started_};
}

void CopyQueue::poll() noexcept {
  if (num_done_ == num_started_ || !status_.ok()) return;
  enter();
  for (; num_done_ != num_started_; ++num_done_) {
    const int error = driver_.event_query(events_[num_done_ % kCapacity]);
    if (error == kDriverNotReady) return;
    if (error != 0) {
      status_ = {Code::kTransport, error};
      return;
    }
  }
}

}  // namespace moe_p2p::platform
