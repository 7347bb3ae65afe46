// Dispatch, sending half, on few multiprocessors (kernels/device/bulk.cuh): a whole slot is made in
// shared memory and goes to every rank as one copy. The loading warp asks for the row and makes the
// head, the computing warps make payload and scales, the storing warp stores the slot.
#pragma once

#include "kernels/dispatch/bulk_given.cuh"
#include "kernels/dispatch/bulk_routes.cuh"
#include "kernels/dispatch/send.cuh"

namespace moe_p2p::device::bulk {

// One image is made while others leave. Rows of x that are quantized pass through buffers of their
// own, others go straight into the image.
inline constexpr i32 kImages = MOE_P2P_IMAGES, kXs = kQuantize ? 2 : kImages;
inline constexpr i32 kUnderWay = 1;  // images whose copies may be, beside the one being stored
static_assert(kLocal <= 32, "a lane for each rank");

struct SlotPipe {
  alignas(kBulkAlign) char image[kImages][kImageBytes];
  alignas(kBulkAlign) char x[kQuantize ? kXs : 1][kQuantize ? kRowBytes : 16];
  i32 slot[kImages][kLocal];
  Progress<kLocal> progress;
  Ring<kImages> images;
  Ring<kXs> xs;  // `empty` with kQuantize only
};
struct BulkSendShared {
  SendShared routes;
  Routed routed;
  SlotPipe worker[SendWorker::kCount];
};

// Tokens of a worker, whose three parts go through them in step.
struct Tokens {
  i32 first, end, stride;
};

// --- the loading warp, which makes the heads too ---

// What a lane needs of the routing for a token, asked for while the head of the token before is
// made.
struct Ahead {
  static constexpr i32 kCounted = Placement::num_counted_ahead();
  Entry entry;
  i32 id[kCounted > 0 ? kCounted : 1];

  // `counted`: tokens counted already.
  __device__ void ask(const DispatchParams& p, i32 counted, i32 token, i32 lane) {
    entry.ask(p, token, lane);
    const i64 first = static_cast<i64>(counted) * kTopk + lane;
#pragma unroll
    for (i32 j = 0; j < kCounted; ++j)
      if (const i64 i = first + j * 32; i < static_cast<i64>(token) * kTopk) id[j] = ask_id(p, i);
  }
  // Adds the experts of tokens [counted, token) to `seen`.
  __device__ void count(const DispatchParams& p, i32* seen, i32 counted, i32 token,
                        i32 lane) const {
    const i64 first = static_cast<i64>(counted) * kTopk, end = static_cast<i64>(token) * kTopk;
#pragma unroll
    for (i32 j = 0; j < kCounted; ++j)
      if (first + j * 32 + lane < end)
        if (const i32 e = expert_of(id[j]); e >= 0) atomicAdd(&seen[e], 1);
    Placement::count(p, seen, first + kCounted * 32, end, lane, 32);
  }
};

// Asks for a row of x, into a buffer of `x` where it is quantized, else into its image.
__device__ inline void load_row(const DispatchParams& p, SlotPipe& pipe, i32 token,
                                const Turn<kImages>& image, Turn<kXs>& x, i32 lane) {
  if (lane == 0) {
    if constexpr (kQuantize) x.wait_empty(pipe.xs);
    char* to = kQuantize ? pipe.x[kQuantize ? x.at : 0] : pipe.image[image.at] + kHeadBytes;
    barrier_expect(&pipe.xs.full[x.at], kRowBytes);
    bulk_load(to, GivenRow::of(p, static_cast<u32>(token)).payload, kRowBytes, &pipe.xs.full[x.at]);
  }
  __syncwarp();
  x.next();
}

__device__ inline void make_heads(const Sender& a, const PipeRole& role, u64 step, i32 chunk,
                                  const Tokens& tokens, i32& counted, SlotPipe& pipe,
                                  Turn<kImages>& image, Turn<kXs>& x) {
  const DispatchParams& p = a.p;
  const Threads<32> warp{role.thread};
  const i32 lane = role.thread;
  SendScratch& w = a.s.worker[role.place];
  if (tokens.first >= tokens.end) return;
  if constexpr (kQuantize) load_row(p, pipe, tokens.first, image, x, lane);
  Ahead ahead;
  ahead.ask(p, counted, tokens.first, lane);
  for (i32 token = tokens.first; token < tokens.end; token += tokens.stride) {
    const Entry entry = ahead.entry;
    ahead.count(p, w.seen, counted, token, lane);
    if (const i32 next = token + tokens.stride; next < tokens.end) {
      ahead.ask(p, token, next, lane);
      if constexpr (kQuantize) load_row(p, pipe, next, image, x, lane);
    }
    shared<BulkSendShared>().routed.await(chunk, (token - chunk * kChunk) / 32);
    find_slots(a, warp, chunk, counted, token, true, w);
    counted = token;
    image.wait_empty(pipe.images);
    if constexpr (!kQuantize) load_row(p, pipe, token, image, x, lane);
    __syncwarp();
    if (lane < kLocal) pipe.slot[image.at][lane] = w.slot[lane];
    char* head = pipe.image[image.at];
    build_head(a, warp, step, token, token - chunk * kChunk, entry, w, head);
    fence_shared_for_bulk();
    arrive_warp(&pipe.images.full[image.at], lane);
    if (kTopk > 1 && lane < kTopk) check_experts(a, step, token, lane, head);
    __syncwarp();
    image.next();
  }
}

// --- the computing warps ---

// Quantizes a row into payload and scales of an image.
__device__ inline void quantize_row(const char* row, i32 thread, char* payload, float* scales) {
  constexpr i32 kSources = 16 / Values<kXType>::kCount;
  constexpr i32 kAtOnce = kSources > 2 ? 2 : 4;  // vectors of a thread, as registers allow
  for (i32 first = 0; first < kPayloadVecs; first += kAtOnce * kComputeThreads) {
    Vec raw[kAtOnce][kSources];
    float amax[kAtOnce];
    const auto where = [&](i32 j) { return first + j * kComputeThreads + thread; };
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (i32 i = 0; i < kSources; ++i)
        raw[j][i] = where(j) < kPayloadVecs ? values_at<Vec>(row)[where(j) * kSources + i] : Vec{};
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j) amax[j] = max_magnitude<kXType, kSources>(raw[j]);
    const float scale = find_scales<kScaleFormat>(amax);
#pragma unroll
    for (i32 j = 0; j < kAtOnce; ++j) {
      if (where(j) < kPayloadVecs)
        values_at<Vec>(payload)[where(j)] = to_e4m3<kXType>(raw[j], amax[j]);
      if (thread % 8 == 4 + j && where(j) / 8 * 8 < kPayloadVecs) scales[where(j) / 8] = scale;
    }
  }
}

// Scales given by the caller; a thread asks for its first words one token ahead.
struct GivenScales {
  static constexpr i32 kAsked = (kScales + kComputeThreads - 1) / kComputeThreads;
  u32 word[kAsked];

  __device__ static i32 num(const DispatchParams& p) {
    return static_cast<i32>(p.parts.bytes[1] / 4);
  }
  __device__ static u32 at(const DispatchParams& p, i32 token, i32 i) {
    return values_at<u32>(p.scales.as<const char>(), static_cast<u64>(token) * p.parts.bytes[1])[i];
  }
  __device__ void ask(const DispatchParams& p, i32 token, i32 thread) {
#pragma unroll
    for (i32 j = 0; j < kAsked; ++j)
      if (const i32 i = thread + j * kComputeThreads; i < num(p)) word[j] = at(p, token, i);
  }
  __device__ void store(const DispatchParams& p, i32 token, i32 thread, char* to) const {
    u32* words = values_at<u32>(to);
#pragma unroll
    for (i32 j = 0; j < kAsked; ++j)
      if (const i32 i = thread + j * kComputeThreads; i < num(p)) words[i] = word[j];
#pragma unroll 1  // seldom any
    for (i32 i = thread + kAsked * kComputeThreads; i < num(p); i += kComputeThreads)
      words[i] = at(p, token, i);
  }
};

// Returns the token that would be next.
__device__ inline i32 fill_images(const DispatchParams& p, i32 thread, const Tokens& tokens,
                                  SlotPipe& pipe, Turn<kImages>& image, Turn<kXs>& x) {
  GivenScales ahead;
  if (!kQuantize && tokens.first < tokens.end) ahead.ask(p, tokens.first, thread);
  i32 token = tokens.first;
  for (; token < tokens.end; token += tokens.stride) {
    const GivenScales given = ahead;
    if (const i32 next = token + tokens.stride; !kQuantize && next < tokens.end)
      ahead.ask(p, next, thread);
    image.wait_empty(pipe.images);
    x.wait_full(pipe.xs);
    char* to = pipe.image[image.at];
    if constexpr (kQuantize) {
      quantize_row(pipe.x[x.at], thread, to + kHeadBytes, values_at<float>(to, p.parts.offset[1]));
      arrive_warp(&pipe.xs.empty[x.at], thread);
    } else {
      given.store(p, token, thread, to + p.parts.offset[1]);
    }
    store_extras(p, Threads<kComputeThreads>{thread}, token, to);
    fence_shared_for_bulk();
    arrive_warp(&pipe.images.full[image.at], thread);
    x.next();
    image.next();
  }
  return token;
}

// --- the storing warp ---

// Each lane stores the images to its rank.
struct Storer {
  SlotPipe& pipe;
  const i32 lane;
  u32 num_stored = 0, num_read = 0;  // images; the ring is in step with them

  // Frees all images but the last kNumLeft, once written.
  template <i32 kNumLeft>
  __device__ void give_back() {
    bulk_wait<kNumLeft>();
    __syncwarp();
    if (num_stored - num_read <= kNumLeft) return;
    for (; num_stored - num_read > kNumLeft; ++num_read)
      if (lane == 0) barrier_arrive(&pipe.images.empty[num_read % kImages]);
    if (lane == 0) pipe.progress.publish(num_read);
  }

  __device__ void run(const Sender& a, u64 step, i32 chunk, const Tokens& tokens,
                      Turn<kImages>& image) {
    const DispatchParams& p = a.p;
    const i32 slot = slot_of(step);
    const i32 l = lane < kLocal ? (a.self.local + lane) % kLocal : 0;  // not all to rank 0 first
    for (i32 token = tokens.first; token < tokens.end; token += tokens.stride) {
      if (!__all_sync(~0u, image.is_full(pipe.images))) give_back<0>();
      image.wait_full(pipe.images);
      pipe.progress.wait_room(num_stored);
      if (lane < kLocal) {
        const i32 at = pipe.slot[image.at][l];
        const bool whole = l != a.self.local || !own_stays(p);
        if (at >= 0)
          bulk_store(inbox_at(p.comm, data_of(p.comm, l), slot, a.self.index_at(l)) + kInboxSlots +
                         static_cast<u64>(at) * p.parts.slot_bytes,
                     pipe.image[image.at],
                     whole ? static_cast<u32>(p.parts.slot_bytes) : static_cast<u32>(kHeadBytes));
        bulk_commit();
        // Pairs with the wait for the flag in fetch_slots() or recv_slot() there.
        pipe.progress.flag[num_stored % Progress<kLocal>::kItems][lane] =
            at < 0 ? nullptr
                   : inbox_flags_at(p.comm, data_of(p.comm, l), slot, a.self.index_at(l)) + at;
      }
      ++num_stored;
      give_back<kUnderWay>();
      image.next();
    }
    give_back<0>();
    if (lane == 0) pipe.progress.publish_end(chunk);
  }
};

template <typename Begin>
__device__ inline void dispatch_send(const DispatchParams& p, i32 block, const Begin& begin) {
  auto& s = shared<BulkSendShared>();
  const i32 num_blocks = p.grid.num_send_blocks;
  const PipeRole role = PipeRole::of();
  SlotPipe& pipe = s.worker[role.place];
  const i32 id = block * SendWorker::kCount + role.place;
  const i64 num_tokens = ask_num_tokens(p);
  if (threadIdx.x < SendWorker::kCount) {
    s.worker[threadIdx.x].images.init(kComputeWarps + 1, 1);
    s.worker[threadIdx.x].xs.init(1, kComputeWarps);
    s.worker[threadIdx.x].progress.init();
    fence_barrier_init();
  }
  const auto [good, first_step, opens] = begin();
  if (!good) return;
  const Sender a{p, Self(p.comm), HandleArrays(p), check_num_tokens(p, first_step, num_tokens),
                 s.routes};
  begin_send(a, first_step, block);
  Turn<kImages> image;
  Turn<kXs> x;
  Storer storer{pipe, role.thread};
  i32 counted = 0;
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = first_step + static_cast<u64>(chunk);
    const bool heads = block == num_blocks - 1 && !receiver_counts(p);
    const RouteTask task{step, chunk, block == 0, false};
    const i32 num_words = words_before(heads);
    if (threadIdx.x == 0) s.routed.publish(chunk, num_words);
    if (!route_chunk(a, task, num_words)) return;
    if (heads) send_headers(a, step, chunk);
    const i32 last = end_of_chunk(p, chunk);
    const Tokens tokens{chunk * kChunk + id, min(last, a.num_tokens),
                        num_blocks * SendWorker::kCount};
    if (role.loads) {
      make_heads(a, role, step, chunk, tokens, counted, pipe, image, x);
    } else if (role.stores) {
      storer.run(a, step, chunk, tokens, image);
    } else if (role.flags) {
      raise_flags<SendWorker::kCount, kLocal>(
          [&](i32 w) -> Progress<kLocal>& { return s.worker[w].progress; }, role.thread, chunk,
          flag_of(step));
    } else if (role.routes) {
      route_rest(a, task, num_words, s.routed);
    } else {
      i32 token = fill_images(p, role.thread, tokens, pipe, image, x);
      for (; token < last; token += tokens.stride)
        for (i32 column = role.thread; column < kColumns; column += kComputeThreads)
          a.handle.send_slots(token)[column] = -1;
    }
    end_chunk(a);
  }
}

}  // namespace moe_p2p::device::bulk
