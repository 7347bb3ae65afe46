// One kernel for both halves of dispatch: blocks [0, num_send_blocks) send, the others receive.
// Senders never wait, so the receivers behind them cannot keep them from running.
#include "kernels/dispatch_recv.cuh"

using namespace moe_p2p::device;

extern "C" __global__ void __launch_bounds__(kThreads)
    moe_p2p_dispatch(const __grid_constant__ DispatchParams p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  DeviceState& state = state_of(p.comm);
  const i32 block = static_cast<i32>(blockIdx.x);
  const i32 num_send = p.num_send_blocks;
  // A receive half alone finds its step in the handle, which its send half wrote.
  const u64 step =
      num_send > 0 ? state.next_step : reinterpret_cast<const HandleMeta*>(p.handle)->first_step;
  if (block < num_send) {
    dispatch_send(p, step, block, num_send);
  } else {
    dispatch_recv(p, step, block - num_send, static_cast<i32>(gridDim.x) - num_send);
  }
  if (last_block(state) && threadIdx.x == 0) {
    if (num_send > 0) state.next_step = step + 1;
    if (static_cast<i32>(gridDim.x) > num_send)
      reinterpret_cast<HandleMeta*>(p.handle)->state = kReceived;
  }
}
