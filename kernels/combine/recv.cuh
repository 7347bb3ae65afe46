// Combine, receiving half: adds the partial rows of each own token, as soon as they have arrived.
// The caller's bias first, then nodes ascending; the own node contributes its ranks one after the
// other, any other node one row.
#pragma once

#include "kernels/combine/sum.cuh"
#include "kernels/combine/sums_read.cuh"
#include "kernels/combine/topk_order.cuh"
#include "kernels/device/lost.cuh"
#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

struct CombineRecvShared {
  struct {
    const char* row[kBiases + kAddends];  // in the order of the sum; null = none
    i32 source[kBiases + kAddends];       // of a self-flagged row: its sender; else -1
    i32 num_rows;
  } worker[RecvWorker::kCount];
};
// Behind it, in the order of top-k: what each rank sent, of which scalars are read.
struct TopkOrderShared {
  CombineRecvShared rows;
  struct {
    const char* partial[kTopk];  // null = none
    i32 source[kTopk];
  } worker[RecvWorker::kCount];
};

// Place of speaker i in the order of the sum.
__device__ __forceinline__ i32 order_of(const Self& self, i32 i) {
  if (i < kLocal) return self.node + i;
  const i32 node = other_node(i - kLocal, self.node);
  return node < self.node ? node : node + kLocal - 1;
}

// Returns the row that speaker i sent for a token; null when there is none. A row that did not
// arrive becomes a lost row. A row that flags itself may still be arriving; a word that does not is
// a lost one.
__device__ inline const char* wait_partial(const CombineParams& p, const Self& self, u64 step,
                                           i32 i, i32 index) {
  if (index < 0) return nullptr;
  const i32 slot = slot_of(step);
  const u64 own = p.comm.data[self.local];
  const bool near = i < kLocal;
  const Awaited what{Phase::kCombine, speaker_rank(self, i), step};
  const bool came =
      near ? kSelfFlagged || wait_flag(p.comm, partial_flags_at(own, slot, i) + index, what)
           : wait_part(p.comm, Phase::kCombine, step, what.source,
                       MOE_P2P_MUTATED(kFirstPartIsAll) ? 0 : part_of_slot(p.stride, index));
  if (!came) return is_masked(p.comm, speaker_rank(self, i)) ? nullptr : lost_row(p.comm, p.stride);
  return (near ? partial_at(own, slot, i) : combine_landing_at(own, slot, i - kLocal)) +
         combine_slots_offset() + static_cast<u64>(index) * p.stride;
}

// The rows of a token in the order of top-k, and what each rank sent at its last k.
__device__ inline void find_by_topk(const CombineParams& p, const Self& self,
                                    const RecvWorker& worker, u64 step, const i32* send_slots,
                                    i64 token) {
  auto& s = shared<TopkOrderShared>();
  auto& w = s.rows.worker[worker.place];
  auto& sent = s.worker[worker.place];
  for (i32 k = worker.thread; k < kTopk; k += RecvWorker::kThreads) {
    const Addition found = addition_at(p, token, k);
    const i32 index = found.rank < 0 ? -1 : send_slots[found.rank];
    const char* partial = wait_partial(p, self, step, found.rank, index);
    w.row[kBiases + k] = partial ? partial + static_cast<u64>(found.row) * kOutBytes : nullptr;
    w.source[kBiases + k] = kSelfFlagged ? found.rank : -1;
    sent.partial[k] = found.last ? partial : nullptr;
    sent.source[k] = kSelfFlagged ? found.rank : -1;
  }
}

// The sum of scalar k of all ranks.
__device__ inline float sum_topk_scalars(const CombineParams& p, const RecvWorker& worker, u64 step,
                                         i32 k) {
  const auto& sent = shared<TopkOrderShared>().worker[worker.place];
  float sum = 0.0f;
  for (i32 r = 0; r < kTopk; ++r) {
    if (!sent.partial[r]) continue;
    const auto row_at = [&](i32) { return sent.partial[r] + (scalars_offset(p) - kOutBytes); };
    sum = __fadd_rn(
        sum, sum_scalars<1>(p.comm, step, k, 0, 1, row_at, [&](i32) { return sent.source[r]; }));
  }
  return sum;
}

__device__ inline void recv_token(const CombineParams& p, const Self& self,
                                  const RecvWorker& worker, const Part& share, u64 step,
                                  const i32* send_slots, i64 token, CombineRecvShared& s) {
  auto& w = s.worker[worker.place];
  const u64 offset = static_cast<u64>(token) * kOutBytes;
  if constexpr (kTopkOrder) find_by_topk(p, self, worker, step, send_slots, token);
  for (i32 i = worker.thread; !kTopkOrder && i < kSpeakers; i += RecvWorker::kThreads) {
    const i32 column = i < kLocal ? i : kLocal + other_node(i - kLocal, self.node);
    const i32 at = kBiases + order_of(self, i);
    w.row[at] = wait_partial(p, self, step, i, send_slots[column]);
    w.source[at] = kSelfFlagged && i < kLocal ? speaker_rank(self, i) : -1;
  }
  if (worker.thread < kBiases) {
    const auto bias = p.bias[worker.thread];
    w.row[worker.thread] = bias ? bias.as<const char>() + offset : nullptr;
    w.source[worker.thread] = -1;
  }
  worker.sync();
  if (worker.thread < 32) {  // packs the existing rows, one after the other
    i32 num = 0;
    for (i32 first = 0; first < kBiases + kAddends; first += 32) {
      const i32 i = first + worker.thread;
      const char* row = i < kBiases + kAddends ? w.row[i] : nullptr;
      const i32 source = row ? w.source[i] : -1;
      const u32 have = __ballot_sync(~0u, row != nullptr);
      __syncwarp();  // all have read before one writes
      if (row) {
        const i32 at = num + __popc(have & ((1u << worker.thread) - 1));
        w.row[at] = row, w.source[at] = source;
      }
      num += __popc(have);
      __syncwarp();
    }
    if (worker.thread == 0) w.num_rows = num;
  }
  worker.sync();
  constexpr i32 kMost = RecvWorker::kThreads > 512 ? 2 : 4;  // as registers allow
  constexpr i32 kRowsAtOnce = kSpeakers < kMost ? kSpeakers : kMost;
  const auto row_at = [&w](i32 r) { return w.row[r]; };
  const auto source_of = [&w](i32 r) { return w.source[r]; };
  for (i32 part = share.index; part < kRowParts<RecvWorker>; part += share.count)
    sum_rows<kOutType, kSelfFlagged ? Written::kNow : Written::kByPeers, kRowsAtOnce>(
        worker, part, p.out.as<char>() + offset, false, w.num_rows, row_at, false,
        [](i32) { return 1.0f; }, settle_rows(p.comm, step, row_at, source_of));
  if (p.with_scalars && share.index == 0 && worker.thread < kTopk) {
    const i32 first = num_biases(p);
    const float sum = kTopkOrder ? sum_topk_scalars(p, worker, step, worker.thread)
                                 : sum_scalars<kRowsAtOnce>(p.comm, step, worker.thread, first,
                                                            w.num_rows, row_at, source_of);
    if (p.out_scalars) p.out_scalars[token * kTopk + worker.thread] = sum;
  }
  worker.sync();
}

// Waits until all speakers have sent all of this step; before that it is not over. The relaying
// block sees it first. With masks that block ends once a waiting block has masked the missing
// ranks, so another one waits.
inline constexpr bool kRelayEnds = kOthers > 0 && !kMasks;
__device__ inline void end_step(const CombineParams& p, const Self& self, u64 step) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += kBlockThreads) {
    if (!wait_combine(p.comm, self, step, i)) continue;
    const i32 slot = slot_of(step);
    const u64 own = p.comm.data[self.local];
    const RegionHeader* header = region_header(
        i < kLocal ? partial_at(own, slot, i) : combine_landing_at(own, slot, i - kLocal));
    if constexpr (kMasks)  // of a rank that has cleaned meanwhile: it is not in this step
      if (ld_relaxed_sys_u64(&header->step) != step + 1) continue;
    const u32 flags = p.empty ? kEmpty : combine_flags(kOutType, p.with_scalars);
    if (header->flags != flags || header->slot_bytes != (p.empty ? 0 : p.stride))
      raise_fault(p.comm, kWrongHeader, Phase::kCombine, speaker_rank(self, i), step, p.stride,
                  header->slot_bytes);
  }
}

// Measures how long this rank waits for each speaker; ranks of other nodes that do not send to it
// directly have no time of their own. For own-node ranks this is the wait for the word that they
// store as they begin to send.
__device__ __noinline__ void report_waits(const CombineParams& p, const Self& self, u64 step,
                                          bool first) {
  i64* ticks = p.wait_ticks.get();
  if (first)
    for (i32 i = static_cast<i32>(threadIdx.x); i < kWorld; i += kBlockThreads) ticks[i] = 0;
  __syncthreads();
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += kBlockThreads) {
    const i64 begin = clock64();
    wait_combine(p.comm, self, step, i);
    ticks[speaker_rank(self, i)] += clock64() - begin;
  }
}

__device__ inline i32 end_of_chunk(const CombineParams& p, i32 chunk) {
  if (p.empty) return 0;
  // Rows past the last chunk become zero.
  return chunk + 1 == p.num_chunks ? p.num_rows : min((chunk + 1) * kChunk, p.num_rows);
}

__device__ inline void begin_chunk(const CombineParams& p, const Self& self,
                                   const RecvWorker& worker, u64 step, i32 chunk, i32 block) {
  if (chunk >= kSteps) {
    if (worker.thread == 0) wait_sums_read(p.comm, step - static_cast<u64>(kSteps));
    worker.sync();
  }
  if (p.wait_ticks && block == 0) report_waits(p, self, step, chunk == 0);
}

__device__ inline void end_chunk(const CombineParams& p, const Self& self, const RecvWorker& worker,
                                 u64 step, i32 block) {
  if (!kRelayEnds && block == 0) end_step(p, self, step);
  if (p.num_chunks > kSteps) say_sums_read(p, worker, step);
}

// A block that may not receive loses its own tokens, of `num` workers of `count` from `first` on:
// other blocks of its grid may have called Launch::ask() before the fault, and receive theirs.
__device__ __noinline__ void lose_sums(const CombineParams& p, i32 first, i32 num, i32 count) {
  const auto thread = static_cast<i32>(threadIdx.x);
  for (i32 token = thread; !p.empty && token < p.num_rows; token += kBlockThreads) {
    const i32 chunk = min(token / kChunk, p.num_chunks - 1);
    const i32 worker = (token - chunk * kChunk) % count;
    if (worker < first || worker >= first + num) continue;
    lose(p.out.as<char>() + static_cast<u64>(token) * kOutBytes, kOutBytes);
    if (p.out_scalars)
      lose(p.out_scalars.as<char>() + static_cast<u64>(token) * kTopk * 4, kTopk * 4);
  }
  if (p.wait_ticks && first == 0 && thread == 0) lose(p.wait_ticks.as<char>(), kWorld * 8);
}

__device__ inline void combine_recv(const CombineParams& p, const Begun& begun, i32 block) {
  const Self self(p.comm);
  const HandleArrays handle(p);
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
  const Part share = share_of_row(worker);
  if (!begun.good) {  // a worker that shares rows with other blocks loses all of them
    const i32 first = block * RecvWorker::kCount / share.count;
    const i32 end = ((block + 1) * RecvWorker::kCount - 1) / share.count + 1;
    return lose_sums(p, first, end - first, worker.count / share.count);
  }
  const RecvWorker team = share.team(worker);
  auto& s = kTopkOrder ? shared<TopkOrderShared>().rows : shared<CombineRecvShared>();
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    begin_chunk(p, self, worker, step, chunk, block);
    for (i64 token = static_cast<i64>(chunk) * kChunk + team.id; token < end_of_chunk(p, chunk);
         token += team.count)
      recv_token(p, self, team, share, step, handle.send_slots(token), token, s);
    end_chunk(p, self, worker, step, block);
  }
}

}  // namespace moe_p2p::device
