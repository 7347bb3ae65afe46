// Combine, receiving half, on few multiprocessors: adds up the partial rows of each own token.
#pragma once

#include "kernels/combine/bulk.cuh"
#include "kernels/combine/recv.cuh"

namespace moe_p2p::device::bulk {

// Lanes of a token, a power of two. A warp waits for the rows of several tokens together: one wait
// for all. In a short chunk the first token should not wait for others.
inline constexpr i32 kSpeakerLanes = kSpeakers <= 2    ? 2
                                     : kSpeakers <= 4  ? 4
                                     : kSpeakers <= 8  ? 8
                                     : kSpeakers <= 16 ? 16
                                                       : 32;
inline constexpr i32 kShortChunk = 512;  // tokens

// Returns the row of y that this rank did not send to itself for a token in slot `index`; null: it
// sent a sum. load_slots() decides it alike.
__device__ inline const char* own_row(const CombineParams& p, const Self& self,
                                      const HandleArrays& handle, i32 token, i32 index) {
  if (index < 0 || !own_stays(p)) return nullptr;
  const i32* rows = handle.rows_of(kPlain ? 0 : token / kChunk, self.rank, index);
  i32 num_rows = 0, row = 0;
#pragma unroll
  for (i32 k = 0; k < kTopk; ++k)
    if (const i32 found = rows[k]; found >= 0) ++num_rows, row = found;
  return num_rows == 1 ? p.y.as<const char>() + static_cast<u64>(row) * kYBytes : nullptr;
}

// Loads the rows of tokens first, first + stride, ..., each looked up by kLanesOfToken lanes.
template <i32 kLanesOfToken>
__device__ inline void load_tokens(const CombineParams& p, const Self& self,
                                   const HandleArrays& handle, Loader& loader, u64 step, i32 first,
                                   i32 end, i32 stride) {
  const i32 lane = loader.lane, mine = lane / kLanesOfToken, speaker = lane % kLanesOfToken;
  const i32 token = first + mine * stride;
  const char* row = nullptr;
  if (token < end && speaker < kSpeakers) {
    const i32 index = handle.send_slots(token)[speaker];
    if (speaker == self.local) row = own_row(p, self, handle, token, index);
    if (!row) row = wait_partial(p, self, step, speaker, index);
  }
  fence_global_for_bulk();
  const u32 have = __ballot_sync(~0u, row != nullptr);
  const i32 first_partial = num_biases(p);
  for (i32 t = 0; t < 32 / kLanesOfToken && first + t * stride < end; ++t) {
    const u32 bits = have >> (t * kLanesOfToken) & (~0u >> (32 - kLanesOfToken));
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
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
    const u64 step = begun.first_step + static_cast<u64>(chunk);
    begin_chunk(p, self, worker, step, chunk, block);
    if (role.loads) {
      const i32 end = end_of_chunk(p, chunk);
      const auto load = [&]<i32 kLanesOfToken>() {
        for (i32 t = chunk * kChunk + id; t < end; t += count * (32 / kLanesOfToken))
          load_tokens<kLanesOfToken>(p, self, handle, loader, step, t, end, count);
      };
      if (kChunk > kShortChunk && end - chunk * kChunk > kShortChunk)
        load.template operator()<kSpeakerLanes>();
      else
        load.template operator()<32>();
      loader.end();
    } else if (role.stores) {
      if (role.thread == 0) storer.run<false>(chunk);
    } else if (!role.flags) {
      summer.run<kOutType>(false, [&](const Sum& sum) {
        if (with_scalars(p) && p.out_scalars && role.thread < kTopk)
          sum_scalars(p, sum, role.thread);
      });
    }
    __syncthreads();
    end_chunk(p, self, worker, step, block);
  }
}

}  // namespace moe_p2p::device::bulk
