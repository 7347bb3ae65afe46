// Dispatch, receiving half: counters of rows that are here, for a product on another stream that
// begins while other rows are on their way (moe_p2p/moe/ready.py). Nobody waits for a counter here.
#pragma once

#include "kernels/dispatch/place.cuh"

namespace moe_p2p::device {

static_assert(!kReady || (!kMasks && !kPlain));  // and padded: fill_ready() in csrc/ops

// Called by the whole block that reports, once its threads have written counts and ranges.
__device__ inline void raise_counts(const Receiver& a) {
  const DispatchParams& p = a.p;
  const i32 each = arrival_counters(p.capacity), total = num_local_experts(p.comm) * each;
  __syncthreads();
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < total; i += kBlockThreads) {
    const i64 num_rows = min(i64{a.s.num_rows[i / each]}, p.capacity);
    // Pairs with the acquire of who reads counts; so does the next one, of rows.
    red_add_release_gpu_u32(&p.ready[i], arrival_rest(num_rows, i % each));
  }
}

// Counts the rows that a slot has filled. Called by the whole worker. After a fault a row may be
// made of words that never came: its counter stays.
__device__ inline void raise_rows(const Receiver& a, const RecvWorker& worker, i32 buffer) {
  const DispatchParams& p = a.p;
  const FoundRows& w = a.s.worker[worker.place];
  worker.sync();  // all its threads have stored
  if (worker.thread >= w.num_rows[buffer] || is_aborted(p.comm)) return;
  const auto capacity = static_cast<i32>(p.capacity);
  const i32 row = w.row[buffer][worker.thread];
  const i32 counter = row / capacity * arrival_counters(capacity) + row % capacity / kArrivalRows;
  red_add_release_gpu_u32(&p.ready[counter], 1);
}

}  // namespace moe_p2p::device
