// One kernel for both halves of combine, and for release. Sending blocks come before receiving
// ones. They wait for the dispatches of this step and for the weights and partials that other
// ranks' senders push before they wait themselves; none of these depends on a receiver.
#if MOE_P2P_BULK  // moe_p2p/moe/gpu/launch_shape.py chooses; never with masks
#include "kernels/combine/bulk_recv.cuh"
#include "kernels/combine/bulk_send.cuh"
namespace way = moe_p2p::device::bulk;
#else
#include "kernels/combine/recv.cuh"
#include "kernels/combine/send.cuh"
namespace way = moe_p2p::device;
#endif

using namespace moe_p2p::device;

namespace {

// The step of a receiving half alone, where its sending half left it in the handle.
__device__ u64& combined_step(const CombineParams& p) {
  return reinterpret_cast<HandleMeta*>(p.handle)->combined_step;
}

}  // namespace

namespace moe_p2p {  // profilers show moe_p2p::combine

__global__ void __launch_bounds__(kBlockThreads, MOE_P2P_BLOCKS_PER_SM)
    combine(const __grid_constant__ CombineParams p) {
  griddepcontrol_launch_dependents();
  touch(p);
  griddepcontrol_wait();
  MOE_P2P_STAMPED(BlockStamps stamps{p.comm, Phase::kCombine});
  const Launch launch = Launch::ask(p.comm);
  const OpenSteps open = OpenSteps::ask(p.comm);
  const auto& meta = *reinterpret_cast<const HandleMeta*>(p.handle);
  const u32 magic = meta.magic, communicator = meta.communicator;
  const i32 num_chunks = meta.num_chunks, num_slots = meta.num_slots, num_rows = meta.num_rows;
  const Role role = Role::of(p.grid);
  const bool sends = p.grid.num_send_blocks > 0, receives = p.grid.num_recv_blocks > 0;
  const auto is_valid = [&] {
    return magic == HandleMeta::kMagic && communicator == communicator_of(p.comm) &&
           num_chunks == num_chunks_of(p) && num_slots == p.num_slots &&
           (is_empty(p) || !(receives || p.topk_weights) || num_rows == p.num_rows);
  };
  // Otherwise the handle's contents may be stale.
  const auto is_trusted = [&] { return is_valid() && !launch.is_late(); };
  // Called by every block, once.
  const auto begin = [&]() -> Begun {
    const bool valid = is_valid();
    // The step of its dispatch if that is open, otherwise steps of its own, each with an empty
    // dispatch.
    const bool ends_pair = valid && sends && open.closed_by(launch.number(), meta.first_step);
    const bool opens = sends && !is_empty(p) && !ends_pair;
    const u64 first = !sends ? combined_step(p) : opens ? launch.next_step() : meta.first_step;
    MOE_P2P_STAMPED(stamps.begin(first, num_chunks_of(p), Launch::opens() && sends));
    if (Launch::opens()) {
      launch.open(p.comm, opens ? num_chunks_of(p) : 0);
      if (ends_pair)
        st_relaxed_sys_u64(&open_steps(p.comm)[slot_of(first)].closer, launch.number() + 1);
      if (sends && !receives && valid) combined_step(p) = first;
      if (!valid && !is_empty(p))
        raise_fault(p.comm, kBadHandle, Phase::kCombine, p.comm.rank, 0, communicator_of(p.comm),
                    communicator);
    }
    // A release without an open dispatch has nothing to do.
    const bool good = is_trusted() && (!is_empty(p) || ends_pair);
    return {launch.join(p.comm, Phase::kCombine, good), first, opens};
  };
  if (role.send >= 0 && !is_empty(p)) {
    way::combine_send(p, role.send, is_trusted, begin);
    MOE_P2P_STAMPED(stamps.end<SendWorker>(Stamp::kSent));
  } else if (const Begun begun = begin(); role.recv >= 0) {
    way::combine_recv(p, begun, role.recv);
    MOE_P2P_STAMPED(stamps.end<RecvWorker>(Stamp::kEnded));
  } else if (begun.good && role.relay) {
    const u64 first = begun.first_step;
    if (sends && !is_empty(p) && relay_says_read(p, begun.opens)) {
      // Always chunk 0: combines of several chunks open steps of their own, in the other branch.
      say_chunk_read({p, Self(p.comm), HandleArrays(p)}, first, 0);
    }
    relay(p.comm, first, num_chunks_of(p),
          {.free = begun.opens,
           .dispatch = begun.opens || is_empty(p),
           .weights = sends && p.topk_weights,
           .combine = receives});
    if (relay_ends(p) && receives)
      // Later chunks have overwritten the headers of earlier ones.
      for (i32 chunk = max(0, num_chunks_of(p) - kSteps); chunk < num_chunks_of(p); ++chunk)
        end_step(p, Self(p.comm), first + static_cast<u64>(chunk));
  } else if (!kPlain && begun.good) {
    send_release(p, begun.first_step);
  }
  Launch::end(p.comm);
}

}  // namespace moe_p2p
