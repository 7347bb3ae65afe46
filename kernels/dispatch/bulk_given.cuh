// Dispatch on few multiprocessors: own tokens that the receiving half reads in the caller's memory,
// without a slot in between.
#pragma once

#include "kernels/device/bulk.cuh"
#include "kernels/dispatch/token.cuh"

namespace moe_p2p::device::bulk {

inline constexpr i32 kRowBytes = kHidden * static_cast<i32>(item_bytes(kXType));  // of x
inline constexpr i32 kPayloadBytes = kPayloadVecs * static_cast<i32>(sizeof(Vec));

// True when a token can be bulk-copied unchanged: no quantization, no gather, scale rows 16-byte
// aligned.
__device__ __forceinline__ bool is_copied(const DispatchParams& p) {
  return !kQuantize && num_extras(p) == 0 && (p.scales.address | p.parts.bytes[1]) % 16 == 0;
}
// True when a slot for the own rank is its head alone: the receiving half of the same kernel reads
// the rest from x and the scales, which nobody writes meanwhile.
__device__ __forceinline__ bool own_stays(const DispatchParams& p) {
  return kOwnStays && p.grid.num_send_blocks > 0 && p.grid.num_recv_blocks > 0 && is_copied(p);
}

// Where payload and scales of a token lie.
struct GivenRow {
  const char* payload;
  const char* scales;

  __device__ static GivenRow of(const DispatchParams& p, u32 token) {
    return {p.x.as<const char>() + static_cast<u64>(token) * kRowBytes,
            p.scales.as<const char>() + token * p.parts.bytes[1]};
  }
};

// Asks for both, into what lies behind the head of a slot. Called by one thread, which has made the
// barrier expect given_bytes(p).
__device__ __forceinline__ u32 given_bytes(const DispatchParams& p) {
  return kRowBytes + static_cast<u32>(p.parts.bytes[1]);
}
__device__ __forceinline__ void load_given(const DispatchParams& p, const GivenRow& row,
                                           char* payload, u64* full) {
  bulk_load(payload, row.payload, kRowBytes, full);
  if (const auto bytes = static_cast<u32>(p.parts.bytes[1]))
    bulk_load(payload + (p.parts.offset[1] - kHeadBytes), row.scales, bytes, full);
}

}  // namespace moe_p2p::device::bulk
