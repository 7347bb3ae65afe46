// Dispatch, sending half: each token once to every rank of the node that owns one of its experts, by
// stores over NVLink. Every block works out every slot number by itself from the routing table, so
// blocks never wait for each other and the result does not depend on their order.
#pragma once

#include "kernels/device/quantize.cuh"
#include "kernels/device/shape.cuh"
#include "kernels/device/wait.cuh"

namespace moe_p2p::device {

inline constexpr DType kXType = static_cast<DType>(MOE_P2P_X_DTYPE);  // as the caller gives it
inline constexpr bool kQuantize = MOE_P2P_QUANTIZE;
inline constexpr DType kWireType = kQuantize ? DType::kFloat8E4M3 : kXType;
inline constexpr i32 kPayloadVecs = static_cast<i32>(kHidden * item_bytes(kWireType) / sizeof(Vec));
inline constexpr i32 kHeadBytes = static_cast<i32>(slot_head_bytes(kTopk));
inline constexpr i32 kHeadWords = kHeadBytes / 4;

struct SendShared {
  u16 expert[kChunk * kTopk];    // global ids
  u32 has[kLocal][kChunkWords];  // bit t: token t goes to that rank
  u32 head[kHeadWords];          // of the token at hand
  float scale[kScales];
  i32 slot[kLocal];  // of the token at hand; -1 = not for that rank
  i32 count[MOE_P2P_MAX_LOCAL_EXPERTS];
  i32 num_tokens;
};

// num_tokens of this call; 0 after telling a fault.
__device__ inline i32 read_num_tokens(const DispatchParams& p, u64 step) {
  i64 n = p.num_tokens_host;
  if (p.num_tokens)
    n = p.num_tokens_is_int64 ? *reinterpret_cast<const i64*>(p.num_tokens)
                              : *reinterpret_cast<const i32*>(p.num_tokens);
  const i64 most = p.num_rows < kChunk ? p.num_rows : kChunk;
  if (n >= 0 && n <= most) return static_cast<i32>(n);
  raise_fault(p.comm, kTooManyTokens, Phase::kDispatch, p.comm.rank, step, static_cast<u64>(most),
              static_cast<u64>(n));
  return 0;
}

// The routing table into shared memory, with ids out of range told and dropped.
__device__ inline void read_routing(const DispatchParams& p, u64 step, SendShared& s) {
  const i32 num_ids = s.num_tokens * kTopk;
  for (i32 i = static_cast<i32>(threadIdx.x); i < num_ids; i += kThreads) {
    const i64 id = p.topk_is_int64 ? reinterpret_cast<const i64*>(p.topk_idx)[i]
                                   : reinterpret_cast<const i32*>(p.topk_idx)[i];
    const bool valid = id >= 0 && id < kShape.num_experts;
    if (!valid && id != -1)
      raise_fault(p.comm, kBadExpert, Phase::kDispatch, p.comm.rank, step,
                  static_cast<u64>(i / kTopk), static_cast<u64>(id));
    s.expert[i] = valid ? static_cast<u16>(id) : kNoExpert;
  }
  __syncthreads();
  const auto* expert_rank = reinterpret_cast<const i32*>(p.comm.expert_rank);
  for (i32 first = 0; first < kChunkWords * 32; first += kThreads) {
    const i32 token = first + static_cast<i32>(threadIdx.x);
    u64 ranks = 0;
    if (token < s.num_tokens)
      for (i32 k = 0; k < kTopk; ++k) {
        const u16 e = s.expert[token * kTopk + k];
        if (e != kNoExpert) ranks |= u64{1} << (expert_rank[e] % kLocal);
      }
#pragma unroll
    for (i32 l = 0; l < kLocal; ++l) {
      const u32 bits = __ballot_sync(~0u, ranks >> l & 1);
      if (threadIdx.x % 32 == 0 && token / 32 < kChunkWords) s.has[l][token / 32] = bits;
    }
  }
  __syncthreads();
}

__device__ inline i32 tokens_before(const u32* has, i32 token) {
  i32 count = 0;
  for (i32 w = 0; w < token / 32; ++w) count += __popc(has[w]);
  return count + __popc(has[token / 32] & ((1u << (token % 32)) - 1));
}

// Header and expert counts for own-node rank `l`: early, because receivers place rows by them.
__device__ inline void send_header(const DispatchParams& p, u64 step, i32 slot, i32 l,
                                   SendShared& s) {
  for (i32 e = static_cast<i32>(threadIdx.x); e < kShape.max_local_experts; e += kThreads)
    s.count[e] = 0;
  __syncthreads();
  const auto* expert_rank = reinterpret_cast<const i32*>(p.comm.expert_rank);
  const auto* expert_local = reinterpret_cast<const i32*>(p.comm.expert_local);
  for (i32 i = static_cast<i32>(threadIdx.x); i < s.num_tokens * kTopk; i += kThreads) {
    const u16 e = s.expert[i];
    if (e != kNoExpert && expert_rank[e] % kLocal == l) atomicAdd(&s.count[expert_local[e]], 1);
  }
  __syncthreads();
  char* region = inbox_at(p.comm.data[l], slot, p.comm.rank % kLocal);
  auto* counts = reinterpret_cast<i32*>(region + sizeof(RegionHeader));
  for (i32 e = static_cast<i32>(threadIdx.x); e < kShape.max_local_experts; e += kThreads)
    counts[e] = s.count[e];
  auto* header = reinterpret_cast<RegionHeader*>(region);
  if (threadIdx.x == 0) {
    i32 tokens = 0;
    for (i32 w = 0; w < kChunkWords; ++w) tokens += __popc(s.has[l][w]);
    header->num_tokens = static_cast<u32>(tokens);
    header->flags = static_cast<u32>(kWireType) << kDTypeShift;
    header->slot_bytes = p.parts.slot_bytes;
  }
  __syncthreads();
  // The flag of the counts; pairs with the wait in place_rows() of rank l.
  if (threadIdx.x == 0) st_release_sys_u64(&header->step, step + 1);
}

// The 16 payload bytes of this thread at position `at` of the row.
__device__ __forceinline__ Vec load_payload(const DispatchParams& p, i32 token, i32 at,
                                            SendShared& s) {
  const char* row = reinterpret_cast<const char*>(p.x) +
                    static_cast<i64>(token) * kHidden * static_cast<i64>(item_bytes(kXType));
  if constexpr (!kQuantize) {
    return at < kPayloadVecs ? ld_nc_v4(row + at * 16) : Vec{};
  } else {
    constexpr i32 kPerVec = Values<kXType>::kCount;
    float f[16];
#pragma unroll
    for (i32 i = 0; i < 16 / kPerVec; ++i) {
      const Vec v = at < kPayloadVecs ? ld_nc_v4(row + (at * (16 / kPerVec) + i) * 16) : Vec{};
      Values<kXType>::load(v, f + i * kPerVec);
    }
    float scale;
    const Vec v = quantize16(f, scale);
    if (at % 8 == 0 && at < kPayloadVecs) s.scale[at / 8] = scale;
    return v;
  }
}

// Everything of the slot but its payload and flag into shared memory.
__device__ inline void build_head(const DispatchParams& p, u64 step, i32 token, SendShared& s,
                                  const HandleArrays& handle) {
  const i32 thread = static_cast<i32>(threadIdx.x);
  auto* head = reinterpret_cast<char*>(s.head);
  if (thread < kHeadWords)
    s.head[thread] = thread == 0   ? static_cast<u32>(step + 1)
                     : thread == 1 ? static_cast<u32>(token)
                                   : 0;
  if (thread < kLocal) {
    const bool goes = s.has[thread][token / 32] >> (token % 32) & 1;
    const i32 slot = goes ? tokens_before(s.has[thread], token) : -1;
    s.slot[thread] = slot;
    handle.send_slots[token * kColumns + thread] = slot;
  }
  __syncthreads();
  if (thread < kTopk) {
    reinterpret_cast<u16*>(head + expert_ids_offset())[thread] = s.expert[token * kTopk + thread];
    reinterpret_cast<float*>(head + weights_offset(kTopk))[thread] =
        p.topk_weights ? reinterpret_cast<const float*>(p.topk_weights)[token * kTopk + thread]
                       : 1.0f;
  }
  auto* position = reinterpret_cast<i32*>(head + positions_offset(kTopk));
  for (i32 i = thread; i < token * kTopk; i += kThreads) {
    const u16 e = s.expert[i];
    if (e == kNoExpert) continue;
#pragma unroll
    for (i32 k = 0; k < kTopk; ++k)
      if (s.expert[token * kTopk + k] == e) atomicAdd(&position[k], 1);
  }
}

__device__ inline void copy_words(char* to, const char* from, u64 bytes) {
  for (u64 i = threadIdx.x * 4; i < bytes; i += kThreads * 4)
    *reinterpret_cast<u32*>(to + i) = *reinterpret_cast<const u32*>(from + i);
}

__device__ inline void send_token(const DispatchParams& p, u64 step, i32 slot, i32 token,
                                  SendShared& s, const HandleArrays& handle) {
  constexpr i32 kRounds = (kPayloadVecs + kThreads - 1) / kThreads;
  Vec payload[kRounds];
#pragma unroll
  for (i32 r = 0; r < kRounds; ++r)
    payload[r] = load_payload(p, token, static_cast<i32>(threadIdx.x) + r * kThreads, s);
  build_head(p, step, token, s, handle);
  __syncthreads();
  const i32 own = p.comm.rank % kLocal;
#pragma unroll 1
  for (i32 i = 0; i < kLocal; ++i) {
    const i32 l = (own + i) % kLocal;  // not all sources to rank 0 first
    if (s.slot[l] < 0) continue;
    char* to = inbox_at(p.comm.data[l], slot, own) + kInboxSlots +
               static_cast<u64>(s.slot[l]) * p.parts.slot_bytes;
#pragma unroll
    for (i32 r = 0; r < kRounds; ++r) {
      const i32 at = static_cast<i32>(threadIdx.x) + r * kThreads;
      if (at < kPayloadVecs) st_na_v4(to + kHeadBytes + at * 16, payload[r]);
    }
    if (threadIdx.x < kHeadWords) reinterpret_cast<u32*>(to)[threadIdx.x] = s.head[threadIdx.x];
    if (p.parts.bytes[1]) {
      const auto* scales = kQuantize ? reinterpret_cast<const char*>(s.scale)
                                     : reinterpret_cast<const char*>(p.scales) +
                                           static_cast<i64>(token) * kScales * 4;
      copy_words(to + p.parts.offset[1], scales, p.parts.bytes[1]);
    }
    for (i32 e = 0; e < p.num_extras; ++e) {
      const u64 bytes = p.parts.bytes[2 + e];
      const auto* from =
          reinterpret_cast<const char*>(p.extras[e].data) + static_cast<u64>(token) * bytes;
      for (u64 b = threadIdx.x; b < bytes; b += kThreads) to[p.parts.offset[2 + e] + b] = from[b];
    }
  }
  __syncthreads();
  // The slot's flag, after every thread's stores; pairs with the wait in recv_slot() of rank l.
  const i32 l = static_cast<i32>(threadIdx.x);
  if (l < kLocal && s.slot[l] >= 0)
    st_release_sys_u32(inbox_flags_at(p.comm.data[l], slot, own) + s.slot[l],
                       static_cast<u32>(step + 1));
}

__device__ inline void dispatch_send(const DispatchParams& p, u64 step, i32 block, i32 num_blocks) {
  __shared__ SendShared s;
  const auto slot = static_cast<i32>(step % static_cast<u64>(kShape.steps_in_flight));
  const HandleArrays handle = HandleArrays::of(p.handle, p.num_rows);
  if (threadIdx.x == 0) s.num_tokens = read_num_tokens(p, step);
  __syncthreads();
  if (block == 0 && threadIdx.x == 0)
    *handle.meta = {HandleMeta::kMagic, p.comm.communicator, step,  1,
                    s.num_tokens,       p.num_rows,          kSent, {}};
  read_routing(p, step, s);
  for (i32 l = block; l < kLocal; l += num_blocks) send_header(p, step, slot, l, s);
  for (i32 token = block; token < p.num_rows; token += num_blocks) {
    if (token < s.num_tokens) {
      send_token(p, step, slot, token, s, handle);
    } else if (threadIdx.x < kLocal) {
      handle.send_slots[token * kColumns + static_cast<i32>(threadIdx.x)] = -1;
    }
  }
}

}  // namespace moe_p2p::device
