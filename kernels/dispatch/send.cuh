// Dispatch, sending half: each token once into the outbox for every other node that owns one of its
// experts, and once to every rank of the own node that does, by stores over NVLink. route.cuh finds
// where it goes.
#pragma once

#include "kernels/dispatch/route.cuh"

namespace moe_p2p::device {

// 16-byte vectors of x that a thread holds while the routing is read: more where a block has the
// registers of a multiprocessor to itself, or nearly.
inline constexpr i32 kMostEarly = kBlockThreads * MOE_P2P_BLOCKS_PER_SM <= 512 ? 8 : 2;

// The payload bytes of this thread in one piece of the row.
struct Payload {
  using R = Rounds<SendWorker>;
  static constexpr i32 kVecs = R::kVecs;
  static constexpr i32 kSources =
      kQuantize ? 16 / Values<kXType>::kCount : 1;  // vectors of x in one
  // A thread with few vectors asks for its values of x before it has read the routing.
  static constexpr bool kEarly = R::kPieces == 1 && kVecs * kSources <= kMostEarly;
  Vec vec[kVecs];
  Vec early[kEarly ? kVecs : 1][kEarly ? kSources : 1];

  __device__ __forceinline__ static const char* row_of(const DispatchParams& p, i32 token) {
    return p.x.as<const char>() +
           static_cast<i64>(token) * kHidden * static_cast<i64>(item_bytes(kXType));
  }
  __device__ __forceinline__ static Vec read(const char* row, i32 where, i32 source) {
    return where < kPayloadVecs ? ld_nc_v4(row + (where * kSources + source) * 16) : Vec{};
  }
  __device__ __forceinline__ void ask(const DispatchParams& p, const SendWorker& worker,
                                      i32 token) {
    if constexpr (kEarly)
#pragma unroll
      for (i32 i = 0; i < kVecs; ++i)
#pragma unroll
        for (i32 j = 0; j < kSources; ++j)
          early[i][j] = read(row_of(p, token), R::at(worker, 0, i), j);
  }

  __device__ __forceinline__ void load(const DispatchParams& p, const SendWorker& worker, i32 token,
                                       i32 piece, float* scales) {
    const char* row = row_of(p, token);
    if constexpr (!kQuantize) {
#pragma unroll
      for (i32 i = 0; i < kVecs; ++i)
        vec[i] = kEarly ? early[kEarly ? i : 0][0] : read(row, R::at(worker, piece, i), 0);
    } else {
      constexpr i32 kAtOnce = kVecs < 2 ? 1 : 2;  // vectors whose loads are under way together
#pragma unroll
      for (i32 first = 0; first < kVecs; first += kAtOnce) {
        Vec raw[kAtOnce][kSources];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i)
#pragma unroll
          for (i32 j = 0; j < kSources; ++j)
            raw[i][j] = !kEarly ? read(row, R::at(worker, piece, first + i), j)
                        : first + i < kVecs
                            ? early[kEarly ? (first + i) % kVecs : 0][kEarly ? j : 0]
                            : Vec{};
        float amax[kAtOnce];
#pragma unroll
        for (i32 i = 0; i < kAtOnce; ++i) amax[i] = max_magnitude<kXType, kSources>(raw[i]);
        const float scale = find_scales<kScaleFormat>(amax);
#pragma unroll
        for (i32 i = 0; i < kAtOnce && first + i < kVecs; ++i) {
          vec[first + i] = to_e4m3<kXType>(raw[i], amax[i]);
          const i32 where = R::at(worker, piece, first + i);
          if (where % 8 == 4 + i && where / 8 * 8 < kPayloadVecs) scales[where / 8] = scale;
        }
      }
    }
  }
  // flag: the slot is self-flagged.
  __device__ __forceinline__ void store(const SendWorker& worker, i32 piece, char* to,
                                        bool flag) const {
#pragma unroll
    for (i32 i = 0; i < kVecs; ++i) {
      const i32 where = R::at(worker, piece, i);
      if (where >= kPayloadVecs) continue;
      if (kSelfFlagged && flag && !kOpaqueX) {
        st_flagged_v4(to + where * 16, vec[i]);
      } else {
        st_na_v4(to + where * 16, vec[i]);
      }
    }
  }
};

// One entry of a token's routing, held by each of its worker's first kTopk threads.
struct Entry {
  i32 id;
  float weight;

  __device__ __forceinline__ void ask(const DispatchParams& p, i32 token, i32 k) {
    if (k >= kTopk) return;
    const i64 i = static_cast<i64>(token) * kTopk + k;
    id = ask_id(p, i);
    weight = p.topk_weights ? __ldg(&p.topk_weights[i]) : 1.0f;
  }
};

// Builds the head of a slot in shared memory: all but payload, scales and extras. `seen` counts the
// tokens before this one, which is token `at` of the chunk.
template <typename W>
__device__ inline void build_head(const Sender& a, const W& worker, u64 step, i32 token, i32 at,
                                  const Entry& entry, const SendScratch& w, char* head) {
  const i32 thread = worker.thread;
  if (thread < kTopk) {
    const i32 e = expert_of(entry.id);
    slot_expert_ids(head)[thread] = e < 0 ? kNoExpert : static_cast<u16>(e);
    slot_positions<kTopk>(head)[thread] = e >= 0 ? Placement::position(a, w, e, at) : 0;
    slot_weights<kTopk>(head)[thread] = entry.weight;
  }
  if (thread == W::kThreads - 1)
    *slot_head(head) = {static_cast<u32>(step + 1), static_cast<u32>(token)};
}

// Reports duplicate experts. Runs after the token's slots are stored, so it delays nobody. Called
// by the threads that ran build_head().
__device__ inline void check_experts(const Sender& a, u64 step, i32 token, i32 thread,
                                     const char* head) {
  const u32 e = slot_expert_ids(head)[thread];
  const u32 alike = __match_any_sync(~0u >> (32 - kTopk), e == kNoExpert ? e + 1 + thread : e);
  if (alike & ((1u << thread) - 1))
    raise_fault(a.p.comm, kDuplicateExpert, Phase::kDispatch, a.self.rank, step,
                static_cast<u64>(token), e);
}

template <typename W>
__device__ inline void store_extras(const DispatchParams& p, const W& worker, i32 token, char* to) {
  for (i32 e = 0; e < num_extras(p); ++e) {
    const u64 bytes = p.parts.bytes[2 + e];
    const char* from = p.extras[e].data.get() + static_cast<u64>(token) * bytes;
    for (u64 b = static_cast<u64>(worker.thread); b < bytes; b += W::kThreads)
      to[p.parts.offset[2 + e] + b] = from[b];
  }
}

template <typename W>
__device__ inline void flag_words(const W& worker, char* to, const char* from, u64 bytes) {
#pragma unroll 1
  for (u64 i = static_cast<u64>(worker.thread) * 4; i < bytes; i += W::kThreads * 4)
    st_flagged_u32(to + i, *values_at<u32>(from, i));
}

// Stores head, scales and extras.
__device__ inline void store_rest(const Sender& a, const SendWorker& worker, i32 token, char* to,
                                  bool flag, const SendScratch& w) {
  const DispatchParams& p = a.p;
  const auto* head = reinterpret_cast<const char*>(w.head);
  const auto* scales = kQuantize
                           ? reinterpret_cast<const char*>(w.scale)
                           : p.scales.as<const char>() + static_cast<u64>(token) * p.parts.bytes[1];
  if (kSelfFlagged && flag) {
    flag_words(worker, to, head, kHeadBytes);
    if (!is_opaque(p)) return flag_words(worker, to + p.parts.offset[1], scales, p.parts.bytes[1]);
  } else {
    copy_words(worker, to, head, kHeadBytes);
  }
  copy_words(worker, to + p.parts.offset[1], scales, p.parts.bytes[1]);
  store_extras(p, worker, token, to);
}

// Workers share a token where there are more workers than tokens: each stores into every count-th
// slot.
__device__ inline Part part_of(const SendWorker& worker, i32 num_rows, i32 chunk_tokens) {
  const i32 most = (worker.count - SendWorker::kCount) / max(min(num_rows, chunk_tokens), 1);
  const i32 count = max(min(most, kColumns), 1);
  return {worker.id % count, count};
}

// Stores the token into this worker's share of `count` slots. `payload` holds its first piece.
template <typename SlotAt>
__device__ inline void store_slots(const Sender& a, const SendWorker& worker, const Part& part,
                                   i32 token, i32 count, const SlotAt& slot_at, bool flag,
                                   Payload& payload, SendScratch& w) {
#pragma unroll
  for (i32 piece = 0; piece < Rounds<SendWorker>::kPieces; ++piece) {
    if (Rounds<SendWorker>::kPieces > 1) payload.load(a.p, worker, token, piece, w.scale);
#pragma unroll 1
    for (i32 i = part.index; i < count; i += part.count)
      if (char* to = slot_at(i)) payload.store(worker, piece, to + kHeadBytes, flag);
  }
  if (Rounds<SendWorker>::kPieces > 1 && kQuantize) worker.sync();  // all scales are stored
#pragma unroll 1
  for (i32 i = part.index; i < count; i += part.count)
    if (char* to = slot_at(i)) store_rest(a, worker, token, to, flag, w);
}

// payload.ask() was called before.
__device__ inline void send_token(const Sender& a, const SendWorker& worker, const Part& part,
                                  u64 step, i32 chunk, i32 token, i32& counted, Payload& payload) {
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
  Placement::count(p, w.seen, static_cast<i64>(counted) * kTopk, static_cast<i64>(token) * kTopk,
                   thread, SendWorker::kThreads);
  find_slots(a, worker, chunk, counted, token, part.index == 0, w);
  counted = token;
  if (Payload::kEarly) payload.load(p, worker, token, 0, w.scale);
  worker.sync();
  Entry entry;
  entry.ask(p, token, thread);
  auto* head = reinterpret_cast<char*>(w.head);
  build_head(a, worker, step, token, token - chunk * chunk_of(p.comm), entry, w, head);
  worker.sync();
  if constexpr (kOthers > 0) {
    store_slots(
        a, worker, part, token, kOthers,
        [&](i32 i) {
          return slot_in(outbox_of(p.comm, a.self, slot, i), kOutboxSlots,
                         kLocal + other_node(i, a.self.node));
        },
        false, payload, w);
    worker.sync();
    for (i32 i = thread; i < kOthers; i += SendWorker::kThreads)
      if (const i32 node = other_node(i, a.self.node); w.slot[kLocal + node] >= 0 && part.has(i))
        report_written(a, step, node, w.slot[kLocal + node]);
  }
  store_slots(
      a, worker, part, token, kLocal,
      [&](i32 i) {
        const i32 l = (a.self.local + i) % kLocal;  // not all sources to rank 0 first
        return slot_in(inbox_at(p.comm, data_of(p.comm, l), slot, a.self.index_at(l)), kInboxSlots,
                       l);
      },
      true, payload, w);
  worker.sync();
  // The slot's flag, after every thread's stores; pairs with the wait in recv_slot() of rank l. A
  // thread reads only those places of `slot` that it writes for the next token.
  if (!kSelfFlagged || is_opaque(p))
#pragma unroll 1
    for (i32 l = thread; l < kLocal; l += SendWorker::kThreads)
      if (w.slot[l] >= 0 && part.has((l + kLocal - a.self.local) % kLocal))
        st_release_sys_u32(
            inbox_flags_at(p.comm, data_of(p.comm, l), slot, a.self.index_at(l)) + w.slot[l],
            flag_of(step));
  if (kTopk > 1 && part.index == 0 && thread < kTopk) check_experts(a, step, token, thread, head);
}

__device__ inline void store_meta(const Sender& a, u64 first_step, i32 block) {
  if (block == 0 && threadIdx.x == 0)
    a.handle.meta() = {.magic = HandleMeta::kMagic,
                       .communicator = communicator_of(a.p.comm),
                       .first_step = first_step,
                       .num_chunks = num_chunks_of(a.p),
                       .num_tokens = a.num_tokens,
                       .num_rows = a.p.num_rows,
                       .state = kSent,
                       .num_slots = a.p.num_slots};
}
__device__ inline void begin_send(const Sender& a, u64 first_step, i32 block) {
  store_meta(a, first_step, block);
  Placement::begin(a.s);
}

// Rows past the last chunk are sent nowhere, like those past num_tokens.
__device__ inline i32 end_of_chunk(const DispatchParams& p, i32 chunk) {
  return chunk + 1 == num_chunks_of(p) ? p.num_rows
                                       : min((chunk + 1) * chunk_of(p.comm), p.num_rows);
}

__device__ inline void end_chunk(const Sender& a) {
  __syncthreads();  // the next chunk's routing takes the place of this one's
  Placement::end_chunk(a);
}

// Copies topk_idx for a caller that overwrites it while the result is in use.
__device__ inline void copy_topk(const DispatchParams& p, i32 block) {
  if (!p.topk_copy) return;
  const i32 num_words = p.num_rows * kTopk * (p.topk_is_int64 ? 2 : 1);
  const u32* from = p.topk_idx.as<const u32>();
  u32* to = p.topk_copy.as<u32>();
  for (i32 i = block * kBlockThreads + static_cast<i32>(threadIdx.x); i < num_words;
       i += p.grid.num_send_blocks * kBlockThreads)
    to[i] = from[i];
}

// begin(): called by every block, once; it waits for the loads of Launch::ask(), so loads of the
// payload are issued before it.
template <typename Begin>
__device__ inline void dispatch_send(const DispatchParams& p, i32 block, const Begin& begin) {
  const i32 num_blocks = p.grid.num_send_blocks;
  const SendWorker worker = SendWorker::of(block, num_blocks);
  const Part part = part_of(worker, p.num_rows, chunk_of(p.comm));
  const SendWorker team = part.team(worker);
  Payload payload;
  if (team.id < p.num_rows) payload.ask(p, worker, team.id);
  EarlyRoutes early;
  early.ask(p);
  const i64 num_tokens = ask_num_tokens(p);
  auto& s = shared<SendShared>();
  Placement::begin(s);
  const auto [good, first_step, opens] = begin();
  if (!good) return;
  const Sender a{p, Self(p.comm), HandleArrays(p), check_num_tokens(p, first_step, num_tokens), s};
  store_meta(a, first_step, block);
  i32 counted = 0;  // tokens in `seen`
#pragma unroll 1
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = first_step + static_cast<u64>(chunk);
    const bool heads = block == num_blocks - 1;  // it has the fewest tokens
    if constexpr (EarlyRoutes::kOn) {
      if (!early.route(a, {step, chunk, block == 0, heads})) return;
    } else if (!route_chunk(a, {step, chunk, block == 0, false}, kChunkWords)) {
      return;
    }
    if constexpr (kMasks) drop_masked(a);
    if (heads) send_headers(a, step, chunk);
    const i32 end = end_of_chunk(p, chunk);
#pragma unroll 1
    for (i32 token = chunk * chunk_of(p.comm) + team.id; token < end; token += team.count) {
      if (token < a.num_tokens) {
        if (chunk > 0 || token != team.id) payload.ask(p, worker, token);
        send_token(a, worker, part, step, chunk, token, counted, payload);
        continue;
      }
#pragma unroll 1
      for (i32 column = worker.thread; column < kColumns; column += SendWorker::kThreads)
        a.handle.send_slots(token)[column] = -1;
    }
    if (chunk + 1 < num_chunks_of(p)) end_chunk(a);
  }
}

}  // namespace moe_p2p::device
