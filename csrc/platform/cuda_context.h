// Which GPU the driver's calls of a thread use. CUDA's runtime makes a context current by itself,
// the driver does not: a thread that has not called torch yet has no context, or another device's.
#pragma once

#include "platform/cuda_driver.h"

namespace moe_p2p::platform {

// The device's context, which torch and this package share; held open.
class PrimaryContext {
 public:
  // Throws Error{kUnavailable} without a driver, Error{kTransport} with its text when it refuses.
  explicit PrimaryContext(int device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  void* get() const noexcept { return context_; }

 private:
  int handle_ = 0;  // the driver's name of the device
  void* context_ = nullptr;
};

// Held for good.
const PrimaryContext& context_of(int device);

// Makes the context current in the calling thread; the destructor restores the previous one.
class ContextGuard {
 public:
  explicit ContextGuard(const PrimaryContext& context) noexcept
      : error_(driver().context_push(context.get())) {}
  ~ContextGuard() {
    void* context = nullptr;
    if (error_ == 0) driver().context_pop(&context);
  }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

  // A CUresult. If it is ignored, the driver's next call fails with it.
  int error() const noexcept { return error_; }

 private:
  const int error_;
};

// The calling thread's capture mode becomes relaxed, for good: while another thread captures a CUDA
// graph, calls of ours that the driver counts as unsafe would otherwise fail and break the capture.
void relax_captures() noexcept;

// A context that is current, and relaxed captures, for a while: for control threads, which may be
// the user's. Allocations, mappings and event queries are unsafe in this sense.
class ControlGuard {
 public:
  explicit ControlGuard(const PrimaryContext& context) noexcept;
  ~ControlGuard();
  ControlGuard(const ControlGuard&) = delete;
  ControlGuard& operator=(const ControlGuard&) = delete;

 private:
  const ContextGuard current_;
  int mode_;
};

}  // namespace moe_p2p::platform
