#include "platform/copy_kernel.h"

#include <new>
#include <utility>

#include "base/log.h"
#include "platform/cuda.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

// Too small: every pause of a program is followed by copies that wait for the driver. Too large: a
// wait for the whole device also waits this long for this kernel.
constexpr uint64_t kIdleNs = 1'000'000;

}  // namespace

CopyKernel::CopyKernel(int device, uint64_t function) : driver_(driver()), function_(function) {
  const auto check = [&](int error, const char* what) {
    if (error == 0) return;
    free();
    throw base::Error(Code::kTransport, base::concat(what, " for a copy kernel on device ", device,
                                                     ": ", driver_error(error)));
  };
  void* memory = nullptr;
  check(driver_.host_alloc(&memory, sizeof(abi::CopyRing), kPortableAndMapped), "pinning memory");
  ring_ = new (memory) abi::CopyRing{};
  int least = 0, greatest = 0;
  check(driver_.priority_range(&least, &greatest), "asking for stream priorities");
  check(driver_.stream_create(&stream_, kNonBlockingStream, greatest), "making a stream");
  check(driver_.event_create(&event_, kEventWithoutTiming), "making an event");
}

CopyKernel::~CopyKernel() { free(); }

void CopyKernel::free() noexcept {
  if (event_) driver_.event_destroy(event_);
  if (stream_) driver_.stream_destroy(stream_);
  if (ring_) driver_.host_free(ring_);
}

base::Status CopyKernel::start() noexcept {
  ++num_launches_;
  const abi::CopyParams params{.ring = reinterpret_cast<uint64_t>(ring_),
                               .first = num_posted_.load(std::memory_order_relaxed),
                               .launch = num_launches_,
                               .idle_ns = kIdleNs};
  try {
    launch_kernel({.kernel = function_,
                   .num_blocks = 1,
                   .num_threads = abi::kCopyThreads,
                   .shared_bytes = abi::kCopySharedBytes,
                   .stream = stream_},
                  &params);
  } catch (const base::Error& error) {
    return {error.code(), 0};
  }
  const int error = driver_.event_record(event_, stream_);
  return error == 0 ? base::Status{} : base::Status{Code::kTransport, error};
}

uint64_t CopyKernel::post(std::byte* to, const std::byte* from, uint64_t bytes) noexcept {
  const uint64_t number = num_posted_.load(std::memory_order_relaxed);
  const auto request = abi::CopyRequest::make(reinterpret_cast<uint64_t>(to),
                                              reinterpret_cast<uint64_t>(from), bytes, number);
  abi::CopyRequest& place = ring_->request[number % abi::kCopyRequests];
  for (auto [word, value] : {std::pair{&place.to, request.to},
                             {&place.from, request.from},
                             {&place.bytes, request.bytes}})
    std::atomic_ref(*word).store(value, std::memory_order_relaxed);
  // release: pairs with the acquire in kernels/copy.cu; the source was complete before post().
  std::atomic_ref(place.check).store(request.check, std::memory_order_release);
  num_posted_.store(number + 1, std::memory_order_release);
  return number;
}

base::Status CopyKernel::status() const noexcept {
  const int error = driver_.event_query(event_);
  return error == 0 || error == kDriverNotReady ? base::Status{}
                                                : base::Status{Code::kTransport, error};
}

}  // namespace moe_p2p::platform
