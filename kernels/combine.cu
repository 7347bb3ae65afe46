// Combine: blocks [0, num_send_blocks) add up this rank's experts for each received slot and store
// the partial row at its source; the others add the partial rows of each own token. Sums are in fp32
// in a fixed order (docs/protocol.md, section 10), so the result does not depend on arrival.
#include "kernels/device/quantize.cuh"
#include "kernels/device/shape.cuh"
#include "kernels/device/wait.cuh"

namespace moe_p2p::device {

inline constexpr DType kYType = static_cast<DType>(MOE_P2P_Y_DTYPE);
inline constexpr DType kOutType = static_cast<DType>(MOE_P2P_OUT_DTYPE);
// A thread works on kValues neighbouring values: one Vec of the narrower type.
inline constexpr i32 kValues = Values<kYType>::kCount > Values<kOutType>::kCount
                                   ? Values<kYType>::kCount
                                   : Values<kOutType>::kCount;
inline constexpr i32 kGroups = kHidden / kValues;
static_assert(kHidden % kValues == 0);

// kValues values of one row; `constant`: nobody writes them while the kernel runs.
template <DType kType, bool kConstant>
struct Piece {
  static constexpr i32 kVecs = kValues / Values<kType>::kCount;
  Vec vec[kVecs];

  // A null row is a row of zeros: adding them changes no sum, because no sum is ever -0.0.
  __device__ __forceinline__ void load(const char* row, i32 group) {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) {
      const char* at = row + (group * kVecs + i) * 16;
      vec[i] = row == nullptr ? Vec{} : kConstant ? ld_nc_v4(at) : ld_na_v4(at);
    }
  }
  __device__ __forceinline__ void add_to(float* acc, float weight, bool weighted) const {
    constexpr i32 kPerVec = Values<kType>::kCount;
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
};

__device__ __forceinline__ void store_values(char* row, i32 group, const float* acc) {
  constexpr i32 kPerVec = Values<kOutType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i)
    st_na_v4(row + (group * (kValues / kPerVec) + i) * 16,
             Values<kOutType>::store(acc + i * kPerVec));
}

// Rows whose loads are under way together: more hide more latency and cost registers.
inline constexpr i32 kRowsAtOnce = kTopk < 2 ? 1 : 2;
inline constexpr i32 kRanksAtOnce = kLocal < 4 ? kLocal : 4;
inline constexpr u64 kOutBytes = kHidden * item_bytes(kOutType);

__device__ inline void combine_send(const CombineParams& p, u64 step, i32 block, i32 num_blocks) {
  __shared__ const char* row[kTopk];  // those of this rank, k ascending, one after the other
  __shared__ float weight[kTopk];
  __shared__ i32 num_rows;
  const i32 thread = static_cast<i32>(threadIdx.x);
  const auto slot = static_cast<i32>(step % static_cast<u64>(kShape.steps_in_flight));
  const HandleArrays handle =
      HandleArrays::of(p.handle, reinterpret_cast<const HandleMeta*>(p.handle)->num_rows);
  // This rank has read all of the step's dispatch, tokens or not: whoever sent may use the slot again
  // (protocol.md, section 9). Pairs with the wait for headers in combine_recv().
  if (block == 0 && thread < kLocal)
    st_release_sys_u64(&reinterpret_cast<RegionHeader*>(
                            partial_at(p.comm.data[thread], slot, p.comm.rank % kLocal))
                            ->step,
                       step + 1);
  if (p.empty) return;
  i32 most = 0;
  for (i32 source = 0; source < kWorld; ++source) most = max(most, handle.slot_counts[source]);
  for (i32 i = block; i < most * kWorld; i += num_blocks) {
    const i32 source = (i + p.comm.rank) % kWorld;
    const i32 index = i / kWorld;
    if (index >= handle.slot_counts[source]) continue;
    const i32* rows = handle.rows_of(source, index);
    const i32 mine = thread < kTopk ? rows[thread] : -1;
    if (thread < 32) {
      const u32 have = __ballot_sync(~0u, mine >= 0);
      const i32 at = __popc(have & ((1u << thread) - 1));
      if (mine >= 0) {
        row[at] = reinterpret_cast<const char*>(p.y) +
                  static_cast<i64>(mine) * kHidden * static_cast<i64>(item_bytes(kYType));
        weight[at] = p.row_weights ? reinterpret_cast<const float*>(p.row_weights)[mine] : 1.0f;
      }
      if (thread == 0) num_rows = __popc(have);
    }
    __syncthreads();
    char* to = partial_at(p.comm.data[source % kLocal], slot, p.comm.rank % kLocal) +
               combine_slots_offset() + static_cast<u64>(index) * p.stride;
    for (i32 group = thread; group < kGroups; group += kThreads) {
      float acc[kValues] = {};
      for (i32 i = 0; i < num_rows; i += kRowsAtOnce) {  // several loads under way
        Piece<kYType, true> piece[kRowsAtOnce];
#pragma unroll
        for (i32 j = 0; j < kRowsAtOnce; ++j)
          piece[j].load(i + j < num_rows ? row[i + j] : nullptr, group);
#pragma unroll
        for (i32 j = 0; j < kRowsAtOnce; ++j)
          if (i + j < num_rows) piece[j].add_to(acc, weight[i + j], p.row_weights != 0);
      }
      store_values(to, group, acc);
    }
    if (p.row_scalars && thread < kTopk)
      reinterpret_cast<float*>(to + kOutBytes)[thread] =
          mine >= 0 ? reinterpret_cast<const float*>(p.row_scalars)[mine] : 0.0f;
    __syncthreads();
    // The row's flag, after every thread's stores; pairs with the wait in combine_recv() there.
    if (thread == 0)
      st_release_sys_u32(
          partial_flags_at(p.comm.data[source % kLocal], slot, p.comm.rank % kLocal) + index,
          static_cast<u32>(step + 1));
  }
}

__device__ inline void combine_recv(const CombineParams& p, u64 step, i32 block, i32 num_blocks) {
  __shared__ const char* partial[kLocal];
  const i32 thread = static_cast<i32>(threadIdx.x);
  const auto slot = static_cast<i32>(step % static_cast<u64>(kShape.steps_in_flight));
  const auto* meta = reinterpret_cast<const HandleMeta*>(p.handle);
  const HandleArrays handle = HandleArrays::of(p.handle, meta->num_rows);
  const u64 own = p.comm.data[p.comm.rank % kLocal];
  const i32 num_rows = p.empty ? 0 : meta->num_rows;
  for (i32 token = block; token < num_rows; token += num_blocks) {
    if (thread < kLocal) {
      const i32 index = handle.send_slots[token * kColumns + thread];
      partial[thread] = nullptr;
      if (index >= 0 &&
          wait_word(partial_flags_at(own, slot, thread) + index, static_cast<u32>(step + 1), p.comm,
                    Phase::kCombine, thread, step))
        partial[thread] = partial_at(own, slot, thread) + combine_slots_offset() +
                          static_cast<u64>(index) * p.stride;
    }
    __syncthreads();
    char* out = reinterpret_cast<char*>(p.out) + static_cast<u64>(token) * kOutBytes;
    for (i32 group = thread; group < kGroups; group += kThreads) {
      float acc[kValues] = {};
#pragma unroll
      for (i32 first = 0; first < kLocal; first += kRanksAtOnce) {
        Piece<kOutType, false> piece[kRanksAtOnce];
#pragma unroll
        for (i32 j = 0; j < kRanksAtOnce; ++j)
          piece[j].load(first + j < kLocal ? partial[first + j] : nullptr, group);
#pragma unroll
        for (i32 j = 0; j < kRanksAtOnce; ++j) piece[j].add_to(acc, 1.0f, false);
      }
      store_values(out, group, acc);
    }
    if (p.out_scalars && thread < kTopk) {
      float sum = 0.0f;
      for (i32 l = 0; l < kLocal; ++l)
        if (partial[l])
          sum = __fadd_rn(sum, reinterpret_cast<const float*>(partial[l] + kOutBytes)[thread]);
      reinterpret_cast<float*>(p.out_scalars)[token * kTopk + thread] = sum;
    }
    __syncthreads();
  }
  if (block == 0 && thread < kLocal)
    wait_word(reinterpret_cast<const u32*>(
                  &reinterpret_cast<const RegionHeader*>(partial_at(own, slot, thread))->step),
              static_cast<u32>(step + 1), p.comm, Phase::kCombine, thread, step);
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_p2p_combine(const __grid_constant__ CombineParams p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const u64 step = reinterpret_cast<const HandleMeta*>(p.handle)->first_step;
  const i32 block = static_cast<i32>(blockIdx.x);
  if (block < p.num_send_blocks) {
    combine_send(p, step, block, p.num_send_blocks);
  } else {
    combine_recv(p, step, block - p.num_send_blocks,
                 static_cast<i32>(gridDim.x) - p.num_send_blocks);
  }
}
