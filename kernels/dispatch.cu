// One kernel for both halves of dispatch. Blocks that send come before those that receive and wait for
// earlier steps only, so the receivers behind them cannot keep them from running; a call of more
// chunks than steps in flight needs all its blocks at once.
#if MOE_P2P_BULK  // moe_p2p/gpu/launch_shape.py chooses; never with masks
#include "kernels/dispatch/bulk_recv.cuh"
namespace way = moe_p2p::device::bulk;
#else
#include "kernels/dispatch/recv.cuh"
namespace way = moe_p2p::device;
#endif

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kBlockThreads, MOE_P2P_BLOCKS_PER_SM)
    moe_p2p_dispatch(const __grid_constant__ DispatchParams p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const Launch launch = Launch::begin(p.comm);
  const Role role = Role::of(p.grid);
  const bool sends = p.grid.num_send_blocks > 0, receives = p.grid.num_recv_blocks > 0;
  // A receive half alone finds its step in the handle, which its send half wrote.
  const u64 first =
      sends ? launch.next_step : reinterpret_cast<const HandleMeta*>(p.handle)->first_step;
  if (Launch::opens()) {
    launch.open(p.comm, Phase::kDispatch, sends ? p.num_chunks : 0);
    if (sends && !p.solo) open_steps(p.comm)[slot_of(first)] = {first + 1, 0};
  }
  Launch::join(p.comm);
  if (role.relay) {
    relay(p.comm, first, p.num_chunks, {.free = sends, .dispatch = receives, .combine = false});
  } else if (role.send >= 0) {
    way::dispatch_send(p, first, role.send);
    copy_topk(p, role.send);
  } else {
    way::dispatch_recv(p, first, role.recv);
  }
  launch.end(p.comm);
}
