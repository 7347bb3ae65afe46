// Combine, sending half, on few multiprocessors: adds up this rank's rows of each slot.
#pragma once

#include "kernels/combine/bulk.cuh"
#include "kernels/combine/send.cuh"

namespace moe_p2p::device::bulk {

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
      if (source == a.self.rank && num_rows == 1 && own_stays(a.p)) continue;  // own_row()
      const i32 there = source % kLocal, own = a.self.index_at(there);
      const u64 data = data_of(a.p.comm, there);
      Sum& sum = loader.next();
      if (warp.thread == 0) {
        sum.num_rows = num_rows;
        sum.is_row = num_rows == 1 && rows_stay(a.p);
        sum.first_row = found.row[place][0];
        sum.rows = a.handle.rows_of(chunk, source, index);
        sum.to = partial_at(a.p.comm, data, slot, own) + combine_slots_offset() +
                 static_cast<u64>(index) * a.p.stride;
        sum.flag = partial_flags_at(a.p.comm, data, slot, own) + index;
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
  for (i32 chunk = 0; chunk < num_chunks_of(p); ++chunk) {
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
        if (with_scalars(p) && role.thread < kTopk)
          store_scalar(a, sum.to, false, sum.rows, sum.first_row, role.thread);
      });
    }
    __syncthreads();  // the next chunk opens with the whole block
  }
}

}  // namespace moe_p2p::device::bulk
