// Combine, receiving half: adds the partial rows of each own token, as soon as they have arrived.
// The caller's bias first, then nodes ascending; the own node contributes its ranks one after the
// other, any other node one row.
#pragma once

#include "kernels/combine/int10.cuh"
#include "kernels/combine/sums_read.cuh"
#include "kernels/combine/topk_order.cuh"
#include "kernels/device/lost.cuh"
#include "kernels/device/steps.cuh"

namespace moe_p2p::device {

struct RowList {
  const char* row[kBiases + kAddends];  // in the order of the sum; null = none
  // Of a self-flagged row: its sender; lost_source() of a rank that was lost; else -1.
  i32 source[kBiases + kAddends];
  i32 num_rows;
};
// Whether each warp lists the rows of a token for itself: nobody waits for a list.
inline constexpr bool kWarpLists =
    kSelfFlagged && kOthers == 0 && !kTopkOrder && kBiases + kSpeakers <= 32;
struct CombineRecvShared {
  RowList worker[kWarpLists ? kBlockThreads / 32 : RecvWorker::kCount];
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
  const u64 own = data_of(p.comm, self.local);
  const bool near = i < kLocal;
  const Awaited what{Phase::kCombine, speaker_rank(self, i), step};
  const bool came =
      near ? kSelfFlagged || wait_flag(p.comm, partial_flags_at(p.comm, own, slot, i) + index, what)
           : wait_part(p.comm, Phase::kCombine, step, what.source,
                       MOE_P2P_MUTATED(kFirstPartIsAll) ? 0 : part_of_slot(far_stride(p), index));
  const auto stride = [&] { return near ? p.stride : far_stride(p); };
  if (!came) return is_masked(p.comm, speaker_rank(self, i)) ? nullptr : lost_row(p.comm, stride());
  return (near ? partial_at(p.comm, own, slot, i)
               : combine_landing_at(p.comm, own, slot, i - kLocal)) +
         combine_slots_offset() + static_cast<u64>(index) * stride();
}

__device__ __forceinline__ i32 lost_source(i32 rank) { return -2 - rank; }
// A rank that was masked since a token was given to it has no row for it: that is left out, or a
// lost one. In a RowList `source` then names the rank.
__device__ inline const char* note_lost(const CombineParams& p, const Self& self, i32 i, i32 index,
                                        const char* row, i32& source) {
  if (index < 0 || row) return row;
  source = lost_source(speaker_rank(self, i));
  return kLostSums == LostSums::kCounted ? nullptr
                                         : lost_row(p.comm, i < kLocal ? p.stride : far_stride(p));
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
    i32 source = kSelfFlagged ? found.rank : -1;
    if constexpr (kLostSums != LostSums::kUnseen)
      partial = note_lost(p, self, found.rank, index, partial, source);
    w.row[kBiases + k] = partial ? partial + static_cast<u64>(found.row) * kOutBytes : nullptr;
    w.source[kBiases + k] = source;
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

// Lists the rows of a token in the order of the sum. Called by a warp.
__device__ __forceinline__ void list_rows(const CombineParams& p, const Self& self, u64 step,
                                          const i32* send_slots, u64 offset, RowList& w) {
  const i32 lane = static_cast<i32>(threadIdx.x) % 32, speaker = lane - kBiases;
  const char* row = nullptr;
  if (speaker < 0) {
    if (const auto bias = p.bias[lane]) row = bias.as<const char>() + offset;
  } else if (speaker < kSpeakers) {
    row = wait_partial(p, self, step, speaker, send_slots[speaker]);
    if constexpr (kFarPacked) row = AnyRow::tagged(row, kNearPacked || speaker >= kLocal);
  }
  const u32 have = __ballot_sync(~0u, row != nullptr);
  __syncwarp();  // all have read the list before
  if (row) {
    const i32 at = __popc(have & ((1u << lane) - 1));
    w.row[at] = row, w.source[at] = speaker < 0 ? -1 : speaker_rank(self, speaker);
  }
  if (lane == 0) w.num_rows = __popc(have);
  __syncwarp();
}

// The same by a worker. counts: it is the one that counts what is lost of the token.
__device__ inline void find_rows(const CombineParams& p, const Self& self, const RecvWorker& worker,
                                 u64 step, const i32* send_slots, i64 token, bool counts,
                                 RowList& w) {
  const u64 offset = static_cast<u64>(token) * kOutBytes;
  if constexpr (kTopkOrder) find_by_topk(p, self, worker, step, send_slots, token);
#pragma unroll 1
  for (i32 i = worker.thread; !kTopkOrder && i < kSpeakers; i += RecvWorker::kThreads) {
    const i32 column = i < kLocal ? i : kLocal + other_node(i - kLocal, self.node);
    const i32 at = kBiases + order_of(self, i);
    w.row[at] = wait_partial(p, self, step, i, send_slots[column]);
    if constexpr (kLostSums == LostSums::kUnseen) {
      if constexpr (kFarPacked) w.row[at] = AnyRow::tagged(w.row[at], kNearPacked || i >= kLocal);
      w.source[at] = kSelfFlagged && i < kLocal ? speaker_rank(self, i) : -1;
    } else {
      w.source[at] = -1;
      w.row[at] = note_lost(p, self, i, send_slots[column], w.row[at], w.source[at]);
      if constexpr (kFarPacked) w.row[at] = AnyRow::tagged(w.row[at], kNearPacked || i >= kLocal);
    }
  }
  if (worker.thread < kBiases) {
    const auto bias = p.bias[worker.thread];
    w.row[worker.thread] = bias ? bias.as<const char>() + offset : nullptr;
    w.source[worker.thread] = -1;
  }
  worker.sync();
  if (worker.thread < 32) {  // packs the existing rows, one after the other
    i32 num = 0;
    [[maybe_unused]] i32 lost = -1;  // a rank of which something is lost
#pragma unroll 1
    for (i32 first = 0; first < kBiases + kAddends; first += 32) {
      const i32 i = first + worker.thread;
      const char* row = i < kBiases + kAddends ? w.row[i] : nullptr;
      const i32 source = row ? w.source[i] : -1;
      if constexpr (kLostSums != LostSums::kUnseen) {
        const i32 mine = i < kBiases + kAddends ? w.source[i] : -1;
        if (const u32 found = __ballot_sync(~0u, mine < -1))
          lost = lost_source(__shfl_sync(~0u, mine, __ffs(static_cast<i32>(found)) - 1));
      }
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
    if constexpr (kLostSums != LostSums::kUnseen)
      if (counts && lost >= 0 && worker.thread == 0) count_lost(p.comm, step, lost);
  }
  worker.sync();
}

__device__ inline void recv_token(const CombineParams& p, const Self& self,
                                  const RecvWorker& worker, const Part& share, u64 step,
                                  const i32* send_slots, i64 token, CombineRecvShared& s) {
  RowList& w = s.worker[kWarpLists ? threadIdx.x / 32 : static_cast<u32>(worker.place)];
  const u64 offset = static_cast<u64>(token) * kOutBytes;
  if constexpr (kWarpLists)
    list_rows(p, self, step, send_slots, offset, w);
  else
    find_rows(p, self, worker, step, send_slots, token, share.index == 0, w);
  constexpr i32 kMost = RecvWorker::kThreads > 512 ? (kPlain ? 3 : 2)  // as registers allow
                        : kBlockThreads * MOE_P2P_BLOCKS_PER_SM > 512 ? 3
                                                                      : 4;
  constexpr i32 kRowsAtOnce = kSpeakers < kMost ? kSpeakers : kMost;
  const auto row_at = [&w](i32 r) {
    return kFarPacked ? AnyRow::of(w.row[r]).before_scalars()
                      : w.row[r] + (static_cast<i64>(kSentBytes) - static_cast<i64>(kOutBytes));
  };
  const auto source_of = [&w](i32 r) { return w.source[r]; };
  constexpr Written kWritten = kSelfFlagged ? Written::kNow : Written::kByPeers;
#pragma unroll 1
  for (i32 part = share.index; part < kRowParts<RecvWorker>; part += share.count) {
    if constexpr (kFarPacked) {
      const auto any_at = [&w](i32 r) { return AnyRow::of(w.row[r]); };
      sum_pieces<AnyPiece<kWritten>, kRowsAtOnce>(
          worker, part, w.num_rows, any_at, false, [](i32) { return 1.0f; },
          settle_rows(p.comm, step, any_at, source_of),
          StoreValues<kOutType>{p.out.as<char>() + offset, false});
    } else if constexpr (kInBlocks) {
      const i32 num_own = num_biases(p);
      const auto added_at = [&w, num_own](i32 r) { return AddedRow{w.row[r], r >= num_own}; };
      sum_pieces<AddedPiece<kWritten>, kRowsAtOnce>(
          worker, part, w.num_rows, added_at, false, [](i32) { return 1.0f; },
          settle_rows(p.comm, step, added_at, source_of),
          StoreValues<kOutType>{p.out.as<char>() + offset, false});
    } else {
      sum_rows<kOutType, kWritten, kRowsAtOnce, kOutType>(
          worker, part, p.out.as<char>() + offset, false, w.num_rows, row_at, false,
          [](i32) { return 1.0f; }, settle_rows(p.comm, step, row_at, source_of));
    }
  }
  if (with_scalars(p) && share.index == 0 && worker.thread < kTopk) {
    const i32 first = num_biases(p);
    const float sum = kTopkOrder ? sum_topk_scalars(p, worker, step, worker.thread)
                                 : sum_scalars<kRowsAtOnce>(p.comm, step, worker.thread, first,
                                                            w.num_rows, row_at, source_of);
    if (p.out_scalars) p.out_scalars[token * kTopk + worker.thread] = sum;
  }
  if constexpr (!kWarpLists) worker.sync();
}

// Waits until all speakers have sent all of this step; before that it is not over. The relaying
// block sees it first. With masks that block ends once a waiting block has masked the missing
// ranks, so another one waits.
__device__ inline bool relay_ends(const CombineParams& p) {
  return !kMasksGrow && has_relay(p.grid);
}
__device__ inline void end_step(const CombineParams& p, const Self& self, u64 step) {
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += kBlockThreads) {
    if (!wait_combine(p.comm, self, step, i)) continue;
    const i32 slot = slot_of(step);
    const u64 own = data_of(p.comm, self.local);
    const RegionHeader* header =
        region_header(i < kLocal ? partial_at(p.comm, own, slot, i)
                                 : combine_landing_at(p.comm, own, slot, i - kLocal));
    if constexpr (kMasksGrow)  // of a rank that has cleaned meanwhile: it is not in this step
      if (ld_relaxed_sys_u64(&header->step) != step + 1) continue;
    const bool far = kFarPacked != kNearPacked && i >= kLocal;
    const DType type = far ? far_type(kOutType, kPartials) : near_type(kOutType, kPartials);
    const u32 flags = is_empty(p) ? kEmpty : combine_flags(type, with_scalars(p));
    if (header->flags != flags || header->slot_bytes != (is_empty(p) ? 0
                                                         : far       ? far_stride(p)
                                                                     : p.stride))
      raise_fault(p.comm, kWrongHeader, Phase::kCombine, speaker_rank(self, i), step,
                  far ? far_stride(p) : p.stride, header->slot_bytes);
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
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += kBlockThreads) {
    const i64 begin = clock64();
    wait_combine(p.comm, self, step, i);
    ticks[speaker_rank(self, i)] += clock64() - begin;
  }
}

__device__ inline i32 end_of_chunk(const CombineParams& p, i32 chunk) {
  if (is_empty(p)) return 0;
  // Rows past the last chunk become zero.
  return chunk + 1 == num_chunks_of(p) ? p.num_rows
                                       : min((chunk + 1) * chunk_of(p.comm), p.num_rows);
}

__device__ inline void begin_chunk(const CombineParams& p, const Self& self,
                                   const RecvWorker& worker, u64 step, i32 chunk, i32 block) {
  if (chunk >= kSteps) {
    if (worker.thread == 0) wait_sums_read(p.comm, step - static_cast<u64>(kSteps));
    worker.sync();
  }
  if (is_timed(p) && block == 0) report_waits(p, self, step, chunk == 0);
}

__device__ inline void end_chunk(const CombineParams& p, const Self& self, const RecvWorker& worker,
                                 u64 step, i32 block) {
  if (!relay_ends(p) && block == (kOthers == 0 ? p.grid.num_recv_blocks - 1 : 0))
    end_step(p, self, step);
  if (num_chunks_of(p) > kSteps) say_sums_read(p, worker, step);
}

// A block that may not receive loses its own tokens, of `num` workers of `count` from `first` on:
// other blocks of its grid may have called Launch::ask() before the fault, and receive theirs.
__device__ __noinline__ void lose_sums(const CombineParams& p, i32 first, i32 num, i32 count) {
  const i32 thread = static_cast<i32>(threadIdx.x), chunk_tokens = chunk_of(p.comm);
#pragma unroll 1
  for (i32 token = thread; !is_empty(p) && token < p.num_rows; token += kBlockThreads) {
    const i32 chunk = kPlain ? 0 : min(token / chunk_tokens, num_chunks_of(p) - 1);
    const i32 worker = (token - chunk * chunk_tokens) % count;
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
#pragma unroll 1
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    begin_chunk(p, self, worker, step, chunk, block);
#pragma unroll 1
    for (i64 token = static_cast<i64>(chunk) * chunk_of(p.comm) + team.id;
         token < end_of_chunk(p, chunk); token += team.count)
      recv_token(p, self, team, share, step, handle.send_slots(token), token, s);
    end_chunk(p, self, worker, step, block);
  }
}

}  // namespace moe_p2p::device
