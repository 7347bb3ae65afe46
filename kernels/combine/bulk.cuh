// Both halves of combine on few multiprocessors (kernels/device/bulk.cuh): rows are added piece by
// piece through shared memory. The loading warp asks for the pieces of every row of a sum in turn,
// the computing warps add them in registers, the storing warp stores the sum. A sum that is one
// unchanged row goes straight from the loading to the storing warp.
#pragma once

#include "kernels/combine/recv.cuh"
#include "kernels/device/bulk.cuh"

namespace moe_p2p::device::bulk {

// The warp that looks up rows for a whole worker.
struct LoadWarp {
  static constexpr i32 kThreads = 32;
  i32 thread, id, count;
};
inline constexpr i32 kLookedUp = LoadWarp::kThreads / kLanes;
inline constexpr i32 kMaxAddends = kTopk > kBiases + kSpeakers ? kTopk : kBiases + kSpeakers;

// A sum: its rows in order, its destination, and its flag.
struct Sum {
  i32 num_rows;   // kEnd: no more in this chunk
  i32 first_row;  // of y
  i32 token;      // at its source
  bool is_row;    // the sum is its only row, bit for bit
  char* to;
  u32* flag;        // null: none
  const i32* rows;  // of the slot, in the handle
  const char* row[kMaxAddends];
  float weight[kTopk];
};
inline constexpr i32 kEnd = -1;

// A piece of a row: kDeep groups of kValues values for each thread. Fewer would wait more often
// than they add, more would not fit in registers.
inline constexpr i32 kAllDeep = (kGroups + kComputeThreads - 1) / kComputeThreads;
inline constexpr i32 kPieces = (kAllDeep + 3) / 4;
inline constexpr i32 kDeep = (kAllDeep + kPieces - 1) / kPieces;
inline constexpr i32 kPieceGroups = kDeep * kComputeThreads;
template <DType kType>
inline constexpr i32 kPieceBytes =
    kPieceGroups * kValues * static_cast<i32>(item_bytes(kType));  // of a row of that type
inline constexpr i32 kInBytes =
    kPieceBytes<kYType> > kPieceBytes<kOutType> ? kPieceBytes<kYType> : kPieceBytes<kOutType>;
inline constexpr i32 kIns = MOE_P2P_PIECES_IN, kOuts = 3, kSums = 4;
// Pieces whose stores may be under way: pieces of sums, and pieces of unchanged rows.
inline constexpr i32 kUnreadOuts = kOuts - 2, kUnreadIns = kIns / 2;
inline constexpr i32 kMostUnread = (kUnreadIns > kUnreadOuts ? kUnreadIns : kUnreadOuts) + 1;

struct SumPipe {
  alignas(kBulkAlign) char in[kIns][kInBytes];
  alignas(kBulkAlign) char out[kOuts][kPieceBytes<kOutType>];
  Sum sum[kSums];
  Ring<kIns> ins;
  Ring<kOuts> outs;
  Ring<kSums> sums;
  Rows<kLookedUp> looked_up;
  Progress<1> progress;
  u64* unread[kMostUnread];  // the barriers to arrive at
};
struct BulkShared {
  SumPipe worker[SendWorker::kCount];
};

// Bytes of piece `piece` of a row.
template <DType kType>
__device__ __forceinline__ u32 piece_bytes(i32 piece) {
  const i32 groups = min(kPieceGroups, kGroups - piece * kPieceGroups);
  return static_cast<u32>(groups * kValues * static_cast<i32>(item_bytes(kType)));
}

__device__ inline void init_pipes(BulkShared& s) {
  if (threadIdx.x < SendWorker::kCount) {
    SumPipe& pipe = s.worker[threadIdx.x];
    pipe.ins.init(1, kComputeWarps + 1);
    pipe.outs.init(kComputeWarps, 1);
    pipe.sums.init(32, kComputeWarps + 1);  // all lanes fill a sum
    pipe.progress.init();
    fence_barrier_init();
  }
  __syncthreads();
}

// --- the loading warp ---

struct Loader {
  SumPipe& pipe;
  i32 lane;
  Turn<kIns> in;
  Turn<kSums> sum;

  // Returns the place of the next sum, for all lanes to fill; put() follows.
  __device__ Sum& next() {
    sum.wait_empty(pipe.sums);
    return pipe.sum[sum.at];
  }
  template <DType kType>
  __device__ void put() {
    __syncwarp();
    const Sum& s = pipe.sum[sum.at];
    barrier_arrive(&pipe.sums.full[sum.at]);
    if (lane == 0)
      for (i32 piece = 0; piece < kPieces; ++piece) {
        const u32 bytes = piece_bytes<kType>(piece);
        for (i32 r = 0; r < s.num_rows; ++r, in.next()) {
          in.wait_empty(pipe.ins);
          u64* full = &pipe.ins.full[in.at];
          barrier_expect(full, bytes);
          bulk_load(pipe.in[in.at], s.row[r] + piece * kPieceBytes<kType>, bytes, full);
        }
      }
    __syncwarp();
    sum.next();
  }
  __device__ void end() {
    Sum& s = next();
    if (lane == 0) {
      s.num_rows = kEnd;
      s.is_row = false;
    }
    barrier_arrive(&pipe.sums.full[sum.at]);
    sum.next();
  }
};

// --- the computing warps ---

struct Summer {
  SumPipe& pipe;
  i32 thread;
  Turn<kIns> in;
  Turn<kOuts> out;
  Turn<kSums> sum;

  template <DType kType, typename StoreScalars>
  __device__ void run(bool weighted, const StoreScalars& store_scalars) {
    for (;; sum.next()) {
      sum.wait_full(pipe.sums);
      const Sum& s = pipe.sum[sum.at];
      const bool end = s.num_rows == kEnd;
      if (s.is_row) {
        pass();
      } else if (!end) {
        store_scalars(s);
        add<kType>(s, weighted);
      }
      arrive_warp(&pipe.sums.empty[sum.at], thread);
      if (end) break;
    }
    sum.next();
  }

  // The storing warp takes the pieces, but these threads follow every turn of the buffers too: a
  // thread that missed two could not tell them apart.
  __device__ void pass() {
    for (i32 piece = 0; piece < kPieces; ++piece, in.next()) {
      in.wait_full(pipe.ins);
      arrive_warp(&pipe.ins.empty[in.at], thread);
    }
  }

  // The last piece may end before its buffers do: what lies behind it is added but not stored.
  template <DType kType>
  __device__ void add(const Sum& s, bool weighted) {
    const i32 num_rows = s.num_rows;
    for (i32 piece = 0; piece < kPieces; ++piece) {
      float acc[kDeep][kValues] = {};
      for (i32 r = 0; r < num_rows; ++r, in.next()) {
        const float weight = weighted ? s.weight[r] : 1.0f;
        Piece<kType, Written::kByPeers> values[kDeep];
        in.wait_full(pipe.ins);
#pragma unroll
        for (i32 d = 0; d < kDeep; ++d)
          values[d].load_shared(pipe.in[in.at], d * kComputeThreads + thread);
        // The first warp also arrives for the storing warp, which does not use these pieces.
        arrive_warp(&pipe.ins.empty[in.at], thread, thread == 0 ? 2 : 1);
#pragma unroll
        for (i32 d = 0; d < kDeep; ++d) values[d].add_to(acc[d], weight, weighted);
      }
      out.wait_empty(pipe.outs);
#pragma unroll
      for (i32 d = 0; d < kDeep; ++d)
        store_values_shared(pipe.out[out.at], d * kComputeThreads + thread, acc[d]);
      fence_shared_for_bulk();
      arrive_warp(&pipe.outs.full[out.at], thread);
      out.next();
    }
  }
};

// --- the storing warp: one thread works, because a thread can wait only for its own copies ---

struct Storer {
  SumPipe& pipe;
  Turn<kIns> in;
  Turn<kOuts> out;
  Turn<kSums> sum;
  u32 num_stored = 0, num_read = 0;  // pieces; `unread` goes round
  bool has_rows = false;             // buffers of rows may be among the unread

  // kFlagged: other ranks wait for the sums.
  template <bool kFlagged>
  __device__ void run(i32 chunk) {
    for (;; sum.next()) {
      if (kFlagged && !sum.is_full(pipe.sums)) give_back<kFlagged, 0>();
      sum.wait_full(pipe.sums);
      const Sum& s = pipe.sum[sum.at];
      const i32 num_rows = s.num_rows;
      const bool is_row = s.is_row;
      u32* const flag = s.flag;
      char* const to = s.to;
      barrier_arrive(&pipe.sums.empty[sum.at]);
      if (num_rows == kEnd) break;
      if constexpr (kFlagged) {
        const u32 num = num_stored / kPieces;
        pipe.progress.wait_room(num);
        // raise_flags() stores it; pairs with the wait in wait_partial() there.
        pipe.progress.flag[num % Progress<1>::kItems][0] = flag;
      }
      // The rows of a sum may need every buffer.
      if (has_rows && !is_row) give_back<kFlagged, 0>();
      has_rows = is_row;
      for (i32 piece = 0; piece < kPieces; ++piece) {
        char* const at = to + piece * kPieceBytes<kOutType>;
        if (is_row) {
          in.wait_full(pipe.ins);
          store(at, pipe.in[in.at], piece, &pipe.ins.empty[in.at]);
          in.next();
          give_back<kFlagged, kUnreadIns>();
          continue;
        }
        out.wait_full(pipe.outs);
        store(at, pipe.out[out.at], piece, &pipe.outs.empty[out.at]);
        out.next();
        for (i32 r = 0; r < num_rows; ++r) in.next();
        give_back<kFlagged, kUnreadOuts>();
      }
    }
    sum.next();
    give_back<kFlagged, 0>();
    if (kFlagged) pipe.progress.tell_end(chunk);
  }
  __device__ void store(char* to, const char* from, i32 piece, u64* empty) {
    bulk_store(to, from, piece_bytes<kOutType>(piece));
    bulk_commit();
    pipe.unread[num_stored++ % kMostUnread] = empty;
  }
  // Waits until all pieces but the last kNumLeft are written, and frees their buffers.
  template <bool kFlagged, i32 kNumLeft>
  __device__ void give_back() {
    if (num_stored - num_read <= kNumLeft) return;
    bulk_wait<kNumLeft>();
    for (; num_stored - num_read > kNumLeft; ++num_read)
      barrier_arrive(pipe.unread[num_read % kMostUnread]);
    if (kFlagged) pipe.progress.tell(num_read / kPieces);
  }
};

// --- sending ---

// Whether a sum of one row is sent unchanged; the receiving half adds it to 0.0.
__device__ inline bool rows_stay(const Adder& a) {
  return kYType == kOutType && !a.weighted() && !a.p.with_scalars;
}

__device__ inline void load_slots(const Adder& a, Loader& loader, const LoadWarp& warp, u64 step,
                                  i32 chunk) {
  Rows<kLookedUp>& found = loader.pipe.looked_up;
  const i32 slot = slot_of(step);
  const i32 num_items = a.num_items(chunk);
  for (i32 first = warp.id; first < num_items; first += warp.count * kLookedUp) {
    look_up(a, warp, step, chunk, num_items, first, found);
    __syncwarp();
    for (i32 place = 0, i = first; place < kLookedUp && i < num_items; ++place, i += warp.count) {
      const i32 num_rows = found.num_rows[place];
      if (num_rows < 0) continue;
      const auto [source, index] = a.item(num_items, i);
      const u64 data = a.p.comm.data[source % kLocal];
      Sum& sum = loader.next();
      if (warp.thread == 0) {
        sum.num_rows = num_rows;
        sum.is_row = num_rows == 1 && rows_stay(a);
        sum.first_row = found.row[place][0];
        sum.rows = a.handle.rows_of(chunk, source, index);
        sum.to = partial_at(data, slot, a.self.local) + combine_slots_offset() +
                 static_cast<u64>(index) * a.p.stride;
        sum.flag = partial_flags_at(data, slot, a.self.local) + index;
      }
      for (i32 r = warp.thread; r < num_rows; r += 32) {
        sum.row[r] = a.p.y.as<const char>() + static_cast<u64>(found.row[place][r]) * kYBytes;
        sum.weight[r] = found.weight[place][r];
      }
      loader.put<kYType>();
    }
    __syncwarp();  // the next batch takes the place of this one
  }
  loader.end();
}

template <typename IsTrusted, typename Begin>
__device__ inline void combine_send(const CombineParams& p, i32 block, const IsTrusted&,
                                    const Begin& begin) {
  auto& s = shared<BulkShared>();
  const PipeRole role = PipeRole::of();
  SumPipe& pipe = s.worker[role.place];
  const Adder a{p, Self(p.comm), HandleArrays(p)};
  const LoadWarp warp{role.thread, block * SendWorker::kCount + role.place,
                      p.grid.num_send_blocks * SendWorker::kCount};
  Loader loader{pipe, role.thread};
  Summer summer{pipe, role.thread};
  Storer storer{pipe};
  init_pipes(s);
  const Begun begun = begin();
  if (!begun.good) return;
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    if (!open_chunk(a, begun.opens, step, chunk, block)) return;
    if (role.loads) {
      load_slots(a, loader, warp, step, chunk);
    } else if (role.stores) {
      if (role.thread == 0) storer.run<true>(chunk);
    } else if (role.flags) {
      raise_flags<SendWorker::kCount, 1>(
          [&](i32 w) -> Progress<1>& { return s.worker[w].progress; }, role.thread, chunk,
          flag_of(step));
    } else {
      summer.run<kYType>(a.weighted(), [&](const Sum& sum) {
        if (p.with_scalars && role.thread < kTopk)
          store_scalar(a, sum.to, false, sum.rows, sum.first_row, role.thread);
      });
    }
    __syncthreads();  // the next chunk opens with the whole block
  }
}

// --- receiving ---

// A warp waits for the rows of several tokens together: one wait for all, but in a short chunk the
// first token should not wait for others.
inline constexpr i32 kSpeakerLanes = kSpeakers <= 2    ? 2
                                     : kSpeakers <= 4  ? 4
                                     : kSpeakers <= 8  ? 8
                                     : kSpeakers <= 16 ? 16
                                                       : 32;
inline constexpr i32 kTokenLanes = kChunk > 512 ? kSpeakerLanes : 32;  // of one token
inline constexpr i32 kTokensAtOnce = 32 / kTokenLanes;

// Loads the rows of tokens first, first + stride, ... up to kTokensAtOnce of them.
__device__ inline void load_tokens(const CombineParams& p, const Self& self,
                                   const HandleArrays& handle, Loader& loader, u64 step, i32 first,
                                   i32 end, i32 stride) {
  const i32 lane = loader.lane, mine = lane / kTokenLanes, speaker = lane % kTokenLanes;
  const i32 token = first + mine * stride;
  const char* row = nullptr;
  if (token < end && speaker < kSpeakers)
    row = wait_partial(p, self, step, speaker, handle.send_slots(token)[speaker]);
  fence_global_for_bulk();
  const u32 have = __ballot_sync(~0u, row != nullptr);
  const i32 first_partial = num_biases(p);
  for (i32 t = 0; t < kTokensAtOnce && first + t * stride < end; ++t) {
    const u32 bits = have >> (t * kTokenLanes) & (~0u >> (32 - kTokenLanes));
    const u64 offset = static_cast<u64>(first + t * stride) * kOutBytes;
    Sum& sum = loader.next();
    if (lane == 0) {
      i32 num = 0;
      for (i32 b = 0; b < kBiases; ++b)
        if (p.bias[b]) sum.row[num++] = p.bias[b].as<const char>() + offset;
      sum.num_rows = num + __popc(bits);
      sum.is_row =
          false;  // a row alone is added to 0.0 here, as no other half does: -0.0 gives 0.0
      sum.token = first + t * stride;
      sum.to = p.out.as<char>() + offset;
      sum.flag = nullptr;
    }
    if (mine == t && row) sum.row[first_partial + __popc(bits & ((1u << speaker) - 1))] = row;
    loader.put<kOutType>();
  }
}

__device__ inline void sum_scalars(const CombineParams& p, const Sum& sum, i32 k) {
  float total = 0.0f;
  for (i32 r = num_biases(p); r < sum.num_rows; ++r)
    total = __fadd_rn(total, values_at<float>(sum.row[r] + kOutBytes)[k]);
  p.out_scalars[static_cast<i64>(sum.token) * kTopk + k] = total;
}

__device__ inline void combine_recv(const CombineParams& p, const Begun& begun, i32 block) {
  auto& s = shared<BulkShared>();
  const PipeRole role = PipeRole::of();
  SumPipe& pipe = s.worker[role.place];
  const Self self(p.comm);
  const HandleArrays handle(p);
  const RecvWorker worker = RecvWorker::of(block, p.grid.num_recv_blocks);
  const i32 id = block * SendWorker::kCount + role.place;
  const i32 count = p.grid.num_recv_blocks * SendWorker::kCount;
  if (!begun.good) return lose_sums(p, block * SendWorker::kCount, SendWorker::kCount, count);
  Loader loader{pipe, role.thread};
  Summer summer{pipe, role.thread};
  Storer storer{pipe};
  init_pipes(s);
  for (i32 chunk = 0; chunk < p.num_chunks; ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    begin_chunk(p, self, worker, step, chunk, block);
    if (role.loads) {
      const i32 end = end_of_chunk(p, chunk);
      for (i32 token = chunk * kChunk + id; token < end; token += count * kTokensAtOnce)
        load_tokens(p, self, handle, loader, step, token, end, count);
      loader.end();
    } else if (role.stores) {
      if (role.thread == 0) storer.run<false>(chunk);
    } else if (!role.flags) {
      summer.run<kOutType>(false, [&](const Sum& sum) {
        if (p.out_scalars && role.thread < kTopk) sum_scalars(p, sum, role.thread);
      });
    }
    __syncthreads();
    end_chunk(p, self, worker, step, block);
  }
}

}  // namespace moe_p2p::device::bulk
