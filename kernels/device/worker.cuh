// Roles within a grid: a block is divided into workers, each of which carries one token or slot at
// a time. Few large workers hide the latency of one token, many small ones keep more tokens under
// way per multiprocessor.
#pragma once

#include "kernels/device/shape.cuh"

namespace moe_p2p::device {

inline constexpr i32 kBlockThreads = MOE_P2P_BLOCK_THREADS;

// One of kPerBlock workers of a block. The halves of a kernel may divide their blocks differently.
template <i32 kPerBlock>
struct Worker {
  static constexpr i32 kCount = kPerBlock;
  static constexpr i32 kThreads = kBlockThreads / kPerBlock / 32 * 32;
  // Where rows go through shared memory a warp is left over (kernels/device/bulk.cuh).
  static_assert((kThreads * kPerBlock == kBlockThreads || MOE_P2P_BULK) && kPerBlock <= 15 &&
                    kBlockThreads <= 1024,
                "barrier 0 is the block's, 1 to 15 are those of its workers");

  i32 thread;  // in the worker
  i32 place;   // in the block
  i32 id;      // among all workers of this half
  i32 count;   // of them

  __device__ static Worker of(i32 block, i32 num_blocks) {
    const i32 place = static_cast<i32>(threadIdx.x) / kThreads;
    return {static_cast<i32>(threadIdx.x) % kThreads, place, block * kPerBlock + place,
            num_blocks * kPerBlock};
  }
  __device__ void sync() const {
    if constexpr (kPerBlock == 1) {
      __syncthreads();
    } else {
      bar_sync(place + 1, kThreads);
    }
  }
};

// Threads that share an item where a worker has warps for other work (kernels/device/bulk.cuh).
template <i32 kCount>
struct Threads {
  static constexpr i32 kThreads = kCount;
  i32 thread;
};

// Workers that share each of their items, `count` of them; this one has part `index`.
struct Part {
  i32 index = 0, count = 1;

  // Returns `worker` as one of a team: id is the team's number, count the number of teams. A worker
  // left over has an id behind all items.
  template <typename W>
  __device__ W team(W worker) const {
    worker.count /= count;
    worker.id = worker.id / count < worker.count ? worker.id / count : 1 << 24;
    return worker;
  }
  __device__ bool has(i32 i) const { return i % count == index; }
};
using SendWorker = Worker<MOE_P2P_SEND_WORKERS>;
using RecvWorker = Worker<MOE_P2P_RECV_WORKERS>;

// The role of a block in its grid; -1: not that role.
struct Role {
  i32 send = -1;
  i32 recv = -1;
  bool relay = false;

  __device__ static Role of(const Grid& grid) {
    const i32 block = static_cast<i32>(blockIdx.x) - (has_relay(grid) ? 1 : 0);
    if (block < 0) return {-1, -1, true};
    if (block < grid.num_send_blocks) return {block, -1, false};
    return {-1, block - grid.num_send_blocks, false};
  }
};

// The block's shared memory, as one role lays it out.
template <typename T>
__device__ __forceinline__ T& shared() {
  static_assert(sizeof(T) <= MOE_P2P_SHARED_BYTES,
                "moe_p2p/moe/gpu/kernels.py asks for too little");
  return *reinterpret_cast<T*>(shared_memory());
}

}  // namespace moe_p2p::device
