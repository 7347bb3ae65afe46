// Items that one thread loads and stores at once, without room in L1: for kernels that copy.
#pragma once

#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

template <typename Item>
__device__ __forceinline__ Item load_item(const char* p);

template <>
__device__ __forceinline__ Vec load_item<Vec>(const char* p) {
  return ld_na_v4(p);
}
template <>
__device__ __forceinline__ Pair load_item<Pair>(const char* p) {
  return ld_na_v2(p);
}
template <>
__device__ __forceinline__ u32 load_item<u32>(const char* p) {
  return ld_na_u32(p);
}
template <>
__device__ __forceinline__ char load_item<char>(const char* p) {
  return *p;
}

__device__ __forceinline__ void store_item(char* p, const Vec& v) { st_na_v4(p, v); }
__device__ __forceinline__ void store_item(char* p, const Pair& v) { st_na_v2(p, v); }
__device__ __forceinline__ void store_item(char* p, u32 v) { st_na_u32(p, v); }
__device__ __forceinline__ void store_item(char* p, char v) { *p = v; }

}  // namespace moe_p2p::device
