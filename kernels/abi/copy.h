// Requests of the host to the copy kernel (kernels/copy.cu), in pinned memory that both see.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::abi {

// Copy number n, counted from 0, is request n mod kCopyRequests. In a half-written request `check`
// does not fit.
struct CopyRequest {
  u64 to, from, bytes, check;

  MOE_P2P_HD static constexpr CopyRequest make(u64 to, u64 from, u64 bytes, u64 number) {
    constexpr u64 kOdd = 0x9e3779b97f4a7c15;
    const u64 mixed = ((to * kOdd + from) * kOdd + bytes) * kOdd + number + 1;
    return {to, from, bytes, mixed};
  }
  MOE_P2P_HD constexpr bool is(u64 number) const {
    return check == make(to, from, bytes, number).check;
  }
};
static_assert(sizeof(CopyRequest) == 32, "read by two lanes");

inline constexpr u64 kCopyRequests = 1024;
inline constexpr i32 kCopyThreads = 512, kCopySharedBytes = 128;

struct CopyRing {
  CopyRequest request[kCopyRequests];
  // Written by the kernel.
  u64 done;     // copies whose bytes have arrived
  u64 entered;  // the last launch that is on the device
  u64 left;     // the last launch that has ended
  u64 padding[13];
};
static_assert(sizeof(CopyRing) == 32 * kCopyRequests + kLine);

struct CopyParams {
  u64 ring;     // CopyRing, device address
  u64 first;    // the copy to begin with
  u64 launch;   // number of this launch, from 1
  u64 idle_ns;  // the kernel ends after this long without a request
};

}  // namespace moe_p2p::abi
