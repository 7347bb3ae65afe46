// A token as both halves of dispatch see it: its types, its layout in a slot, and how a worker
// carries it.
#pragma once

#include "kernels/device/quantize.cuh"
#include "kernels/device/self_flag.cuh"
#include "kernels/device/steps.cuh"
#include "kernels/device/worker.cuh"

namespace moe_p2p::device {

inline constexpr DType kXType = static_cast<DType>(MOE_P2P_X_DTYPE);  // as the caller gives it
inline constexpr bool kQuantize = MOE_P2P_QUANTIZE;
// x is the caller's bytes, which may be any words: they do not flag themselves.
inline constexpr bool kOpaqueX = MOE_P2P_OPAQUE_X;
inline constexpr ScaleFormat kScaleFormat = static_cast<ScaleFormat>(MOE_P2P_SCALE_FORMAT);
static_assert(kQuantize || kScaleFormat == ScaleFormat::kFloat32, "given scales are left alone");
inline constexpr RowLayout kLayout = static_cast<RowLayout>(MOE_P2P_LAYOUT);  // LayoutFacts::kernel
inline constexpr DType kWireType = kQuantize ? DType::kFloat8E4M3 : kXType;
inline constexpr bool kScaled = kWireType == DType::kFloat8E4M3;  // there may be scales

// --- what a call asks for; of plain kernels none does ---
__device__ __forceinline__ i32 num_extras(const DispatchParams& p) {
  return kPlain ? 0 : p.num_extras;
}
__device__ __forceinline__ bool is_opaque(const DispatchParams& p) { return !kPlain && p.opaque; }
__device__ __forceinline__ bool is_solo(const DispatchParams& p) { return !kPlain && p.solo; }
__device__ __forceinline__ bool is_timed(const DispatchParams& p) {
  return !kPlain && p.wait_ticks;
}

__device__ __forceinline__ u32 wire_flags(const DispatchParams& p) {
  return dispatch_flags(kWireType, kLayout, p.max_tokens) |
         (is_opaque(p) ? static_cast<u32>(kOpaque) : 0);
}
inline constexpr i32 kPayloadVecs = static_cast<i32>(kHidden * item_bytes(kWireType) / sizeof(Vec));
inline constexpr i32 kHeadBytes = static_cast<i32>(slot_head_bytes(kTopk));
inline constexpr i32 kHeadWords = kHeadBytes / 4;
#if MOE_P2P_BULK
inline constexpr i32 kImageBytes = MOE_P2P_IMAGE_BYTES;  // the host sends no larger slots
#endif
inline constexpr i32 kCountsPerRank = counts_per_rank(kMaxLocalExperts);

// A payload passes through the registers of a worker in kPieces rounds of kVecs vectors per thread.
template <typename W>
struct Rounds {
  static constexpr i32 kAll = (kPayloadVecs + W::kThreads - 1) / W::kThreads;
  static constexpr i32 kPieces = (kAll + 7) / 8;
  static constexpr i32 kVecs = (kAll + kPieces - 1) / kPieces;

  __device__ __forceinline__ static i32 at(const W& worker, i32 piece, i32 i) {
    return (piece * kVecs + i) * W::kThreads + worker.thread;
  }
};

template <typename W>
__device__ inline void copy_words(const W& worker, char* to, const char* from, u64 bytes) {
#pragma unroll 1
  for (u64 i = static_cast<u64>(worker.thread) * 4; i < bytes; i += W::kThreads * 4)
    *values_at<u32>(to, i) = *values_at<u32>(from, i);
}

}  // namespace moe_p2p::device
