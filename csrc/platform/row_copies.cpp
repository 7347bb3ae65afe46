#include "platform/row_copies.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "platform/cuda.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// Of a block, at least. Too small: copies take more multiprocessors than they can keep busy.
constexpr uint64_t kBytesPerBlock = 16 << 10, kRowsPerBlock = 16;

}  // namespace

LentCopies::Begun LentCopies::begun(const abi::CopyWords& words) noexcept {
  const auto read = [](const uint64_t& word) {
    // seq_cst: pairs with announce(); the target was closed before, seq_cst too.
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_seq_cst);
  };
  return {read(words.rows_begun), read(words.engine_begun)};
}

bool LentCopies::ended(const abi::CopyWords& words, const Begun& since) noexcept {
  const auto read = [](const uint64_t& word) {
    // acquire: pairs with the GPU's stores, which follow its copies.
    return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
  };
  const Begun now = begun(words);  // less than `since` where a batch was withdrawn
  const uint64_t rows = std::min(now.rows, since.rows), engine = std::min(now.engine, since.engine);
  return std::ranges::all_of(words.rows_done,
                             [&](const uint64_t& word) { return read(word) >= rows; }) &&
         read(words.engine_done) >= engine;
}

RowCopies::RowCopies(int device, const LentCopies& lent)
    : driver_(driver()),
      function_(lent.function),
      words_(*lent.words),
      words_on_device_(lent.on_device) {
  const auto check = [&](int error, const char* what) {
    if (error == 0) return;
    free();
    throw base::Error(Code::kTransport, base::concat(what, " for copies of rows on device ", device,
                                                     ": ", driver_error(error)));
  };
  void* memory = nullptr;
  constexpr size_t kBytes = sizeof(abi::RowCopy) * abi::kRowCopies;
  check(driver_.host_alloc(&memory, kBytes, kPortableAndMapped), "pinning memory");
  rows_ = static_cast<abi::RowCopy*>(memory);
  int least = 0, greatest = 0;
  check(driver_.priority_range(&least, &greatest), "asking for stream priorities");
  check(driver_.stream_create(&stream_, kNonBlockingStream, greatest), "making a stream");
  check(driver_.event_create(&event_, kEventWithoutTiming), "making an event");
}

RowCopies::~RowCopies() { free(); }

void RowCopies::free() noexcept {
  if (event_) driver_.event_destroy(event_);
  if (stream_) driver_.stream_destroy(stream_);
  if (rows_) driver_.host_free(rows_);
}

bool RowCopies::end(Deadline deadline) noexcept {
  if (driver_.event_record(event_, stream_) != 0) return true;  // it runs nothing any more
  while (driver_.event_query(event_) == kDriverNotReady) {
    if (Clock::now() > deadline) return false;
    sched_yield();
  }
  return true;
}

base::Status RowCopies::status() const noexcept {
  int error = driver_.event_query(event_);
  if (error == 0) error = driver_.event_record(event_, stream_);  // the next look finds it pending
  return error == 0 || error == kDriverNotReady ? base::Status{}
                                                : base::Status{Code::kTransport, error};
}

uint64_t RowCopies::num_done() const noexcept {
  uint64_t done = ~uint64_t{0};
  for (const uint64_t& word : words_.rows_done) done = std::min(done, load(word));
  return done;
}

// Rows of a batch that is not done may still be read.
bool RowCopies::full() const noexcept {
  constexpr uint64_t kMost = kMostBytes / abi::kRowBytes;
  const uint64_t done = num_done(), launched = num_launched_.load(std::memory_order_relaxed);
  const uint64_t first = done == launched ? num_launched_rows_ : first_row_[(done + 1) % kBatches];
  return launched - done == kBatches || num_rows_ - first + kMost > abi::kRowCopies;
}

void RowCopies::announce() noexcept {
  if (has_unlaunched()) return;  // announced with the first of them
  const uint64_t next = num_launched_.load(std::memory_order_relaxed) + 1;
  std::atomic_ref(words_.rows_begun).store(next, std::memory_order_seq_cst);
}

void RowCopies::withdraw() noexcept {
  if (has_unlaunched()) return;
  const uint64_t last = num_launched_.load(std::memory_order_relaxed);
  std::atomic_ref(words_.rows_begun).store(last, std::memory_order_release);
}

uint64_t RowCopies::add(std::byte* to, const std::byte* from, uint64_t bytes) noexcept {
  num_bytes_ += bytes;
  for (uint64_t at = 0; at < bytes; at += abi::kRowBytes)
    rows_[num_rows_++ % abi::kRowCopies] = {reinterpret_cast<uint64_t>(to + at),
                                            reinterpret_cast<uint64_t>(from + at),
                                            std::min(bytes - at, abi::kRowBytes), 0};
  return num_launched_.load(std::memory_order_relaxed) + 1;
}

base::Status RowCopies::launch() noexcept {
  const uint64_t batch = num_launched_.load(std::memory_order_relaxed) + 1;
  const abi::RowsParams params{.rows = reinterpret_cast<uint64_t>(rows_),
                               .words = words_on_device_,
                               .first = num_launched_rows_,
                               .count = num_rows_ - num_launched_rows_,
                               .batch = batch};
  const uint64_t wanted = std::max(num_bytes_ / kBytesPerBlock, params.count / kRowsPerBlock);
  const auto blocks = std::clamp<uint64_t>(wanted, 1, abi::kMaxRowBlocks);
  try {
    launch_kernel({.kernel = function_,
                   .num_blocks = static_cast<unsigned>(blocks),
                   .num_threads = abi::kRowThreads,
                   .shared_bytes = 0,
                   .stream = stream_},
                  &params);
  } catch (const base::Error& error) {
    return {error.code(), 0};
  }
  first_row_[batch % kBatches] = num_launched_rows_;
  num_launched_rows_ = num_rows_;
  num_bytes_ = 0;
  num_launched_.store(batch, std::memory_order_release);
  return {};
}

}  // namespace moe_p2p::platform
