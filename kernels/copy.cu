// The software NIC's copies to memory of peers (csrc/platform/copy_kernel.h). One block stays on
// the device while there is something to copy: a request of the host is under way after one read
// over the bus, whereas a copy engine is asked through the driver. It needs no more of a
// multiprocessor than a block of the kernels whose rows it carries, or it would find no room beside
// them.
#include "kernels/abi/copy.h"
#include "kernels/device/ptx.cuh"

namespace moe_p2p::device {

constexpr i32 kVecsAtOnce = 8;  // of a thread
// Requests read by one access. Reads of one word are served one after the other: with four blocks
// that each read the same eight requests, a copy of 30 KB took 17 us instead of 6.
constexpr i32 kRequestsAtOnce = 2;
constexpr u32 kLooksBetweenClocks = 64;

struct Asked {
  CopyRequest request[kRequestsAtOnce];
  i32 num;
};
static_assert(sizeof(Asked) <= kCopySharedBytes);

// Waits for requests from copy `next` on: `asked` gets what one look finds, nothing after idle_ns.
// Called by one warp. Two lanes read a request, so that a look is one access.
__device__ inline void await_requests(const CopyParams& p, u64 next, i32 lane, Asked& asked) {
  const auto& ring = *reinterpret_cast<const CopyRing*>(p.ring);
  const u64 number = next + static_cast<u64>(lane / 2);
  const auto* half = reinterpret_cast<const Vec*>(&ring.request[number % kCopyRequests]) + lane % 2;
  const u64 deadline = globaltimer_ns() + p.idle_ns;
  bool idle = false;
  i32 num = 0;
  for (u32 looks = 1; num == 0 && !idle; ++looks) {
    // Checked before the last look.
    idle = looks % kLooksBetweenClocks == 0 && __all_sync(~0u, globaltimer_ns() > deadline);
    // Pairs with the host's store of the request.
    const Vec mine = lane < 2 * kRequestsAtOnce ? ld_acquire_sys_v4(half) : Vec{};
    Vec other;
    for (i32 i = 0; i < 4; ++i) other.word[i] = __shfl_xor_sync(~0u, mine.word[i], 1);
    const auto both = [](u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; };
    const CopyRequest request{both(mine.word[0], mine.word[1]), both(mine.word[2], mine.word[3]),
                              both(other.word[0], other.word[1]),
                              both(other.word[2], other.word[3])};
    const u32 there = __ballot_sync(~0u, lane % 2 == 0 && request.is(number));
    while (num < kRequestsAtOnce && there >> 2 * num & 1) ++num;
    if (lane % 2 == 0 && lane < 2 * num) asked.request[lane / 2] = request;
  }
  if (lane == 0) asked.num = num;
}

// Called by kThreads threads.
template <i32 kThreads>
__device__ inline void copy(const CopyRequest& request, i32 thread) {
  auto* to = reinterpret_cast<char*>(request.to);
  const auto* from = reinterpret_cast<const char*>(request.from);
  const bool whole = (request.to | request.from) % sizeof(Vec) == 0;
  const u64 num_vecs = whole ? request.bytes / sizeof(Vec) : 0;
  for (u64 first = 0; first < num_vecs; first += kVecsAtOnce * kThreads) {
    Vec vec[kVecsAtOnce] = {};  // else all are kept from turn to turn
    const auto at = [&](i32 j) { return first + static_cast<u64>(j * kThreads + thread); };
#pragma unroll
    for (i32 j = 0; j < kVecsAtOnce; ++j)
      if (at(j) < num_vecs) vec[j] = ld_na_v4(from + at(j) * sizeof(Vec));
#pragma unroll
    for (i32 j = 0; j < kVecsAtOnce; ++j)
      if (at(j) < num_vecs) st_na_v4(to + at(j) * sizeof(Vec), vec[j]);
  }
  for (u64 i = num_vecs * sizeof(Vec) + static_cast<u64>(thread); i < request.bytes; i += kThreads)
    to[i] = from[i];
}

}  // namespace moe_p2p::device

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kCopyThreads, 2)
    moe_p2p_copy(const __grid_constant__ CopyParams p) {
  auto& asked = *reinterpret_cast<Asked*>(shared_memory());
  auto& ring = *reinterpret_cast<CopyRing*>(p.ring);
  const auto thread = static_cast<i32>(threadIdx.x);
  if (thread == 0) st_release_sys_u64(&ring.entered, p.launch);
  for (u64 next = p.first;;) {
    if (thread < 32) await_requests(p, next, thread, asked);
    __syncthreads();
    const i32 num = asked.num;
    if (num == 0) break;
    if (num == 1) {
      copy<kCopyThreads>(asked.request[0], thread);
    } else {  // at the same time, since short ones are mostly latency
      constexpr i32 kEach = kCopyThreads / kRequestsAtOnce;
      copy<kEach>(asked.request[thread / kEach], thread % kEach);
    }
    next += static_cast<u64>(num);
    __syncthreads();
    // Behind the copies of all threads; pairs with CopyKernel::num_done().
    if (thread == 0) st_release_sys_u64(&ring.done, next);
  }
  if (thread == 0) st_release_sys_u64(&ring.left, p.launch);
}
