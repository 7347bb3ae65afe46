// Dispatch, sending half: where tokens go, and what receivers need to know about the whole call.
// Every block works out slot numbers and positions by itself from the routing table, so blocks
// never wait for each other and the result does not depend on their order.
#pragma once

#include "kernels/dispatch/placement.cuh"

namespace moe_p2p::device {

struct SendScratch {
  // How many earlier tokens of the call name the expert. By rank only send_headers() counts here:
  // tokens for each expert, and behind them tokens for each rank.
  i32 seen[kExperts + Placement::num_token_counts()];
  u32 head[kHeadWords];  // of the current token
  float scale[kScales];
  i32 slot[kColumns];    // -1 = does not go there
  i32 passed[kColumns];  // slots taken before the token looked up last
};
__device__ constexpr i32 at_least_one(i32 num) { return num > 1 ? num : 1; }  // in an array
struct SendShared {
  u32 has[kColumns][kChunkWords];  // bit t: token t of the chunk goes there
  // By rank: tokens of earlier chunks for each rank, and `has` of ranks on other nodes.
  i32 before[at_least_one(Placement::num_token_counts())];
  u32 far_has[at_least_one(kOthers > 0 ? Placement::num_token_counts() : 0)]
             [kOthers > 0 && Placement::num_token_counts() > 0 ? kChunkWords : 1];
  SendScratch worker[SendWorker::kCount];
};

struct Sender {
  const DispatchParams& p;
  const Self self;
  const HandleArrays handle;
  const i32 num_tokens;
  SendShared& s;
};

// Returns num_tokens of this call, as the caller gave it.
__device__ inline i64 ask_num_tokens(const DispatchParams& p) {
  if (kPlain || !p.num_tokens) return p.num_tokens_host;
  return p.num_tokens_is_int64 ? *p.num_tokens.as<const i64>() : *p.num_tokens.as<const i32>();
}
// Returns it checked; 0 after raising a fault.
__device__ inline i32 check_num_tokens(const DispatchParams& p, u64 step, i64 n) {
  const i32 num_chunks = num_chunks_of(p);
  const i64 room = num_chunks == 1 ? p.num_slots : static_cast<i64>(num_chunks) * chunk_of(p.comm);
  const i64 most = p.num_rows < room ? p.num_rows : room;
  if (n >= 0 && n <= most) return static_cast<i32>(n);
  if (threadIdx.x == 0)
    raise_fault(p.comm, kTooManyTokens, Phase::kDispatch, p.comm.rank, step, static_cast<u64>(most),
                static_cast<u64>(n));
  return 0;
}

__device__ __forceinline__ i32 column_of(const Self& self, i32 rank) {
  return self.same_node(rank) ? rank % kLocal : kLocal + rank / kLocal;
}

// What a block finds while it routes a chunk.
struct RouteTask {
  u64 step;
  i32 chunk;
  bool reports;  // bad experts
  bool counts;   // the call's experts, into `seen` of the first worker
};

// Finds where the tokens of word `w` of the chunk go: for_each(token, f) calls f(id) for the
// entries of a token. Called by a warp.
template <typename ForEach>
__device__ __forceinline__ void route_word(const Sender& a, const RouteTask& task, i32 w,
                                           const ForEach& for_each) {
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const i32 chunk_tokens = chunk_of(a.p.comm);
  const i32 at = w * 32 + lane, token = task.chunk * chunk_tokens + at;
  Bits<kColumns> columns;
  if (at < chunk_tokens && token < a.num_tokens)
    for_each(token, [&](i64 id) {
      if (const i32 e = expert_of(id); e >= 0) {
        const i32 rank = owner_of(a.p.comm, e).rank;
        columns.add(column_of(a.self, rank));
        Placement::route(a, rank, w, lane);
        if (task.counts) atomicAdd(&a.s.worker[0].seen[e], 1);
      } else if (id != -1 && task.reports) {
        raise_fault(a.p.comm, kBadExpert, Phase::kDispatch, a.self.rank, task.step,
                    static_cast<u64>(token), static_cast<u64>(id));
      }
    });
  __syncwarp();
#pragma unroll
  for (i32 c = 0; c < kColumns; ++c) {
    const u32 has = columns.lanes_with(c);
    if (lane == 0) a.s.has[c][w] = has;
  }
}

// What routing a short step needs from memory, asked for together with the number of the step: a
// token's entries by each lane, and by the last warp the words that (R1) is about, of all slots.
struct EarlyRoutes {
  static constexpr i32 kWarps = kBlockThreads / 32;
  static constexpr bool kOn = kPlain && kOthers == 0 && !kMasks && !MOE_P2P_BULK && kTopk <= 8 &&
                              kChunkWords <= kWarps && kSteps * kLocal <= 32;
  i64 id[kOn ? kTopk : 1];
  u64 combined;  // the word of rank lane % kLocal in slot lane / kLocal

  __device__ __forceinline__ void ask(const DispatchParams& p) {
    if constexpr (!kOn) return;
    const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k)
      id[k] = thread < p.num_rows && thread < chunk_of(p.comm)
                  ? id_at(p, static_cast<i64>(thread) * kTopk + k)
                  : -1;
    combined = 0;
    if (thread / 32 == kWarps - 1 && lane < kSteps * kLocal) {
      const Self self(p.comm);
      // Pairs with say_read() of that rank, as wait_combine() does.
      combined = ld_acquire_sys_u64(header_word(
          partial_at(p.comm, data_of(p.comm, self.local), lane / kLocal, lane % kLocal)));
    }
  }
  // wait_free(), if the words show it already.
  __device__ __forceinline__ bool wait_free(const DeviceComm& comm, const Self& self,
                                            u64 step) const {
    const i32 lane = static_cast<i32>(threadIdx.x) % 32;
    const bool asked = lane < kLocal;
    const u64 word = __shfl_sync(~0u, combined, slot_of(step) * kLocal + lane % kLocal);
    const bool is_free = step < static_cast<u64>(kSteps) || word + static_cast<u64>(kSteps) > step;
    if (__all_sync(~0u, is_free || !asked)) return true;
    return device::wait_free(comm, self, step, lane);
  }
  // Called by the whole block for the first chunk, instead of what follows.
  __device__ __forceinline__ bool route(const Sender& a, const RouteTask& task) const {
    const i32 warp = static_cast<i32>(threadIdx.x) / 32;
    if (warp < kChunkWords)
      route_word(a, task, warp, [&](i32, const auto& each) {
#pragma unroll
        for (i32 k = 0; k < kTopk; ++k) each(id[k]);
      });
    return __syncthreads_and(warp != kWarps - 1 || wait_free(a.p.comm, a.self, task.step));
  }
};

inline constexpr i32 kRouters = kBlockThreads / 32 - 1;  // warps

// Finds where the chunk's tokens go, as far as the first `num_words` words have them. Returns false
// if the step's slot did not become free.
__device__ inline bool route_chunk(const Sender& a, const RouteTask& task, i32 num_words) {
  const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
  Placement::begin_chunk(a);
  // The last warp waits until the step's slot is free, the others read the routing table.
  if (thread / 32 == kRouters)
    return __syncthreads_and(wait_free(a.p.comm, a.self, task.step, lane));
#pragma unroll 1
  for (i32 w = thread / 32; w < num_words; w += kRouters)
    route_word(a, task, w, [&](i32 token, const auto& each) { for_each_id(a.p, token, each); });
  return __syncthreads_and(true);
}

// Drops tokens for masked ranks. Blocks that see a mask at different times differ in what they do
// for that rank only: it gets slots without a header, or an outbox that is never complete.
__device__ inline void drop_masked(const Sender& a) {
  for (i32 i = static_cast<i32>(threadIdx.x); i < kSpeakers; i += kBlockThreads) {
    const i32 rank = speaker_rank(a.self, i);
    if (!is_masked(a.p.comm, rank)) continue;
    for (i32 w = 0; w < kChunkWords; ++w) a.s.has[column_of(a.self, rank)][w] = 0;
  }
  __syncthreads();
}

// Finds the slots of a token. Called by the threads of its worker; `before`: the token they looked
// up last.
template <typename W>
__device__ inline void find_slots(const Sender& a, const W& worker, i32 chunk, i32 before,
                                  i32 token, bool reports, SendScratch& w) {
  const i32 begin = chunk * chunk_of(a.p.comm), at = token - begin, from = max(before - begin, 0);
#pragma unroll 1
  for (i32 column = worker.thread; column < kColumns; column += W::kThreads) {
    const u32* has = a.s.has[column];
    const i32 passed = (from > 0 ? w.passed[column] : 0) + tokens_between(has, from, at);
    const i32 slot = has[at / 32] >> (at % 32) & 1 ? passed : -1;
    w.passed[column] = passed;
    w.slot[column] = slot;
    if (reports) a.handle.send_slots(token)[column] = slot;
  }
}

// Reports slot `slot_index` of an outbox as written, or -1: header and counts, which are in the
// first part. Slots of short steps ring for themselves; of other parts the last item rings.
__device__ inline void report_written(const Sender& a, u64 step, i32 node, i32 slot_index) {
  const i32 index = slot_index < 0 ? 0 : part_of_slot(a.p.parts.slot_bytes, slot_index);
  u32* words = state_words<u32>(a.p.comm, kWords.outbox);
  const RegionPart part =
      region_part(kOutboxSlots, a.p.parts.slot_bytes, tokens_in(a.s.has[kLocal + node]), index);
  const bool by_slot = rings_by_slot(part);
  if (by_slot && slot_index >= 0)
    return ring_slot(a.p.comm, Phase::kDispatch, step, a.self.local, node, slot_index);
  const auto last = static_cast<u32>(part.num_slots - (index == 0 ? 0 : 1));
  u32* word = &words[(slot_of(step) * kNodes + node) * kMaxParts + index];
  if (!by_slot && atom_inc_acq_rel_gpu_u32(word, last) != last) return;
  ring(a.p.comm, Phase::kDispatch, step, a.self.local, node, part, by_slot ? part.num_slots : 0);
}

// Stores count i of this call where `rank` reads it.
__device__ __forceinline__ void send_count(const Sender& a, u64 step, i32 rank, i32 i, i32 count) {
  const i32 l = rank % kLocal, slot = slot_of(step);
  if (!a.self.same_node(rank)) {
    const i32 other = other_index(rank / kLocal, a.self.node);
    char* region = outbox_of(a.p.comm, a.self, slot, other);
    behind_header<i32>(region)[l * kCountsPerRank + i] = count;
    return;
  }
  char* region = inbox_at(a.p.comm, data_of(a.p.comm, l), slot, a.self.index_at(l));
  if constexpr (kSelfFlagged) {
    st_tagged(behind_header<u64>(region) + i, step, static_cast<u32>(count));
  } else {
    behind_header<i32>(region)[i] = count;
  }
}

// Sends the counts of the whole call, with the first chunk. counted: experts are, by route_word().
__device__ inline void send_counts(const Sender& a, u64 step, bool counted) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  SendScratch& w = a.s.worker[0];
  constexpr i32 kSeen = sizeof(w.seen) / sizeof(w.seen[0]);
  if (EarlyRoutes::kOn || counted) {
    if (Placement::num_token_counts() > 0 && thread < kLocal)
      w.seen[kExperts + thread] = tokens_in(a.s.has[thread]);  // and read by this thread
  } else {
#pragma unroll 1
    for (i32 i = thread; i < kSeen; i += kBlockThreads) w.seen[i] = 0;
    __syncthreads();
    count_experts(a.p, w.seen, 0, static_cast<i64>(a.num_tokens) * kTopk, thread, kBlockThreads);
    Placement::count_call(a, w.seen + kExperts);
    __syncthreads();
  }
#pragma unroll 1
  for (i32 e = thread; e < kExperts; e += kBlockThreads) {
    const Owner owner = owner_of(a.p.comm, e);
    if constexpr (kMasks)
      if (is_masked(a.p.comm, owner.rank)) continue;
    send_count(a, step, owner.rank, owner.local, w.seen[e]);
  }
  Placement::send_call(a, step, w.seen + kExperts);
  __syncthreads();
#pragma unroll 1
  for (i32 i = thread; i < kSeen; i += kBlockThreads) w.seen[i] = 0;
}

// Sends headers for all columns, and with the first chunk the counts. Called by one block; early,
// because receivers place rows by them. counted: as in send_counts().
__device__ inline void send_headers(const Sender& a, u64 step, i32 chunk, bool counted = false) {
  const i32 thread = static_cast<i32>(threadIdx.x), slot = slot_of(step);
  const u32 flags = wire_flags(a.p);
  if (chunk == 0) send_counts(a, step, counted);
#pragma unroll 1
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    if constexpr (kMasks)
      if (speaker_masked(a.p.comm, a.self, i)) continue;
    const i32 column = i < kLocal ? i : kLocal + other_node(i - kLocal, a.self.node);
    char* region = i < kLocal ? inbox_at(a.p.comm, data_of(a.p.comm, i), slot, a.self.index_at(i))
                              : outbox_of(a.p.comm, a.self, slot, i - kLocal);
    RegionHeader* header = region_header(region);
    const auto num_tokens = static_cast<u32>(tokens_in(a.s.has[column]));
    if (kSelfFlagged && i < kLocal) {
      st_tagged(&header->announced[0], step, announced_size(num_tokens, a.p.parts.slot_bytes));
      st_tagged(&header->announced[1], step, flags);
    }
    header->describe(num_tokens, flags, a.p.parts.slot_bytes);
  }
  __syncthreads();
#pragma unroll 1
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    if constexpr (kMasks)
      if (speaker_masked(a.p.comm, a.self, i)) continue;
    if (i < kLocal) {
      // The flag of header and counts; pairs with wait_dispatch() of rank i. Where rows flag
      // themselves it only means that this rank has read what rank i sent it in earlier steps.
      st_release_sys_u64(
          header_word(inbox_at(a.p.comm, data_of(a.p.comm, i), slot, a.self.index_at(i))),
          step + 1);
    } else {
      *header_word(outbox_of(a.p.comm, a.self, slot, i - kLocal)) = step + 1;
      report_written(a, step, other_node(i - kLocal, a.self.node), -1);
    }
  }
  __syncthreads();
}

}  // namespace moe_p2p::device
