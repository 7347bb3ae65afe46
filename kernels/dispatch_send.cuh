// Dispatch, sending half: each token once into the outbox for every other node that owns one of its
// experts, and once to every rank of the own node that does, by stores over NVLink. Every block works
// out slot numbers and positions by itself from the routing table, so blocks never wait for each other
// and the result does not depend on their order.
#pragma once

#include "kernels/device/quantize.cuh"
#include "kernels/device/steps.cuh"
#include "kernels/device/worker.cuh"

namespace moe_p2p::device {

inline constexpr DType kXType = static_cast<DType>(MOE_P2P_X_DTYPE);  // as the caller gives it
inline constexpr bool kQuantize = MOE_P2P_QUANTIZE;
inline constexpr DType kWireType = kQuantize ? DType::kFloat8E4M3 : kXType;
inline constexpr u32 kWireFlags = static_cast<u32>(kWireType) << kDTypeShift;
inline constexpr i32 kPayloadVecs = static_cast<i32>(kHidden * item_bytes(kWireType) / sizeof(Vec));
inline constexpr i32 kHeadBytes = static_cast<i32>(slot_head_bytes(kTopk));
inline constexpr i32 kHeadWords = kHeadBytes / 4;

// A payload passes through the registers of a worker in kPieces rounds of kVecs vectors per thread.
template <typename W>
struct Rounds {
  static constexpr i32 kAll = (kPayloadVecs + W::kThreads - 1) / W::kThreads;
  static constexpr i32 kPieces = (kAll + 7) / 8;
  static constexpr i32 kVecs = (kAll + kPieces - 1) / kPieces;

  __device__ __forceinline__ static i32 at(const W& worker, i32 piece, i32 i) {
    return (piece * kVecs + i) * W::kThreads + worker.thread;
  }
};

struct SendScratch {
  i32 seen[kExperts];    // how many earlier tokens of the call name the expert
  u32 head[kHeadWords];  // of the token at hand
  float scale[kScales];
  i32 slot[kColumns];  // -1 = does not go there
};
struct SendShared {
  u32 has[kColumns][kChunkWords];  // bit t: token t of the chunk goes there
  SendScratch worker[SendWorker::kCount];
};

struct Sender {
  const DispatchParams& p;
  const Self self;
  const HandleArrays handle;
  const i32 num_tokens;
  SendShared& s;
};

// num_tokens of this call; 0 after telling a fault.
__device__ inline i32 read_num_tokens(const DispatchParams& p, u64 step) {
  i64 n = p.num_tokens_host;
  if (p.num_tokens)
    n = p.num_tokens_is_int64 ? *reinterpret_cast<const i64*>(p.num_tokens)
                              : *reinterpret_cast<const i32*>(p.num_tokens);
  const i64 room = static_cast<i64>(p.num_chunks) * kChunk;
  const i64 most = p.num_rows < room ? p.num_rows : room;
  if (n >= 0 && n <= most) return static_cast<i32>(n);
  if (threadIdx.x == 0)
    raise_fault(p.comm, kTooManyTokens, Phase::kDispatch, p.comm.rank, step, static_cast<u64>(most),
                static_cast<u64>(n));
  return 0;
}

// Entry i of topk_idx; -1 = none. Entries out of range were told by route_chunk().
__device__ __forceinline__ i64 raw_expert(const DispatchParams& p, i64 i) {
  return p.topk_is_int64 ? __ldg(reinterpret_cast<const i64*>(p.topk_idx) + i)
                         : __ldg(reinterpret_cast<const i32*>(p.topk_idx) + i);
}
__device__ __forceinline__ i32 expert_at(const DispatchParams& p, i64 i) {
  const i64 id = raw_expert(p, i);
  return id >= 0 && id < kExperts ? static_cast<i32>(id) : -1;
}

__device__ __forceinline__ i32 column_of(const Self& self, i32 rank) {
  return self.same_node(rank) ? rank % kLocal : kLocal + rank / kLocal;
}

// Where the chunk's tokens go. False: the slot of the step did not get free.
__device__ inline bool route_chunk(const Sender& a, u64 step, i32 chunk, bool tell) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  auto* has = &a.s.has[0][0];
  for (i32 i = thread; i < kColumns * kChunkWords; i += kBlockThreads) has[i] = 0;
  __syncthreads();
  // The last warp looks whether the step's slot is free, the others at the routing table.
  constexpr i32 kRouters = kBlockThreads - 32;
  if (thread >= kRouters)
    return __syncthreads_and(wait_free(a.p.comm, a.self, step, thread - kRouters));
  const i32 begin = chunk * kChunk;
  const i32 num_ids = min(max(a.num_tokens - begin, 0), kChunk) * kTopk;
  constexpr i32 kAtOnce = 4;  // loads under way together
  for (i32 first = thread; first < num_ids; first += kRouters * kAtOnce) {
    i64 id[kAtOnce];
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
      if (const i32 i = first + j * kRouters; i < num_ids)
        id[j] = raw_expert(a.p, static_cast<i64>(begin) * kTopk + i);
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j) {
      const i32 i = first + j * kRouters, token = i / kTopk;
      if (i >= num_ids) continue;
      if (id[j] >= 0 && id[j] < kExperts) {
        const i32 column = column_of(a.self, owner_of(a.p.comm, static_cast<i32>(id[j])).rank);
        atomicOr(&a.s.has[column][token / 32], 1u << (token % 32));
      } else if (id[j] != -1 && tell) {
        raise_fault(a.p.comm, kBadExpert, Phase::kDispatch, a.self.rank, step,
                    static_cast<u64>(begin + token), static_cast<u64>(id[j]));
      }
    }
  }
  return __syncthreads_and(true);
}

// Adds the experts of tokens [from, to) of the call to `seen`.
__device__ inline void count_experts(const DispatchParams& p, i32* seen, i32 from, i32 to,
                                     i32 thread, i32 num_threads) {
  for (i64 i = static_cast<i64>(from) * kTopk + thread; i < static_cast<i64>(to) * kTopk;
       i += num_threads)
    if (const i32 e = expert_at(p, i); e >= 0) atomicAdd(&seen[e], 1);
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

// One of the parts of an outbox is written: a slot, or header and counts. The last one rings.
__device__ inline void outbox_part(const Sender& a, u64 step, i32 node) {
  auto* words = reinterpret_cast<u32*>(a.p.comm.state + kWords.outbox);
  const i32 num_slots = tokens_in(a.s.has[kLocal + node]);
  const u32 last = static_cast<u32>(num_slots);  // of num_slots + 1 parts
  if (atom_inc_acq_rel_gpu_u32(&words[slot_of(step) * kNodes + node], last) != last) return;
  ring(a.p.comm, Phase::kDispatch, step, a.self.local, node,
       kOutboxSlots + static_cast<u64>(num_slots) * a.p.parts.slot_bytes);
}

// Headers for all columns, from one block, and with the first chunk the expert counts of the whole
// call. Early, because receivers place rows by them.
__device__ inline void send_headers(const Sender& a, u64 step, i32 chunk) {
  const i32 thread = static_cast<i32>(threadIdx.x), slot = slot_of(step);
  const u64 own = a.p.comm.data[a.self.local];
  i32* seen = a.s.worker[0].seen;
  if (chunk == 0) {
    for (i32 e = thread; e < kExperts; e += kBlockThreads) seen[e] = 0;
    __syncthreads();
    count_experts(a.p, seen, 0, a.num_tokens, thread, kBlockThreads);
    __syncthreads();
    for (i32 e = thread; e < kExperts; e += kBlockThreads) {
      const Owner owner = owner_of(a.p.comm, e);
      const bool near = a.self.same_node(owner.rank);
      const i32 l = owner.rank % kLocal, node = owner.rank / kLocal;
      char* region = near ? inbox_at(a.p.comm.data[l], slot, a.self.local)
                          : outbox_at(own, slot, other_index(node, a.self.node));
      auto* counts = reinterpret_cast<i32*>(region + sizeof(RegionHeader));
      counts[(near ? 0 : l * kMaxLocalExperts) + owner.local] = seen[e];
    }
  }
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    const i32 column = i < kLocal ? i : kLocal + other_node(i - kLocal, a.self.node);
    char* region = i < kLocal ? inbox_at(a.p.comm.data[i], slot, a.self.local)
                              : outbox_at(own, slot, i - kLocal);
    fill_header(region, static_cast<u32>(tokens_in(a.s.has[column])), kWireFlags,
                a.p.parts.slot_bytes);
  }
  __syncthreads();
  for (i32 i = thread; i < kSpeakers; i += kBlockThreads) {
    if (i < kLocal) {
      // The flag of header and counts; pairs with wait_dispatch() of rank i.
      st_release_sys_u64(header_word(inbox_at(a.p.comm.data[i], slot, a.self.local)), step + 1);
    } else {
      *header_word(outbox_at(own, slot, i - kLocal)) = step + 1;
      outbox_part(a, step, other_node(i - kLocal, a.self.node));
    }
  }
  if (chunk == 0)
    for (i32 e = thread; e < kExperts; e += kBlockThreads) seen[e] = 0;
  __syncthreads();
}

// The payload bytes of this thread in one piece of the row.
struct Payload {
  using R = Rounds<SendWorker>;
  static constexpr i32 kVecs = R::kVecs;
  static constexpr i32 kSources =
      kQuantize ? 16 / Values<kXType>::kCount : 1;  // vectors of x in one
  // A thread with a single vector asks for its part of x before it has looked at the routing.
  static constexpr bool kEarly = R::kPieces == 1 && kVecs == 1;
  Vec vec[kVecs];
  Vec early[kEarly ? kSources : 1];

  __device__ __forceinline__ static const char* row_of(const DispatchParams& p, i32 token) {
    return reinterpret_cast<const char*>(p.x) +
           static_cast<i64>(token) * kHidden * static_cast<i64>(item_bytes(kXType));
  }
  __device__ __forceinline__ static Vec read(const char* row, i32 where, i32 source) {
    return where < kPayloadVecs ? ld_nc_v4(row + (where * kSources + source) * 16) : Vec{};
  }
  __device__ __forceinline__ void ask(const DispatchParams& p, const SendWorker& worker,
                                      i32 token) {
    if constexpr (kEarly)
#pragma unroll
      for (i32 j = 0; j < kSources; ++j) early[j] = read(row_of(p, token), worker.thread, j);
  }

  __device__ __forceinline__ void load(const DispatchParams& p, const SendWorker& worker, i32 token,
                                       i32 piece, float* scales) {
    const char* row = row_of(p, token);
    if constexpr (!kQuantize) {
#pragma unroll
      for (i32 i = 0; i < kVecs; ++i)
        vec[i] = kEarly ? early[0] : read(row, R::at(worker, piece, i), 0);
    } else {
      constexpr i32 kAtOnce = kVecs < 2 ? 1 : 2;  // vectors whose loads are under way together
#pragma unroll
      for (i32 first = 0; first < kVecs; first += kAtOnce) {
        Vec raw[kAtOnce][kSources];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (i32 j = 0; j < kSources; ++j)
            raw[i][j] = kEarly ? early[j] : read(row, R::at(worker, piece, first + i), j);
#pragma unroll
        for (i32 i = 0; i < kAtOnce && first + i < kVecs; ++i) {
          constexpr i32 kPerVec = Values<kXType>::kCount;
          float f[16], scale;
#pragma unroll
          for (i32 j = 0; j < kSources; ++j) Values<kXType>::load(raw[i][j], f + j * kPerVec);
          vec[first + i] = quantize16(f, scale);
          const i32 where = R::at(worker, piece, first + i);
          if (where % 8 == 0 && where < kPayloadVecs) scales[where / 8] = scale;
        }
      }
    }
  }
  __device__ __forceinline__ void store(const SendWorker& worker, i32 piece, char* to) const {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i)
      if (R::at(worker, piece, i) < kPayloadVecs)
        st_na_v4(to + R::at(worker, piece, i) * 16, vec[i]);
  }
};

// Everything of a slot but payload and scales, in shared memory. `seen` counts the tokens before it.
__device__ inline void build_head(const Sender& a, const SendWorker& worker, u64 step, i32 token,
                                  SendScratch& w) {
  const i32 thread = worker.thread;
  auto* head = reinterpret_cast<char*>(w.head);
  if (thread < kTopk) {
    const i64 i = static_cast<i64>(token) * kTopk + thread;
    const i32 e = expert_at(a.p, i);
    reinterpret_cast<u16*>(head + expert_ids_offset())[thread] =
        e < 0 ? kNoExpert : static_cast<u16>(e);
    reinterpret_cast<i32*>(head + positions_offset(kTopk))[thread] = e < 0 ? 0 : w.seen[e];
    reinterpret_cast<float*>(head + weights_offset(kTopk))[thread] =
        a.p.topk_weights ? reinterpret_cast<const float*>(a.p.topk_weights)[i] : 1.0f;
  }
  if (thread == 32)
    *reinterpret_cast<SlotHead*>(head) = {static_cast<u32>(step + 1), static_cast<u32>(token)};
}

template <typename W>
__device__ inline void copy_words(const W& worker, char* to, const char* from, u64 bytes) {
  for (u64 i = static_cast<u64>(worker.thread) * 4; i < bytes; i += W::kThreads * 4)
    *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(from + i);
}

// Head, scales and extras.
__device__ inline void store_rest(const Sender& a, const SendWorker& worker, i32 token, char* to,
                                  const SendScratch& w) {
  const DispatchParams& p = a.p;
  for (i32 i = worker.thread; i < kHeadWords; i += SendWorker::kThreads)
    reinterpret_cast<u32*>(to)[i] = w.head[i];
  if (p.parts.bytes[1]) {
    const auto* scales =
        kQuantize ? reinterpret_cast<const char*>(w.scale)
                  : reinterpret_cast<const char*>(p.scales) + static_cast<i64>(token) * kScales * 4;
    copy_words(worker, to + p.parts.offset[1], scales, p.parts.bytes[1]);
  }
  for (i32 e = 0; e < p.num_extras; ++e) {
    const u64 bytes = p.parts.bytes[2 + e];
    const auto* from =
        reinterpret_cast<const char*>(p.extras[e].data) + static_cast<u64>(token) * bytes;
    for (u64 b = static_cast<u64>(worker.thread); b < bytes; b += SendWorker::kThreads)
      to[p.parts.offset[2 + e] + b] = from[b];
  }
}

// The token into its slots in columns [first, last). `payload` holds its first piece.
template <typename SlotAt>
__device__ inline void store_slots(const Sender& a, const SendWorker& worker, i32 token, i32 count,
                                   const SlotAt& slot_at, Payload& payload, SendScratch& w) {
#pragma unroll
  for (i32 piece = 0; piece < Rounds<SendWorker>::kPieces; ++piece) {
    if (Rounds<SendWorker>::kPieces > 1) payload.load(a.p, worker, token, piece, w.scale);
#pragma unroll 1
    for (i32 i = 0; i < count; ++i)
      if (char* to = slot_at(i)) payload.store(worker, piece, to + kHeadBytes);
  }
  if (Rounds<SendWorker>::kPieces > 1 && kQuantize) worker.sync();  // all scales are there
#pragma unroll 1
  for (i32 i = 0; i < count; ++i)
    if (char* to = slot_at(i)) store_rest(a, worker, token, to, w);
}

// `payload` has been asked for.
__device__ inline void send_token(const Sender& a, const SendWorker& worker, u64 step, i32 chunk,
                                  i32 token, i32& counted, Payload& payload) {
  const i32 thread = worker.thread, slot = slot_of(step);
  const DispatchParams& p = a.p;
  SendScratch& w = a.s.worker[worker.place];
  const auto slot_in = [&](char* region, u64 offset, i32 column) {
    return w.slot[column] < 0
               ? nullptr
               : region + offset + static_cast<u64>(w.slot[column]) * p.parts.slot_bytes;
  };
  if (!Payload::kEarly && Rounds<SendWorker>::kPieces == 1)
    payload.load(p, worker, token, 0, w.scale);
  count_experts(p, w.seen, counted, token, thread, SendWorker::kThreads);
  counted = token;
  for (i32 column = thread; column < kColumns; column += SendWorker::kThreads) {
    const u32* has = a.s.has[column];
    const i32 at = token - chunk * kChunk;
    const i32 place = has[at / 32] >> (at % 32) & 1 ? tokens_before(has, at) : -1;
    w.slot[column] = place;
    a.handle.send_slots(token)[column] = place;
  }
  if (Payload::kEarly) payload.load(p, worker, token, 0, w.scale);
  worker.sync();
  build_head(a, worker, step, token, w);
  worker.sync();
  if constexpr (kOthers > 0) {
    store_slots(
        a, worker, token, kOthers,
        [&](i32 i) {
          return slot_in(outbox_at(p.comm.data[a.self.local], slot, i), kOutboxSlots,
                         kLocal + other_node(i, a.self.node));
        },
        payload, w);
    worker.sync();
    for (i32 i = thread; i < kOthers; i += SendWorker::kThreads)
      if (const i32 node = other_node(i, a.self.node); w.slot[kLocal + node] >= 0)
        outbox_part(a, step, node);
  }
  store_slots(
      a, worker, token, kLocal,
      [&](i32 i) {
        const i32 l = (a.self.local + i) % kLocal;  // not all sources to rank 0 first
        return slot_in(inbox_at(p.comm.data[l], slot, a.self.local), kInboxSlots, l);
      },
      payload, w);
  worker.sync();
  // The slot's flag, after every thread's stores; pairs with the wait in recv_slot() of rank l.
  for (i32 l = thread; l < kLocal; l += SendWorker::kThreads)
    if (w.slot[l] >= 0)
      st_release_sys_u32(inbox_flags_at(p.comm.data[l], slot, a.self.local) + w.slot[l],
                         static_cast<u32>(step + 1));
}

__device__ inline void dispatch_send(const DispatchParams& p, u64 first_step, i32 block) {
  const i32 num_blocks = p.grid.num_send_blocks, thread = static_cast<i32>(threadIdx.x);
  const SendWorker worker = SendWorker::of(block, num_blocks);
  Payload payload;
  if (worker.id < p.num_rows) payload.ask(p, worker, worker.id);
  const Sender a{p, Self(p.comm), HandleArrays(p.handle, p.num_chunks),
                 read_num_tokens(p, first_step), shared<SendShared>()};
  if (block == 0 && thread == 0)
    a.handle.meta() = {HandleMeta::kMagic, p.comm.communicator, first_step, p.num_chunks,
                       a.num_tokens,       p.num_rows,          kSent,      {}};
  for (i32 i = thread; i < SendWorker::kCount * kExperts; i += kBlockThreads)
    a.s.worker[i / kExperts].seen[i % kExperts] = 0;
  i32 counted = 0;  // tokens in `seen`
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = first_step + static_cast<u64>(chunk);
    if (!route_chunk(a, step, chunk, block == 0)) return;
    if (block == num_blocks - 1) send_headers(a, step, chunk);  // it has the fewest tokens
    // Rows past the last chunk are sent nowhere, like those past num_tokens.
    const i32 end = chunk + 1 == p.num_chunks ? p.num_rows : min((chunk + 1) * kChunk, p.num_rows);
    for (i32 token = chunk * kChunk + worker.id; token < end; token += worker.count) {
      if (token < a.num_tokens) {
        if (chunk > 0 || token != worker.id) payload.ask(p, worker, token);
        send_token(a, worker, step, chunk, token, counted, payload);
        continue;
      }
      for (i32 column = worker.thread; column < kColumns; column += SendWorker::kThreads)
        a.handle.send_slots(token)[column] = -1;
    }
    __syncthreads();  // the next chunk's routing takes the place of this one's
  }
}

}  // namespace moe_p2p::device
