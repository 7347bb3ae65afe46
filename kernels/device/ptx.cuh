// All of the package that only a GPU has: inline PTX, and shared memory. Names are
// op_order_scope_type. tests/emulation has the same names for a CPU.
#pragma once

#include "kernels/abi/shape.h"

namespace moe_p2p::device {

using namespace abi;

struct alignas(16) Vec {  // 16 bytes, the widest access of one thread
  u32 word[4];
};

// --- words shared between devices and the host ---

__device__ __forceinline__ void st_release_sys_u32(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_release_sys_u64(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ u32 ld_acquire_sys_u32(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 ld_acquire_sys_u64(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 ld_relaxed_sys_u32(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 ld_relaxed_sys_u64(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// The first-level cache may answer these. For words that only kernels before this one wrote, which
// griddepcontrol_wait() waits for, or where an older value is as good.
__device__ __forceinline__ u32 ld_relaxed_cta_u32(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.cta.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 ld_relaxed_cta_u64(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.cta.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_release_gpu_u64(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys_u32(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st_relaxed_sys_u64(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
// Of two threads that each store a word and then load the other's, one at least sees it.
__device__ __forceinline__ void fence_sc_sys() { asm volatile("fence.sc.sys;" ::: "memory"); }
__device__ __forceinline__ void red_add_relaxed_gpu_u64(u64* p, u64 v) {
  asm volatile("red.add.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void red_add_release_gpu_u32(u32* p, u32 v) {
  asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u32 atom_add_relaxed_gpu_u32(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
// Adds 1, or goes back to 0 from `last`; returns the old value.
__device__ __forceinline__ u32 atom_inc_acq_rel_gpu_u32(u32* p, u32 last) {
  u32 old;
  asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(last)
               : "memory");
  return old;
}

// --- rows: read once or written for a peer, so not worth a place in the first-level cache ---

// For memory that is not written while the kernel runs.
__device__ __forceinline__ Vec ld_nc_v4(const void* p) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p));
  return v;
}
// For memory that peers wrote; ordered behind the acquire of its flag.
__device__ __forceinline__ Vec ld_na_v4(const void* p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_na_v4(void* p, const Vec& v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// The same for two words, and one.
struct alignas(8) Pair {
  u32 word[2];
};
__device__ __forceinline__ Pair ld_na_v2(const void* p) {
  Pair v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.word[0]), "=r"(v.word[1])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_na_v2(void* p, const Pair& v) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1])
               : "memory");
}
__device__ __forceinline__ u32 ld_na_u32(const void* p) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void st_na_u32(void* p, u32 v) {
  asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Two words, each of which may be read while it is written.
__device__ __forceinline__ Pair ld_relaxed_sys_v2(const void* p) {
  Pair v;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.word[0]), "=r"(v.word[1])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed_sys_v2(void* p, const Pair& v) {
  asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1])
               : "memory");
}
// Likewise four.
__device__ __forceinline__ Vec ld_relaxed_sys_v4(const void* p) {
  Vec v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ Vec ld_acquire_sys_v4(const void* p) {
  Vec v;
  asm volatile("ld.acquire.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void st_relaxed_sys_v4(void* p, const Vec& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// --- time, and kernels that overlap ---

__device__ __forceinline__ u64 globaltimer_ns() {
  u64 v;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
  return v;
}
// Uses a value, so that it is loaded: waits a nanosecond where it is a number without meaning.
__device__ __forceinline__ void use(u32 value) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9; @p nanosleep.u32 1; }" ::"r"(value));
}
// All reads of what earlier kernels wrote come after this.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until `num_threads` threads of the block, a multiple of 32, have reached barrier `id`.
__device__ __forceinline__ void bar_sync(i32 id, i32 num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// Two fp32 to two e4m3, the first in the low byte; round to nearest even, saturating; NaN is 0x7f.
__device__ __forceinline__ u16 cvt_rn_satfinite_e4m3x2(float low, float high) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 abs_bf16x2(u32 x) {
  u32 v;
  asm("abs.bf16x2 %0, %1;" : "=r"(v) : "r"(x));
  return v;
}
// NaN where one of the two is.
__device__ __forceinline__ u32 max_nan_bf16x2(u32 a, u32 b) {
  u32 v;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ float max_nan_f32(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
__device__ __forceinline__ u32 cvt_rn_bf16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 cvt_rn_f16x2(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ float cvt_f32_f16(u16 x) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(x));
  return v;
}

// --- shared memory of a block ---

// Returns all of it, as the launch requested it.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char bytes[];
  return bytes;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Words of the block.
__device__ __forceinline__ void st_release_cta_u32(u32* p, u32 v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v)
               : "memory");
}
__device__ __forceinline__ u32 ld_acquire_cta_u32(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(v)
               : "r"(shared_address(p))
               : "memory");
  return v;
}

// --- barriers ---

__device__ __forceinline__ void barrier_init(u64* barrier, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals)
               : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier, u32 num_arrivals = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(num_arrivals)
               : "memory");
}
// Arrives, and makes the barrier also wait for that many bytes of bulk_load().
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Waits until the phase of that parity is over: for this block and its copies, never for a peer.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "look:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra look;\n"
      "over:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether that phase is over.
__device__ __forceinline__ bool barrier_test(u64* barrier, u32 parity) {
  u32 over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

// --- copies; addresses and bytes are multiples of 16 ---

__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// Makes the bulk_store() calls of this thread since its last bulk_commit() one group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all of this thread's groups but the last kNumLeft are written.
template <i32 kNumLeft>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNumLeft) : "memory");
}
// Waits until they are read, so that their shared memory may be used again.
template <i32 kNumLeft>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kNumLeft) : "memory");
}
// Orders later copies of this thread behind the stores to shared memory that it has seen.
__device__ __forceinline__ void fence_shared_for_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// And behind what peers stored to global memory, once their flag is acquired.
__device__ __forceinline__ void fence_global_for_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace moe_p2p::device
