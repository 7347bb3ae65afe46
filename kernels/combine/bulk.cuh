// Both halves of combine on few multiprocessors (kernels/device/bulk.cuh): rows are added piece by
// piece through shared memory. The loading warp asks for the pieces of every row of a sum in turn,
// the computing warps add them in registers, the storing warp stores the sum. A sum that is one
// unchanged row goes straight from the loading to the storing warp.
#pragma once

#include "kernels/combine/sum.cuh"
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

// Whether a sum of one row is sent unchanged; the receiving half adds it to 0.0.
__device__ __forceinline__ bool rows_stay(const CombineParams& p) {
  return kYType == kOutType && !p.row_weights && !p.topk_weights && !with_scalars(p);
}
// Whether such a sum is not sent to the own rank: the receiving half of the same kernel takes the
// row from y.
__device__ __forceinline__ bool own_stays(const CombineParams& p) {
  return kOwnStays && p.grid.num_send_blocks > 0 && p.grid.num_recv_blocks > 0 && rows_stay(p);
}

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
        // Pairs with the wait in wait_partial() there.
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
    if (kFlagged) pipe.progress.publish_end(chunk);
  }
  __device__ void store(char* to, const char* from, i32 piece, u64* empty) {
    bulk_store(to, from, piece_bytes<kOutType>(piece));
    bulk_commit();
    pipe.unread[num_stored++ % kMostUnread] = empty;
  }
  // Frees the buffers of all pieces but the last kNumLeft, once written.
  template <bool kFlagged, i32 kNumLeft>
  __device__ void give_back() {
    if (num_stored - num_read <= kNumLeft) return;
    bulk_wait<kNumLeft>();
    for (; num_stored - num_read > kNumLeft; ++num_read)
      barrier_arrive(pipe.unread[num_read % kMostUnread]);
    if (kFlagged) pipe.progress.publish(num_read / kPieces);
  }
};

}  // namespace moe_p2p::device::bulk
