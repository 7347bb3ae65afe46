#include "platform/cuda_copy.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

constexpr int kRelaxedCapture = 2;  // as in cuda.h

constexpr auto kCloseTimeout = std::chrono::seconds(10);
// Longer copies are faster by the copy engines than by the kernel, which has one multiprocessor.
// Too large: long copies delay the short ones they should overlap with.
constexpr uint64_t kMostByKernel = 128 << 10;
// How often the driver is asked whether a device that copies by kernel has failed.
constexpr uint32_t kLooksUntilQuery = 4096;

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

CopyQueue::CopyQueue(int device, uint64_t copy_kernel)
    : driver_(driver()), device_(device), context_(device) {
  try {
    open(copy_kernel);
  } catch (...) {
    close();
    throw;
  }
}

CopyQueue::~CopyQueue() {
  const auto deadline = Clock::now() + kCloseTimeout;
  bool copies = false;
  if (kernel_) {
    const ControlGuard guard(context_);
    while ((copies = kernel_->busy()) && Clock::now() < deadline) sched_yield();
    // drain() must not wait for copies that nothing does any more.
    num_taken_over_.store(kernel_->num_posted(), std::memory_order_release);
  }
  if (copies || !drain(deadline)) {
    MOE_P2P_LOG(base::LogLevel::kError, "device ", device_,
                " still copies to memory of peers although its NIC is closed");
    if (copies) static_cast<void>(kernel_.release());  // the running kernel still uses its ring
  }
  close();
}

void CopyQueue::open(uint64_t copy_kernel) {
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
    check(driver_.event_create(&copies_.emplace_back().event, kEventWithoutTiming),
          "making an event");
  if (copy_kernel != 0) kernel_ = std::make_unique<CopyKernel>(device_, copy_kernel);
}

void CopyQueue::close() noexcept {
  const ControlGuard guard(context_);
  kernel_.reset();
  if (drain_event_) driver_.event_destroy(drain_event_);
  for (const Copy& copy : copies_)
    if (copy.event) driver_.event_destroy(copy.event);
  if (stream_) driver_.stream_destroy(stream_);
}

bool CopyQueue::drain(Deadline deadline) noexcept {
  const std::lock_guard lock(drain_mutex_);
  const ControlGuard guard(context_);
  const uint64_t num_posted = kernel_ ? kernel_->num_posted() : 0;
  while (kernel_ && num_settled() < num_posted && kernel_->status().ok()) {
    if (Clock::now() > deadline) return false;
    sched_yield();
  }
  if (driver_.event_record(drain_event_, stream_) != 0) return true;
  while (driver_.event_query(drain_event_) == kDriverNotReady) {
    if (Clock::now() > deadline) return false;
    sched_yield();
  }
  return true;
}

uint64_t CopyQueue::num_settled() const noexcept {
  return std::max(kernel_->num_done(), num_taken_over_.load(std::memory_order_acquire));
}

// Does its work once per thread, as long as the thread polls for one device.
void CopyQueue::enter() const noexcept {
  static thread_local const void* current = nullptr;
  if (current == context_.get()) return;
  if (driver_.context_set(context_.get()) != 0) return;  // the next call reports the error
  int mode = kRelaxedCapture;
  driver_.capture_mode(&mode);
  current = context_.get();
}

CopyQueue::Started CopyQueue::copy(std::byte* to, const std::byte* from, uint64_t bytes,
                                   bool on_device) noexcept {
  if (!status_.ok()) return {status_, 0};
  enter();
  Copy& copy = copies_[num_started_ % kCapacity];
  copy = {.to = to, .from = from, .bytes = bytes, .on_device = on_device, .event = copy.event};
  if (!on_device || !ask_kernel(copy))
    if (const base::Status status = ask_engines(copy); !status.ok()) return {status, 0};
  return {{}, ++num_started_};
}

// False when the engines must carry the copy, as they do until the kernel is on the device.
bool CopyQueue::ask_kernel(Copy& copy) noexcept {
  if (!kernel_ || copy.bytes > kMostByKernel) return false;
  take_over();
  if (!kernel_started_) {
    kernel_started_ = kernel_->start().ok();  // else the next copy tries again
    return false;
  }
  if (!kernel_->takes()) return false;
  copy.by_kernel = true;
  copy.number = kernel_->post(copy.to, copy.from, copy.bytes);
  return true;
}

base::Status CopyQueue::ask_engines(Copy& copy) noexcept {
  copy.by_kernel = false;
  const auto start = copy.on_device ? driver_.copy_async : driver_.copy_any_async;
  int error = start(reinterpret_cast<uint64_t>(copy.to), reinterpret_cast<uint64_t>(copy.from),
                    copy.bytes, stream_);
  if (error != 0) return {Code::kTransport, error};
  error = driver_.event_record(copy.event, stream_);
  if (error != 0) status_ = {Code::kTransport, error};  // it runs, without an event for its end
  return status_;
}

// Gives the engines what an exited kernel did not do: copies posted while it exited.
void CopyQueue::take_over() noexcept {
  if (!kernel_started_ || !kernel_->left()) return;
  const uint64_t num_done = kernel_->num_done();  // final, because it has exited
  for (uint64_t i = num_done_; i != num_started_ && status_.ok(); ++i) {
    Copy& copy = copies_[i % kCapacity];
    if (!copy.by_kernel || copy.number < num_done) continue;
    if (const base::Status status = ask_engines(copy); !status.ok()) status_ = status;
  }
  num_taken_over_.store(kernel_->num_posted(), std::memory_order_release);
  kernel_started_ = false;
}

bool CopyQueue::done(const Copy& copy) noexcept {
  if (copy.by_kernel) {
    if (copy.number < kernel_->num_done()) return true;
    if (++num_looks_ % kLooksUntilQuery == 0) status_ = kernel_->status();
    return false;
  }
  const int error = driver_.event_query(copy.event);
  if (error != 0 && error != kDriverNotReady) status_ = {Code::kTransport, error};
  return error == 0;
}

void CopyQueue::poll() noexcept {
  if (num_done_ == num_started_ || !status_.ok()) return;
  enter();
  if (kernel_) take_over();
  while (num_done_ != num_started_ && done(copies_[num_done_ % kCapacity])) ++num_done_;
}

}  // namespace moe_p2p::platform
