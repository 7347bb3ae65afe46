#include "platform/cuda_copy.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "base/log.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// As in cuda.h: stream_write() is there.
constexpr int kWritesWordsOf64Bits = 122;

// Registered with the driver: words of one NIC have a page of their own.
constexpr size_t kWordsPage = 4096;

constexpr auto kCloseTimeout = std::chrono::seconds(10);
// Longer copies are faster by the copy engines than by the kernel, which has one multiprocessor.
// Too large: long copies delay the short ones they should overlap with.
constexpr uint64_t kMostByKernel = 128 << 10;
// How often the driver is asked whether a device that copies by kernel has failed.
constexpr uint32_t kLooksUntilQuery = 4096;

}  // namespace

CopyQueue::CopyQueue(int device, uint64_t copy_kernel, const LentCopies& lent)
    : driver_(driver()), device_(device), context_(device) {
  try {
    open(copy_kernel, lent);
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
  if (rows_) {
    const ControlGuard guard(context_);
    if (!rows_->end(deadline)) static_cast<void>(rows_.release());  // its kernel reads its rows
  }
  if (copies || !drain(deadline)) {
    MOE_P2P_LOG(base::LogLevel::kError, "device ", device_,
                " still copies to memory of peers although its NIC is closed");
    if (copies) static_cast<void>(kernel_.release());  // the running kernel still uses its ring
  }
  close();
}

void CopyQueue::open(uint64_t copy_kernel, const LentCopies& lent) {
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
  if (lent.words != nullptr) open_lent(lent);
}

// Without it such copies go through the ring, so what the driver does not offer is no failure.
void CopyQueue::open_lent(LentCopies lent) {
  if (const std::string why = share_words(lent); !why.empty()) {
    MOE_P2P_LOG(base::LogLevel::kInfo, "device ", device_,
                " writes to memory that peers lend through the host, which is slower: ", why);
    return;
  }
  engine_done_ = lent.on_device + offsetof(abi::CopyWords, engine_done);
  if (lent.function != 0) rows_ = std::make_unique<RowCopies>(device_, lent);
}

// Lets the device see the words. Returns why it cannot; empty: it does.
std::string CopyQueue::share_words(LentCopies& lent) {
  if (!driver_.stream_write || !driver_.host_register || !driver_.host_unregister ||
      !driver_.host_pointer)
    return "the CUDA driver is too old";
  int handle = 0, writes = 0;
  driver_.device_get(&handle, device_);
  driver_.device_attribute(&writes, kWritesWordsOf64Bits, handle);
  if (writes == 0) return "its streams do not write words of 64 bits";
  int error = driver_.host_register(lent.words, kWordsPage, kPortableAndMapped);
  if (error != 0) return "registering a page that it shares with them: " + driver_error(error);
  words_ = lent.words;
  error = driver_.host_pointer(&lent.on_device, lent.words, 0);
  if (error == 0) return {};
  driver_.host_unregister(std::exchange(words_, nullptr));
  return "looking up a page that it shares with them: " + driver_error(error);
}

void CopyQueue::close() noexcept {
  const ControlGuard guard(context_);
  kernel_.reset();
  rows_.reset();
  if (words_) driver_.host_unregister(words_);
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
  const uint64_t num_batches = rows_ ? rows_->num_launched() : 0;
  while (rows_ && rows_->num_done() < num_batches && rows_->status().ok()) {
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
  relax_captures();
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
  copy.by = Copy::By::kKernel;
  copy.number = kernel_->post(copy.to, copy.from, copy.bytes);
  return true;
}

base::Status CopyQueue::ask_engines(Copy& copy) noexcept {
  copy.by = Copy::By::kEngine;
  const auto start = copy.on_device ? driver_.copy_async : driver_.copy_any_async;
  int error = start(reinterpret_cast<uint64_t>(copy.to), reinterpret_cast<uint64_t>(copy.from),
                    copy.bytes, stream_);
  if (error != 0) return {Code::kTransport, error};
  error = driver_.event_record(copy.event, stream_);
  if (error != 0) status_ = {Code::kTransport, error};  // it runs, without an event for its end
  return status_;
}

void CopyQueue::announce(const LentBytes& lent) noexcept {
  if (by_rows(lent)) return rows_->announce();
  // seq_cst: pairs with LentCopies::begun(); the owner's word is read after this.
  std::atomic_ref(words_->engine_begun).store(num_lent_by_engine_ + 1, std::memory_order_seq_cst);
}

void CopyQueue::withdraw(const LentBytes& lent) noexcept {
  if (by_rows(lent)) return rows_->withdraw();
  std::atomic_ref(words_->engine_begun).store(num_lent_by_engine_, std::memory_order_release);
}

CopyQueue::Started CopyQueue::copy_lent(std::byte* to, const std::byte* from,
                                        const LentBytes& lent) noexcept {
  if (!status_.ok()) return withdraw(lent), Started{status_, 0};
  enter();
  Copy& copy = copies_[num_started_ % kCapacity];
  copy = {.to = to, .from = from, .bytes = lent.bytes, .event = copy.event};
  if (by_rows(lent)) {
    copy.by = Copy::By::kRows;
    copy.number = rows_->add(to, from, lent.bytes);
    ++num_rows_under_way_;
    return {{}, ++num_started_};
  }
  int error = driver_.copy_async(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from),
                                 lent.bytes, stream_);
  if (error != 0) return withdraw(lent), Started{{Code::kTransport, error}, 0};
  copy.by = Copy::By::kLentByEngine;
  copy.number = ++num_lent_by_engine_;
  error = driver_.stream_write(stream_, engine_done_, num_lent_by_engine_, 0);
  if (error != 0) status_ = {Code::kTransport, error};  // it runs, and nothing says when it ends
  return {status_, error == 0 ? ++num_started_ : 0};
}

void CopyQueue::launch() noexcept {
  if (!rows_ || !rows_->has_unlaunched()) return;
  if (const base::Status status = rows_->launch(); !status.ok()) status_ = status;
}

// Gives the engines what an exited kernel did not do: copies posted while it exited.
void CopyQueue::take_over() noexcept {
  if (!kernel_started_ || !kernel_->left()) return;
  const uint64_t num_done = kernel_->num_done();  // final, because it has exited
  for (uint64_t i = num_done_; i != num_started_ && status_.ok(); ++i) {
    Copy& copy = copies_[i % kCapacity];
    if (copy.by != Copy::By::kKernel || copy.number < num_done) continue;
    if (const base::Status status = ask_engines(copy); !status.ok()) status_ = status;
  }
  num_taken_over_.store(kernel_->num_posted(), std::memory_order_release);
  kernel_started_ = false;
}

bool CopyQueue::done(const Copy& copy) noexcept {
  if (copy.by == Copy::By::kRows) {
    if (copy.number <= rows_->num_done()) return true;
    if (++num_looks_ % kLooksUntilQuery == 0) status_ = rows_->status();
    return false;
  }
  if (copy.by == Copy::By::kKernel) {
    if (copy.number < kernel_->num_done()) return true;
    if (++num_looks_ % kLooksUntilQuery == 0) status_ = kernel_->status();
    return false;
  }
  if (copy.by == Copy::By::kLentByEngine) {
    // acquire: pairs with the GPU's store, which follows its copy.
    if (std::atomic_ref(words_->engine_done).load(std::memory_order_acquire) >= copy.number)
      return true;
    if (++num_looks_ % kLooksUntilQuery == 0) look_for_failure(copy);
    return false;
  }
  const int error = driver_.event_query(copy.event);
  if (error != 0 && error != kDriverNotReady) status_ = {Code::kTransport, error};
  return error == 0;
}

// An event that is reached says nothing of a device that has failed since.
void CopyQueue::look_for_failure(const Copy& copy) noexcept {
  int error = driver_.event_query(copy.event);
  if (error == 0) error = driver_.event_record(copy.event, stream_);
  if (error != 0 && error != kDriverNotReady) status_ = {Code::kTransport, error};
}

void CopyQueue::poll() noexcept {
  if (num_done_ == num_started_ || !status_.ok()) return;
  enter();
  if (kernel_) take_over();
  // Of each of the two the first that is not done; those behind it are not either.
  bool rows_wait = num_rows_under_way_ == 0, others_wait = false;
  for (uint64_t i = num_done_; i != num_started_ && !(rows_wait && others_wait); ++i) {
    Copy& copy = copies_[i % kCapacity];
    const bool by_rows = copy.by == Copy::By::kRows;
    bool& waits = by_rows ? rows_wait : others_wait;
    if (copy.is_done || waits) continue;
    copy.is_done = done(copy);
    waits = !copy.is_done;
    if (by_rows && copy.is_done) --num_rows_under_way_;
  }
  while (num_done_ != num_started_ && copies_[num_done_ % kCapacity].is_done) ++num_done_;
}

}  // namespace moe_p2p::platform
