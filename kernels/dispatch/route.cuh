// Dispatch, sending half: where tokens go, and what receivers need to know about the whole call.
// Every block works out slot numbers and positions by itself from the routing table, so blocks
// never wait for each other and the result does not depend on their order.
#pragma once

#include "kernels/dispatch/token.cuh"

namespace moe_p2p::device {

struct SendScratch {
  // How many earlier tokens of the call name the expert. With kByRank only send_headers() counts
  // here: tokens for each expert, and behind them tokens for each rank.
  i32 seen[kExperts + (kByRank ? kWorld : 0)];
  u32 head[kHeadWords];  // of the current token
  float scale[kScales];
  i32 slot[kColumns];    // -1 = does not go there
  i32 passed[kColumns];  // slots taken before the token looked up last
};
struct SendShared {
  u32 has[kColumns][kChunkWords];  // bit t: token t of the chunk goes there
  // With kByRank: tokens of earlier chunks for each rank, and `has` of ranks on other nodes.
  i32 before[kByRank ? kWorld : 1];
  u32 far_has[kByRank && kOthers > 0 ? kWorld : 1][kByRank && kOthers > 0 ? kChunkWords : 1];
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
  if (!p.num_tokens) return p.num_tokens_host;
  return p.num_tokens_is_int64 ? *p.num_tokens.as<const i64>() : *p.num_tokens.as<const i32>();
}
// Returns it checked; 0 after raising a fault.
__device__ inline i32 check_num_tokens(const DispatchParams& p, u64 step, i64 n) {
  const i64 room = p.num_chunks == 1 ? p.num_slots : static_cast<i64>(p.num_chunks) * kChunk;
  const i64 most = p.num_rows < room ? p.num_rows : room;
  if (n >= 0 && n <= most) return static_cast<i32>(n);
  if (threadIdx.x == 0)
    raise_fault(p.comm, kTooManyTokens, Phase::kDispatch, p.comm.rank, step, static_cast<u64>(most),
                static_cast<u64>(n));
  return 0;
}

// Entry i of topk_idx; -1 = none.
__device__ __forceinline__ i64 id_at(const DispatchParams& p, i64 i) {
  return p.topk_is_int64 ? __ldg(p.topk_idx.as<const i64>() + i)
                         : __ldg(p.topk_idx.as<const i32>() + i);
}
// Its low word: all that is needed once route_chunk() has reported entries out of range. No thread
// waits for it before expert_of().
__device__ __forceinline__ i32 ask_id(const DispatchParams& p, i64 i) {
  return __ldg(p.topk_idx.as<const i32>() + (i << p.topk_is_int64));
}
__device__ __forceinline__ i32 expert_of(i64 id) {
  return id >= 0 && id < kExperts ? static_cast<i32>(id) : -1;
}

__device__ __forceinline__ i32 column_of(const Self& self, i32 rank) {
  return self.same_node(rank) ? rank % kLocal : kLocal + rank / kLocal;
}

// Calls each(id) for the entries of a token, read together.
template <typename Each>
__device__ __forceinline__ void for_each_id(const DispatchParams& p, i32 token, const Each& each) {
  constexpr i32 kAtOnce = kTopk < 8 ? kTopk : 8;
  for (i32 first = 0; first < kTopk; first += kAtOnce) {
    i64 id[kAtOnce];
#pragma unroll
    for (i32 k = 0; k < kAtOnce; ++k)
      if (first + k < kTopk) id[k] = id_at(p, static_cast<i64>(token) * kTopk + first + k);
#pragma unroll
    for (i32 k = 0; k < kAtOnce; ++k)
      if (first + k < kTopk) each(id[k]);
  }
}

// A set of numbers below kCount, in registers.
template <i32 kCount>
struct Bits {
  static constexpr i32 kWords = (kCount + 31) / 32;
  u32 word[kWords] = {};

  __device__ __forceinline__ void add(i32 i) {
#pragma unroll
    for (i32 w = 0; w < kWords; ++w)
      if (i / 32 == w) word[w] |= 1u << (i % 32);
  }
  // Returns which lanes have i, a constant of an unrolled loop.
  __device__ __forceinline__ u32 lanes_with(i32 i) const {
    return __ballot_sync(~0u, word[i / 32] >> (i % 32) & 1);
  }
};

// Finds where the chunk's tokens go. Returns false if the step's slot did not become free.
__device__ inline bool route_chunk(const Sender& a, u64 step, i32 chunk, bool tell) {
  const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
  if constexpr (kByRank && kOthers > 0) {
    for (i32 i = thread; i < kWorld * kChunkWords; i += kBlockThreads) (&a.s.far_has[0][0])[i] = 0;
    __syncthreads();
  }
  // The last warp waits until the step's slot is free, the others read the routing table.
  constexpr i32 kRouters = kBlockThreads / 32 - 1;
  if (thread / 32 == kRouters) return __syncthreads_and(wait_free(a.p.comm, a.self, step, lane));
  for (i32 w = thread / 32; w < kChunkWords; w += kRouters) {
    const i32 at = w * 32 + lane, token = chunk * kChunk + at;
    Bits<kColumns> columns;
    if (at < kChunk && token < a.num_tokens)
      for_each_id(a.p, token, [&](i64 id) {
        if (const i32 e = expert_of(id); e >= 0) {
          const i32 rank = owner_of(a.p.comm, e).rank;
          columns.add(column_of(a.self, rank));
          if constexpr (kByRank && kOthers > 0)
            if (!a.self.same_node(rank)) atomicOr(&a.s.far_has[rank][w], 1u << lane);
        } else if (id != -1 && tell) {
          raise_fault(a.p.comm, kBadExpert, Phase::kDispatch, a.self.rank, step,
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

// Adds the experts of entries [from, end) of the call's topk_idx to `seen`.
__device__ inline void count_experts(const DispatchParams& p, i32* seen, i64 from, i64 end,
                                     i32 thread, i32 num_threads) {
  constexpr i32 kAtOnce = 4;  // loads under way together
  for (i64 first = from + thread; first < end; first += num_threads * kAtOnce) {
    i32 id[kAtOnce];
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
      if (const i64 i = first + j * num_threads; i < end) id[j] = ask_id(p, i);
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
      if (first + j * num_threads < end)
        if (const i32 e = expert_of(id[j]); e >= 0) atomicAdd(&seen[e], 1);
  }
}

// Adds to `tokens` how many of the call's first tokens are for each rank.
__device__ inline void count_tokens(const DispatchParams& p, i32* tokens, i32 num_tokens) {
  const i32 thread = static_cast<i32>(threadIdx.x), lane = thread % 32;
  i32 count[Bits<kWorld>::kWords] = {};  // of ranks lane, lane + 32, ...
  for (i32 first = thread - lane; first < num_tokens; first += kBlockThreads) {
    Bits<kWorld> ranks;
    if (first + lane < num_tokens)
      for_each_id(p, first + lane, [&](i64 id) {
        if (const i32 e = expert_of(id); e >= 0) ranks.add(owner_of(p.comm, e).rank);
      });
    __syncwarp();
#pragma unroll
    for (i32 rank = 0; rank < kWorld; ++rank) {
      const u32 with = ranks.lanes_with(rank);
      if (lane == rank % 32) count[rank / 32] += __popc(with);
    }
  }
#pragma unroll
  for (i32 w = 0; w < Bits<kWorld>::kWords; ++w)
    if (const i32 rank = w * 32 + lane; rank < kWorld && count[w] > 0)
      atomicAdd(&tokens[rank], count[w]);
}

// Returns how many of tokens [from, to) of the chunk are in `has`.
__device__ inline i32 tokens_between(const u32* has, i32 from, i32 to) {
  i32 count = 0;
  for (i32 w = from / 32; w <= to / 32; ++w) {
    u32 bits = has[w];
    if (w == from / 32) bits &= ~0u << (from % 32);
    if (w == to / 32) bits &= (1u << (to % 32)) - 1;
    count += __popc(bits);
  }
  return count;
}
__device__ inline i32 tokens_before(const u32* has, i32 token) {
  i32 count = 0;
  for (i32 w = 0; w < token / 32; ++w) count += __popc(has[w]);
  return count + __popc(has[token / 32] & ((1u << (token % 32)) - 1));
}
__device__ inline i32 tokens_in(const u32* has) {
  i32 count = 0;
  for (i32 w = 0; w < kChunkWords; ++w) count += __popc(has[w]);
  return count;
}

// Finds the slots of a token. Called by the threads of its worker; `before`: the token they looked
// up last.
template <typename W>
__device__ inline void find_slots(const Sender& a, const W& worker, i32 chunk, i32 before,
                                  i32 token, bool tell, SendScratch& w) {
  const i32 at = token - chunk * kChunk, from = max(before - chunk * kChunk, 0);
  for (i32 column = worker.thread; column < kColumns; column += W::kThreads) {
    const u32* has = a.s.has[column];
    const i32 passed = (from > 0 ? w.passed[column] : 0) + tokens_between(has, from, at);
    const i32 slot = has[at / 32] >> (at % 32) & 1 ? passed : -1;
    w.passed[column] = passed;
    w.slot[column] = slot;
    if (tell) a.handle.send_slots(token)[column] = slot;
  }
}

// With kByRank: returns how many of the call's tokens for `rank` come before token `at` of the
// chunk, which has `slot` in the inbox of an own-node rank.
__device__ inline i32 rank_position(const Sender& a, i32 rank, i32 at, i32 slot) {
  if constexpr (kOthers > 0)
    if (!a.self.same_node(rank)) slot = tokens_before(a.s.far_has[rank], at);
  return a.s.before[rank] + slot;
}
// Adds the chunk's tokens for the next one. Called between two barriers of the block.
__device__ inline void add_chunk(const Sender& a) {
  for (i32 rank = static_cast<i32>(threadIdx.x); rank < kWorld; rank += kBlockThreads) {
    const u32* has = a.s.has[rank % kLocal];
    if constexpr (kOthers > 0)
      if (!a.self.same_node(rank)) has = a.s.far_has[rank];
    a.s.before[rank] += tokens_in(has);
  }
}

// Called when an item of part `index` of an outbox is written: a slot, or header and counts, which
// belong to the first part. The last item of a part rings.
__device__ inline void outbox_part(const Sender& a, u64 step, i32 node, i32 index) {
  u32* words = state_words<u32>(a.p.comm, kWords.outbox);
  const RegionPart part =
      region_part(kOutboxSlots, a.p.parts.slot_bytes, tokens_in(a.s.has[kLocal + node]), index);
  const auto last = static_cast<u32>(part.num_slots - (index == 0 ? 0 : 1));
  u32* word = &words[(slot_of(step) * kNodes + node) * kMaxParts + index];
  if (atom_inc_acq_rel_gpu_u32(word, last) != last) return;
  ring(a.p.comm, Phase::kDispatch, step, a.self.local, node, part);
}

// Stores count i of this call where `rank` reads it.
__device__ __forceinline__ void tell_count(const Sender& a, u64 step, i32 rank, i32 i, i32 count) {
  const i32 l = rank % kLocal, slot = slot_of(step);
  if (!a.self.same_node(rank)) {
    const i32 other = other_index(rank / kLocal, a.self.node);
    char* region = outbox_at(a.p.comm.data[a.self.local], slot, other);
    behind_header<i32>(region)[l * kCountsPerRank + i] = count;
    return;
  }
  char* region = inbox_at(a.p.comm.data[l], slot, a.self.local);
  if constexpr (kSelfFlagged) {
    st_tagged(behind_header<u64>(region) + i, step, static_cast<u32>(count));
  } else {
    behind_header<i32>(region)[i] = count;
  }
}

// Sends the counts of the whole call, with the first chunk. Only kByRank needs counts by rank.
__device__ inline void send_counts(const Sender& a, u64 step) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  SendScratch& w = a.s.worker[0];
  constexpr i32 kSeen = sizeof(w.seen) / sizeof(w.seen[0]);
  for (i32 i = thread; i < kSeen; i += kBlockThreads) w.seen[i] = 0;
  __syncthreads();
  count_experts(a.p, w.seen, 0, static_cast<i64>(a.num_tokens) * kTopk, thread, kBlockThreads);
  if constexpr (kByRank) count_tokens(a.p, w.seen + kExperts, a.num_tokens);
  __syncthreads();
  for (i32 e = thread; e < kExperts; e += kBlockThreads) {
    const Owner owner = owner_of(a.p.comm, e);
    if constexpr (kMasks)
      if (is_masked(a.p.comm, owner.rank)) continue;
    tell_count(a, step, owner.rank, owner.local, w.seen[e]);
  }
  if constexpr (kByRank)
    for (i32 rank = thread; rank < kWorld; rank += kBlockThreads)
      if (!is_masked(a.p.comm, rank))
        tell_count(a, step, rank, kMaxLocalExperts, w.seen[kExperts + rank]);
  __syncthreads();
  for (i32 i = thread; i < kSeen; i += kBlockThreads) w.seen[i] = 0;
}

// Sends headers for all columns, and with the first chunk the counts. Called by one block; early,
// because receivers place rows by them.
__device__ inline void send_headers(const Sender& a, u64 step, i32 chunk) {
  const i32 thread = static_cast<i32>(threadIdx.x), slot = slot_of(step);
  const u64 own = a.p.comm.data[a.self.local];
  const u32 flags = wire_flags(a.p);
  if (chunk == 0) send_counts(a, step);
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    if constexpr (kMasks)
      if (speaker_masked(a.p.comm, a.self, i)) continue;
    const i32 column = i < kLocal ? i : kLocal + other_node(i - kLocal, a.self.node);
    char* region = i < kLocal ? inbox_at(a.p.comm.data[i], slot, a.self.local)
                              : outbox_at(own, slot, i - kLocal);
    RegionHeader* header = region_header(region);
    const auto num_tokens = static_cast<u32>(tokens_in(a.s.has[column]));
    if (kSelfFlagged && i < kLocal) {
      st_tagged(&header->told[0], step, num_tokens);
      st_tagged(&header->told[1], step, told_shape(flags, a.p.parts.slot_bytes));
    }
    header->describe(num_tokens, flags, a.p.parts.slot_bytes);
  }
  __syncthreads();
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    if constexpr (kMasks)
      if (speaker_masked(a.p.comm, a.self, i)) continue;
    if (i < kLocal) {
      // The flag of header and counts; pairs with wait_dispatch() of rank i. Where rows flag
      // themselves it only means that this rank has read what rank i sent it in earlier steps.
      st_release_sys_u64(header_word(inbox_at(a.p.comm.data[i], slot, a.self.local)), step + 1);
    } else {
      *header_word(outbox_at(own, slot, i - kLocal)) = step + 1;
      outbox_part(a, step, other_node(i - kLocal, a.self.node), 0);
    }
  }
  __syncthreads();
}

}  // namespace moe_p2p::device
