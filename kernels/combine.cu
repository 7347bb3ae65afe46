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

template <DType kType>
__device__ __forceinline__ void add_values(float* acc, const char* row, i32 group, float weight,
                                           bool weighted, bool constant) {
  constexpr i32 kPerVec = Values<kType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i) {
    const char* at = row + (group * (kValues / kPerVec) + i) * 16;
    float f[kPerVec];
    Values<kType>::load(constant ? ld_nc_v4(at) : ld_na_v4(at), f);
#pragma unroll
    for (i32 j = 0; j < kPerVec; ++j)
      acc[i * kPerVec + j] =
          __fadd_rn(acc[i * kPerVec + j], weighted ? __fmul_rn(weight, f[j]) : f[j]);
  }
}

__device__ __forceinline__ void store_values(char* row, i32 group, const float* acc) {
  constexpr i32 kPerVec = Values<kOutType>::kCount;
#pragma unroll
  for (i32 i = 0; i < kValues / kPerVec; ++i)
    st_na_v4(row + (group * (kValues / kPerVec) + i) * 16,
             Values<kOutType>::store(acc + i * kPerVec));
}

inline constexpr u64 kOutBytes = kHidden * item_bytes(kOutType);

__device__ inline void combine_send(const CombineParams& p, u64 step, i32 block, i32 num_blocks) {
  __shared__ i32 row[kTopk];
  __shared__ float weight[kTopk];
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
    if (thread < kTopk) {
      const i32 r = handle.rows_of(source, index)[thread];
      row[thread] = r;
      weight[thread] =
          r >= 0 && p.row_weights ? reinterpret_cast<const float*>(p.row_weights)[r] : 1.0f;
    }
    __syncthreads();
    char* to = partial_at(p.comm.data[source % kLocal], slot, p.comm.rank % kLocal) +
               combine_slots_offset() + static_cast<u64>(index) * p.stride;
    for (i32 group = thread; group < kGroups; group += kThreads) {
      float acc[kValues] = {};
#pragma unroll
      for (i32 k = 0; k < kTopk; ++k)
        if (row[k] >= 0)
          add_values<kYType>(
              acc,
              reinterpret_cast<const char*>(p.y) +
                  static_cast<i64>(row[k]) * kHidden * static_cast<i64>(item_bytes(kYType)),
              group, weight[k], p.row_weights != 0, true);
      store_values(to, group, acc);
    }
    if (p.row_scalars && thread < kTopk)
      reinterpret_cast<float*>(to + kOutBytes)[thread] =
          row[thread] >= 0 ? reinterpret_cast<const float*>(p.row_scalars)[row[thread]] : 0.0f;
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
      for (i32 l = 0; l < kLocal; ++l)
        if (partial[l]) add_values<kOutType>(acc, partial[l], group, 1.0f, false, false);
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
