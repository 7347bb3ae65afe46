// Combine: sums of rows, in fp32 and in one order, by the threads of a worker.
#pragma once

#include "kernels/device/quantize.cuh"
#include "kernels/device/self_flag.cuh"
#include "kernels/device/worker.cuh"

namespace moe_p2p::device {

inline constexpr DType kYType = static_cast<DType>(MOE_P2P_Y_DTYPE);
inline constexpr DType kOutType = static_cast<DType>(MOE_P2P_OUT_DTYPE);
inline constexpr u64 kOutBytes = kHidden * item_bytes(kOutType);
inline constexpr u64 kYBytes = kHidden * item_bytes(kYType);
// Partial sums that travel as 10-bit integers (combine/int10.cuh): within a node, between nodes.
inline constexpr Partials kPartials = static_cast<Partials>(MOE_P2P_PARTIALS);
inline constexpr bool kNearPacked = near_type(kOutType, kPartials) == DType::kInt10;
inline constexpr bool kFarPacked = far_type(kOutType, kPartials) == DType::kInt10;
// Those that travel in blocks of 16-bit values (kernels/abi/block16.h), within a node and between
// nodes. A block is one Vec, so its rows are stored, flagged and read like those of other types.
inline constexpr bool kInBlocks = kPartials == Partials::kBlock16;
inline constexpr DType kSentType = kInBlocks ? DType::kBlock16 : kOutType;
inline constexpr u64 kSentBytes = kHidden * item_bytes(kSentType);
// A thread works on kValues neighbouring values: one Vec of the narrower type, a group of int10, or
// a block.
inline constexpr i32 kWidest = Values<kYType>::kCount > Values<kOutType>::kCount
                                   ? Values<kYType>::kCount
                                   : Values<kOutType>::kCount;
inline constexpr i32 kLeast = kFarPacked ? kInt10Group : kInBlocks ? kBlock16 : 1;
inline constexpr i32 kValues = kWidest < kLeast ? kLeast : kWidest;
static_assert(!kInBlocks || kValues == kBlock16);
inline constexpr i32 kGroups = kHidden / kValues;
static_assert(kHidden % kValues == 0);
// Groups of whole units of int10: a unit is the work of a warp.
inline constexpr i32 kPackedGroups = (kGroups + 31) / 32 * 32;

// When a row is written: before the kernel runs, by peers before its flag, or by peers right now.
enum class Written { kBefore, kByPeers, kNow };

// kValues values of one row.
template <DType kType, Written kWritten>
struct Piece {
  static constexpr i32 kEnd = kGroups;  // of groups that are loaded
  static constexpr bool kNow = kWritten == Written::kNow;
  static constexpr i32 kVecs = kValues / Values<kType>::kCount;
  Vec vec[kVecs];

  __device__ __forceinline__ static const char* at(const char* row, i32 group, i32 i) {
    return row + (group * kVecs + i) * 16;
  }
  __device__ __forceinline__ void load(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      vec[i] = kWritten == Written::kBefore    ? ld_nc_v4(at(row, group, i))
               : kWritten == Written::kByPeers ? ld_na_v4(at(row, group, i))
                                               : ld_relaxed_sys_v4(at(row, group, i));
  }
  // Self-flagged row: reads again what has not arrived; returns whether there was any.
  __device__ __forceinline__ bool again(const char* row, i32 group) {
    bool any = false;
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      if (!has_come(vec[i])) vec[i] = ld_relaxed_sys_v4(at(row, group, i)), any = true;
    return any;
  }
  // A Vec of which a word did not arrive is as if none had.
  __device__ __forceinline__ void lose() {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      if (!has_come(vec[i])) vec[i] = Vec{};
  }
  __device__ __forceinline__ void take(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = take_vec(const_cast<char*>(at(row, group, i)), vec[i]);
  }
  __device__ __forceinline__ void load_shared(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = values_at<Vec>(row)[group * kVecs + i];
  }
  // Adding zeros changes no sum, because no sum is ever -0.0.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) vec[i] = Vec{};
  }
  __device__ __forceinline__ void add_to(float* acc, float weight, bool weighted) const {
    constexpr i32 kPerVec = Values<kType>::kCount;
    if constexpr (kType == DType::kBlock16) {
      Values<kType>::add(vec[0], acc);  // a partial sum, which has no weight
    } else {
#pragma unroll
      for (i32 i = 0; i < kVecs; ++i) {
        float f[kPerVec];
        Values<kType>::load(vec[i], f);
#pragma unroll
        for (i32 j = 0; j < kPerVec; ++j)
          acc[i * kPerVec + j] =
              __fadd_rn(acc[i * kPerVec + j], weighted ? __fmul_rn(weight, f[j]) : f[j]);
      }
    }
  }
};

// A row of a sum at its source: partial sums, or the caller's bias.
struct AddedRow {
  const char* at;
  bool partial;
};
// kValues values of one, where partial sums travel in blocks. Which kind it is, is the same for the
// whole warp.
template <Written kWritten>
struct AddedPiece {
  static constexpr i32 kEnd = kGroups;
  static constexpr bool kNow = kWritten == Written::kNow;
  using Block = Piece<DType::kBlock16, kWritten>;
  using Plain = Piece<kOutType, kWritten>;
  Plain plain;  // its first Vec holds a block
  bool partial;

  __device__ __forceinline__ Block block() const { return {{plain.vec[0]}}; }
  __device__ __forceinline__ void clear() {
    plain.clear();
    partial = false;
  }
  __device__ __forceinline__ void load(const AddedRow& row, i32 group) {
    partial = row.partial;
    if (!partial) return plain.load(row.at, group);
    Block mine;
    mine.load(row.at, group);
    plain.vec[0] = mine.vec[0];
  }
  __device__ __forceinline__ bool again(const AddedRow& row, i32 group) {
    Block mine = block();
    const bool any = mine.again(row.at, group);
    plain.vec[0] = mine.vec[0];
    return any;
  }
  __device__ __forceinline__ void lose() { plain.lose(); }
  __device__ __forceinline__ void take(const AddedRow& row, i32 group) {
    Block mine = block();
    mine.take(row.at, group);
    plain.vec[0] = mine.vec[0];
  }
  __device__ __forceinline__ void add_to(float* acc, float, bool) const {
    if (partial) {
      block().add_to(acc, 1.0f, false);
    } else {
      plain.add_to(acc, 1.0f, false);
    }
  }
};

// flag: the row is self-flagged.
template <DType kTo>
__device__ __forceinline__ void store_values(char* row, i32 group, const float* acc, bool flag) {
  constexpr i32 kPerVec = Values<kTo>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i) {
    char* to = row + (group * (kValues / kPerVec) + i) * 16;
    const Vec v = Values<kTo>::store(acc + i * kPerVec);
    if (kSelfFlagged && flag) {
      st_flagged_v4(to, v);
    } else {
      st_na_v4(to, v);
    }
  }
}

__device__ __forceinline__ void store_values_shared(char* row, i32 group, const float* acc) {
  constexpr i32 kPerVec = Values<kOutType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i)
    values_at<Vec>(row)[group * (kValues / kPerVec) + i] =
        Values<kOutType>::store(acc + i * kPerVec);
}

// --- what is added ---

// Items are looked up in batches, kLanes threads for each: one latency for all of them.
inline constexpr i32 kLanes = kTopk <= 1    ? 1
                              : kTopk <= 2  ? 2
                              : kTopk <= 4  ? 4
                              : kTopk <= 8  ? 8
                              : kTopk <= 16 ? 16
                                            : 32;

template <i32 kItems>
struct Rows {
  i32 row[kItems][kLanes];  // rows of y of one slot, k ascending, one after the other
  float weight[kItems][kLanes];
  i32 num_rows[kItems];  // -1: nothing to do for it
  u64 ranks[kOthers > 0 ? kItems
                        : 1];  // own-node ranks that hold a partial, of slots of other nodes
};

// --- what a call asks for; of plain kernels none does ---
__device__ __forceinline__ bool with_scalars(const CombineParams& p) {
  return !kPlain && p.with_scalars;
}
__device__ __forceinline__ bool is_empty(const CombineParams& p) { return !kPlain && p.empty; }
__device__ __forceinline__ bool is_timed(const CombineParams& p) { return !kPlain && p.wait_ticks; }

// The caller's addends of a token, before its partial rows.
inline constexpr i32 kBiases = 2;
__device__ __forceinline__ i32 num_biases(const CombineParams& p) {
  return (p.bias[0] ? 1 : 0) + (p.bias[1] ? 1 : 0);
}

// --- sums ---

// Parts of a row, one group for each thread of a worker, which several workers share where a step
// has few rows.
inline constexpr bool kFewRows = kSelfFlagged && kOthers == 0 && kChunk <= 16;
template <typename W>
inline constexpr i32 kRowParts =
    kFewRows ? ((kFarPacked ? kPackedGroups : kGroups) + W::kThreads - 1) / W::kThreads : 1;
template <typename W>
__device__ __forceinline__ Part share_of_row(const W& worker) {
  if constexpr (kRowParts<W> == 1) return {0, 1};
  const i32 count = min(kRowParts<W>, worker.count);
  return {worker.id % count, count};
}

struct AllHaveCome {
  template <typename Each>
  __device__ void operator()(const Each&) const {}
};
struct DoNothing {
  __device__ void operator()() const {}
};
// Calls do_it() in sum_rows(), behind the first loads.
template <bool kOn, typename DoIt>
struct WhileRowsTravel {
  const DoIt& do_it;
  template <typename Each>
  __device__ void operator()(const Each&) const {
    if constexpr (kOn) do_it();
  }
};

// Stores a sum at `to`, as a row of kTo.
template <DType kTo>
struct StoreValues {
  static constexpr i32 kEnd = kGroups;
  char* to;
  bool flag;
  __device__ __forceinline__ void operator()(i32 group, const float* acc) const {
    store_values<kTo>(to, group, acc, flag);
  }
};

// store(group, sum) for the sum of `num_rows` rows in their order, times weight_of(i) when
// `weighted`. Rows are loaded kRowsAtOnce at a time, as pieces P. settle(each) then waits for words
// that have not arrived: each(f) calls f(piece, i, group) for every piece.
template <typename P, i32 kRowsAtOnce, typename W, typename RowAt, typename WeightOf,
          typename Settle, typename Store>
__device__ __forceinline__ void sum_pieces(const W& worker, i32 part, i32 num_rows,
                                           const RowAt& row_at, bool weighted,
                                           const WeightOf& weight_of, const Settle& settle,
                                           const Store& store) {
  constexpr i32 kStride = W::kThreads * kRowParts<W>;
  constexpr i32 kEnd = P::kEnd > Store::kEnd ? P::kEnd : Store::kEnd;
  // Groups that a thread has under way together. More hide more latency and cost registers.
  constexpr i32 kGroupsAtOnce = kEnd <= kStride || P::kNow ? 1 : 2;
#pragma unroll 1
  for (i32 first = part * W::kThreads + worker.thread; first < kEnd;
       first += kStride * kGroupsAtOnce) {
    float acc[kGroupsAtOnce][kValues] = {};
#pragma unroll 1
    for (i32 r = 0; r < num_rows; r += kRowsAtOnce) {
      P piece[kRowsAtOnce][kGroupsAtOnce];
      const auto each = [&](const auto& f) {
#pragma unroll
        for (i32 j = 0; j < kRowsAtOnce; ++j)
#pragma unroll
          for (i32 g = 0; g < kGroupsAtOnce; ++g)
            if (const i32 group = first + g * kStride; r + j < num_rows && group < P::kEnd)
              f(piece[j][g], r + j, group);
      };
#pragma unroll
      for (i32 j = 0; j < kRowsAtOnce; ++j)
#pragma unroll
        for (i32 g = 0; g < kGroupsAtOnce; ++g) piece[j][g].clear();
      each([&](auto& piece, i32 i, i32 group) { piece.load(row_at(i), group); });
      settle(each);
#pragma unroll
      for (i32 j = 0; j < kRowsAtOnce; ++j)
        if (r + j < num_rows)
#pragma unroll
          for (i32 g = 0; g < kGroupsAtOnce; ++g)
            piece[j][g].add_to(acc[g], weighted ? weight_of(r + j) : 1.0f, weighted);
    }
#pragma unroll
    for (i32 g = 0; g < kGroupsAtOnce; ++g)
      if (const i32 group = first + g * kStride; group < Store::kEnd) store(group, acc[g]);
  }
}

// to = the sum, of kTo.
template <DType kType, Written kWritten, i32 kRowsAtOnce, DType kTo, typename W, typename RowAt,
          typename WeightOf, typename Settle = AllHaveCome>
__device__ __forceinline__ void sum_rows(const W& worker, i32 part, char* to, bool flag,
                                         i32 num_rows, const RowAt& row_at, bool weighted,
                                         const WeightOf& weight_of, const Settle& settle = {}) {
  sum_pieces<Piece<kType, kWritten>, kRowsAtOnce>(worker, part, num_rows, row_at, weighted,
                                                  weight_of, settle, StoreValues<kTo>{to, flag});
}

// Returns the wait of sum_rows() for rows at row_at(i) that flag themselves: source_of(i) is the
// sender of row i, or -1 when it has arrived.
template <typename RowAt, typename SourceOf>
__device__ __forceinline__ auto settle_rows(const DeviceComm& comm, u64 step, const RowAt& row_at,
                                            const SourceOf& source_of) {
  return [&comm, step, row_at, source_of](const auto& each) {
    if constexpr (!kSelfFlagged) return;
    Awaited what{Phase::kCombine, -1, step};
    const auto again = [&] {
      what.source = -1;
      each([&](auto& piece, i32 r, i32 group) {
        if (const i32 source = source_of(r); source >= 0 && piece.again(row_at(r), group))
          what.source = source;
      });
      return what.source >= 0;
    };
    const bool come = wait_flagged(comm, again, what);
    if constexpr (kInBlocks) {  // their words mean something only together
      if (!come)
        each([&](auto& piece, i32 r, i32) {
          if (source_of(r) >= 0) piece.lose();
        });
    }
    each([&](auto& piece, i32 r, i32 group) {
      if (source_of(r) >= 0) piece.take(row_at(r), group);
    });
  };
}

// Returns the sum of scalar k of the same rows, from row `first` on.
template <i32 kRowsAtOnce, typename RowAt, typename SourceOf>
__device__ __forceinline__ float sum_scalars(const DeviceComm& comm, u64 step, i32 k, i32 first,
                                             i32 num_rows, const RowAt& row_at,
                                             const SourceOf& source_of) {
  const auto scalar_at = [&](i32 r) {
    return reinterpret_cast<u32*>(const_cast<char*>(row_at(r)) + kOutBytes) + k;
  };
  float sum = 0.0f;
  for (i32 r = first; r < num_rows; r += kRowsAtOnce) {
    u32 scalar[kRowsAtOnce];
#pragma unroll
    for (i32 j = 0; j < kRowsAtOnce; ++j)
      if (r + j < num_rows) scalar[j] = ld_relaxed_sys_u32(scalar_at(r + j));
#pragma unroll
    for (i32 j = 0; j < kRowsAtOnce; ++j) {
      if (r + j >= num_rows) continue;
      if (const i32 source = source_of(r + j); kSelfFlagged && source >= 0)
        scalar[j] = take_word(comm, scalar_at(r + j), scalar[j], {Phase::kCombine, source, step});
      sum = __fadd_rn(sum, __uint_as_float(scalar[j]));
    }
  }
  return sum;
}

}  // namespace moe_p2p::device
