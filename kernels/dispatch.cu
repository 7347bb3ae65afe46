// One kernel for both halves of dispatch. Blocks that send come before those that receive and wait
// for earlier steps only, so the receivers behind them cannot keep them from running; a call of
// more chunks than steps in flight needs all its blocks on the device at once.
#if MOE_P2P_BULK  // moe_p2p/moe/gpu/launch_shape.py chooses; never with masks
#include "kernels/dispatch/bulk_recv.cuh"
#include "kernels/dispatch/bulk_send.cuh"
namespace way = moe_p2p::device::bulk;
#else
#include "kernels/dispatch/recv.cuh"
#include "kernels/dispatch/send.cuh"
namespace way = moe_p2p::device;
#endif

using namespace moe_p2p::device;

namespace moe_p2p {  // profilers show moe_p2p::dispatch

__global__ void __launch_bounds__(kBlockThreads, MOE_P2P_BLOCKS_PER_SM)
    dispatch(const __grid_constant__ DispatchParams p) {
  griddepcontrol_launch_dependents();
  touch(p);
  griddepcontrol_wait();
  MOE_P2P_STAMPED(BlockStamps stamps{p.comm, Phase::kDispatch});
  const Launch launch = Launch::ask(p.comm);
  const Role role = Role::of(p.grid);
  const bool sends = p.grid.num_send_blocks > 0, receives = p.grid.num_recv_blocks > 0;
  // Called by every block, once.
  const auto begin = [&]() -> Begun {
    // A receiving half alone finds its step in the handle, where its sending half wrote it.
    const u64 first =
        sends ? launch.next_step() : reinterpret_cast<const HandleMeta*>(p.handle)->first_step;
    MOE_P2P_STAMPED(stamps.begin(first, num_chunks_of(p), Launch::opens() && sends));
    if (Launch::opens()) {
      launch.open(p.comm, sends ? num_chunks_of(p) : 0);
      if (sends && !is_solo(p)) open_steps(p.comm)[slot_of(first)] = {first + 1, 0};
    }
    return {launch.join(p.comm, Phase::kDispatch, !launch.is_late()), first, sends};
  };
  if (role.send >= 0) {
    way::dispatch_send(p, role.send, begin);
    if constexpr (!kPlain) copy_topk(p, role.send);
    MOE_P2P_STAMPED(stamps.end<SendWorker>(Stamp::kSent));
  } else if (const Begun begun = begin(); role.recv >= 0) {
#if MOE_P2P_BULK
    if (role.recv == 0 && begun.good && bulk::receiver_counts(p))
      bulk::send_counts_first(p, begun.first_step);
#endif
    way::dispatch_recv(p, begun, role.recv);
    MOE_P2P_STAMPED(stamps.end<RecvWorker>(Stamp::kEnded));
  } else if (begun.good) {
    relay(p.comm, begun.first_step, num_chunks_of(p),
          {.free = sends, .dispatch = receives, .combine = false});
  }
  Launch::end(p.comm);
}

}  // namespace moe_p2p
