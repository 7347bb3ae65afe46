// Partial sums that travel as 10-bit integers with a bf16 scale for each 32 values: the format is
// in kernels/abi/shape.h and docs/protocol.md, section 10. A warp packs and unpacks a unit of 256
// values, 8 in each thread. No word of a row is ever 0, so in short steps rows flag themselves as
// they are, without a complement (device/self_flag.cuh).
#pragma once

#include "kernels/combine/sum.cuh"

namespace moe_p2p::device {

inline constexpr i32 kUnits = static_cast<i32>(int10_units(kHidden));
inline constexpr u64 kPackedBytes = row_bytes(DType::kInt10, kHidden);
inline constexpr u64 kNearBytes = kNearPacked ? kPackedBytes : kSentBytes;
inline constexpr u64 kFarBytes = kFarPacked ? kPackedBytes : kSentBytes;
inline constexpr i32 kRestWords = 16, kTailWords = 20;  // of a unit: rest, and with the scales

// Stride in bytes of the partial sums that go from node to node.
__device__ __forceinline__ u64 far_stride(const CombineParams& p) {
  if constexpr (kFarPacked == kNearPacked) return p.stride;
  return align_up(kPackedBytes + (p.with_scalars ? 4 * kTopk : 0), kLine);
}

// --- words of a group ---

struct PackedGroup {
  Pair codes;  // the lowest 64 bits
  u32 tail;    // of the first kTailWords threads of a warp: a word of the unit's other two planes
};

__device__ __forceinline__ char* codes_at(char* row, i32 group) {
  return row + group * static_cast<i32>(sizeof(Pair));
}
__device__ __forceinline__ char* tail_at(char* row, i32 group) {
  const i32 unit = group / 32, lane = group % 32;
  constexpr i32 kRest = kUnits * static_cast<i32>(kInt10UnitCodes);
  constexpr i32 kScalePlane = kRest + kUnits * static_cast<i32>(kInt10UnitRest);
  return row + (lane < kRestWords ? kRest + unit * static_cast<i32>(kInt10UnitRest) + lane * 4
                                  : kScalePlane + unit * static_cast<i32>(kInt10UnitScales) +
                                        (lane - kRestWords) * 4);
}
// Groups are dealt to threads in order, so a unit's are a warp's.
__device__ __forceinline__ i32 lane_of_unit() { return static_cast<i32>(threadIdx.x) % 32; }
__device__ __forceinline__ bool has_tail(i32 group) { return group % 32 < kTailWords; }

__device__ __forceinline__ void store_packed(char* row, i32 group, const PackedGroup& packed,
                                             bool flag) {
  if (kSelfFlagged && flag) {
    st_relaxed_sys_v2(codes_at(row, group), packed.codes);
    if (has_tail(group)) st_relaxed_sys_u32(values_at<u32>(tail_at(row, group)), packed.tail);
  } else {
    st_na_v2(codes_at(row, group), packed.codes);
    if (has_tail(group)) st_na_u32(tail_at(row, group), packed.tail);
  }
}

// Packs 8 values of each thread. Called by all threads of a warp.
__device__ __forceinline__ PackedGroup pack(const float* values) {
  const i32 lane = lane_of_unit();
  float most = 0.0f;
#pragma unroll
  for (i32 j = 0; j < kInt10Group; ++j) most = max_nan_f32(most, fabsf(values[j]));
#pragma unroll
  for (i32 distance = 1; distance < kInt10Block / kInt10Group; distance *= 2)
    most = max_nan_f32(most, __shfl_xor_sync(~0u, most, distance));
  const u32 least = (__float_as_uint(__fmul_rn(most, kInt10Step)) + 0xffff) & 0xffff0000;
  const bool finite = most < __uint_as_float(kInfinity);
  const u32 scale = finite ? max(least, kInt10LeastScale) : kInt10NanScale;
  const float multiplier = __frcp_rn(__uint_as_float(scale));
  const u32 filled = finite ? 0 : kInt10Zero;  // a NaN may have any bits, a code is not 0
  u32 code[kInt10Group];
#pragma unroll
  for (i32 j = 0; j < kInt10Group; ++j)
    code[j] =
        (__float_as_uint(__fadd_rn(__fmul_rn(values[j], multiplier), kInt10Magic)) & kInt10Mask) |
        filled;
  PackedGroup packed;
  packed.codes.word[0] = code[0] | code[1] << 10 | code[2] << 20 | code[3] << 30;
  packed.codes.word[1] = code[3] >> 2 | code[4] << 8 | code[5] << 18 | code[6] << 28;
  // Two halves of what the others store for this thread: the rest of its codes, and the scale.
  const u32 mine = code[6] >> 4 | code[7] << 6 | scale;
  const bool is_rest = lane < kRestWords;
  const i32 first = is_rest ? 2 * lane : 8 * (lane - kRestWords);
  const u32 low = __shfl_sync(~0u, mine, first & 31);
  const u32 high = __shfl_sync(~0u, mine, (first + (is_rest ? 1 : 4)) & 31);
  packed.tail = is_rest ? (low & 0xffff) | high << 16 : low >> 16 | (high & 0xffff0000);
  return packed;
}

// acc += the 8 values of each thread. Called by all threads of a warp. A word that did not arrive
// is 0, and makes NaN of its values.
__device__ __forceinline__ void add_packed(float* acc, const PackedGroup& packed) {
  const i32 lane = lane_of_unit();
  const u32 rest_word = __shfl_sync(~0u, packed.tail, lane / 2);
  const u32 scale_word = __shfl_sync(~0u, packed.tail, kRestWords + lane / 8);
  const u32 low = packed.codes.word[0], high = packed.codes.word[1];
  u32 bits = lane & 4 ? scale_word & 0xffff0000 : scale_word << 16;
  if (kSelfFlagged && (low == 0 || high == 0 || rest_word == 0 || scale_word == 0))
    bits = kInt10NanScale;
  const float scale = __uint_as_float(bits);
  const u32 rest = rest_word >> (lane & 1 ? 16 : 0);
  const u32 code[kInt10Group] = {low,
                                 low >> 10,
                                 low >> 20,
                                 low >> 30 | high << 2,
                                 high >> 8,
                                 high >> 18,
                                 high >> 28 | rest << 4,
                                 rest >> 6};
  constexpr u32 kExponent = 0x4b400000;  // of kInt10Magic, which has kInt10Zero below it
#pragma unroll
  for (i32 j = 0; j < kInt10Group; ++j) {
    const float number =
        __fadd_rn(__uint_as_float((code[j] & kInt10Mask) | kExponent), -kInt10Magic);
    acc[j] = __fadd_rn(acc[j], __fmul_rn(number, scale));  // the product is exact
  }
}

// --- rows ---

// Stores a sum at `to`, packed. Called by whole warps.
template <bool kRounded>  // to kOutType before
struct StorePacked {
  static constexpr i32 kEnd = kPackedGroups;
  char* to;
  bool flag;
  __device__ __forceinline__ void operator()(i32 group, const float* acc) const {
    if constexpr (!kRounded) {
      store_packed(to, group, pack(acc), flag);
    } else {
      constexpr i32 kPerVec = Values<kOutType>::kCount;
      float rounded[kValues];
#pragma unroll
      for (i32 i = 0; i < kValues / kPerVec; ++i)
        Values<kOutType>::load(Values<kOutType>::store(acc + i * kPerVec), rounded + i * kPerVec);
      store_packed(to, group, pack(rounded), flag);
    }
  }
};

// A row of either kind. Rows are aligned, so the lowest bit of an address can say which.
struct AnyRow {
  const char* at;
  bool packed;

  __device__ static const char* tagged(const char* row, bool packed) {
    return row && packed ? row + 1 : row;
  }
  __device__ static AnyRow of(const char* tagged) {
    const bool packed = reinterpret_cast<u64>(tagged) & 1;
    return {packed ? tagged - 1 : tagged, packed};
  }
  // From where kOutBytes before its scalars lie.
  __device__ const char* before_scalars() const {
    return packed ? at + static_cast<i64>(kPackedBytes) - static_cast<i64>(kOutBytes) : at;
  }
};

// kValues values of one. Which kind it is, is the same for the whole warp.
template <Written kWritten>
struct AnyPiece {
  static constexpr i32 kEnd = kPackedGroups;
  static constexpr bool kNow = kWritten == Written::kNow;
  Piece<kOutType, kWritten> plain;  // its first three words hold a packed group
  bool packed;

  __device__ __forceinline__ PackedGroup group() const {
    const Vec& v = plain.vec[0];
    return {{v.word[0], v.word[1]}, v.word[2]};
  }
  __device__ __forceinline__ void clear() {
    plain.clear();
    packed = false;
  }
  __device__ __forceinline__ void load(const AnyRow& row, i32 at) {
    packed = row.packed;
    if (!packed) {
      if (at < kGroups) plain.load(row.at, at);
      return;
    }
    load_codes(row, at);
    plain.vec[0].word[2] = ~0u;
    if (has_tail(at)) load_tail(row, at);
  }
  __device__ __forceinline__ bool again(const AnyRow& row, i32 at) {
    if (!packed) return at < kGroups && plain.again(row.at, at);
    const Vec& v = plain.vec[0];
    const bool codes_miss = v.word[0] == 0 || v.word[1] == 0, tail_misses = v.word[2] == 0;
    if (codes_miss) load_codes(row, at);
    if (tail_misses) load_tail(row, at);
    return codes_miss || tail_misses;
  }
  __device__ __forceinline__ void take(const AnyRow& row, i32 at) {
    if (!packed) {
      if (at < kGroups) plain.take(row.at, at);
      return;
    }
    char* from = const_cast<char*>(row.at);
    st_relaxed_sys_v2(codes_at(from, at), Pair{});
    if (has_tail(at)) st_relaxed_sys_u32(values_at<u32>(tail_at(from, at)), 0);
  }
  __device__ __forceinline__ void add_to(float* acc, float, bool) const {
    if (packed) {
      add_packed(acc, group());
    } else {
      plain.add_to(acc, 1.0f, false);
    }
  }
  // Stores it unchanged; a unit of which a word did not arrive becomes NaN.
  __device__ __forceinline__ void copy(char* to, i32 at) const {
    PackedGroup words = group();
    const bool misses = words.codes.word[0] == 0 || words.codes.word[1] == 0 || words.tail == 0;
    if (kSelfFlagged && __any_sync(~0u, misses)) words = {{~0u, ~0u}, ~0u};
    store_packed(to, at, words, false);
  }

 private:
  __device__ __forceinline__ void load_codes(const AnyRow& row, i32 at) {
    const char* from = codes_at(const_cast<char*>(row.at), at);
    const Pair codes = kNow ? ld_relaxed_sys_v2(from) : ld_na_v2(from);
    plain.vec[0].word[0] = codes.word[0];
    plain.vec[0].word[1] = codes.word[1];
  }
  __device__ __forceinline__ void load_tail(const AnyRow& row, i32 at) {
    const char* from = tail_at(const_cast<char*>(row.at), at);
    plain.vec[0].word[2] = kNow ? ld_relaxed_sys_u32(values_at<u32>(from)) : ld_na_u32(from);
  }
};

// to = the packed row at `from`, once settled as in sum_pieces().
template <Written kWritten, typename W, typename Settle>
__device__ __forceinline__ void copy_packed(const W& worker, char* to, const AnyRow& from,
                                            const Settle& settle) {
  for (i32 group = worker.thread; group < kPackedGroups; group += W::kThreads) {
    AnyPiece<kWritten> piece;
    piece.load(from, group);
    settle([&](const auto& f) { f(piece, 0, group); });
    piece.copy(to, group);
  }
}

}  // namespace moe_p2p::device
