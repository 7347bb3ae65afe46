// One kernel for both halves of combine, and for release. Blocks that send come before those that
// receive; what they wait for, the dispatches of this step, does not depend on any receiver.
#include "kernels/combine_recv.cuh"

using namespace moe_p2p::device;

namespace {

// Steps of a receiving half alone: its sending half left them in the handle.
__device__ u64& solo_step(const CombineParams& p) {
  return reinterpret_cast<u64*>(&reinterpret_cast<HandleMeta*>(p.handle)->reserved)[0];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kBlockThreads, MOE_P2P_BLOCKS_PER_SM)
    moe_p2p_combine(const __grid_constant__ CombineParams p) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const auto& meta = *reinterpret_cast<const HandleMeta*>(p.handle);
  const Role role = Role::of(p.grid);
  if (meta.magic != HandleMeta::kMagic || meta.communicator != p.comm.communicator) {
    raise_fault(p.comm, kBadHandle, Phase::kCombine, p.comm.rank, 0, p.comm.communicator,
                meta.communicator);
    return;
  }
  const bool sends = p.grid.num_send_blocks > 0, receives = p.grid.num_recv_blocks > 0;
  const bool opens = p.solo && sends;
  const OpenedSteps steps = OpenedSteps::read(p.comm);
  const u64 first = opens ? steps.first : p.solo ? solo_step(p) : meta.first_step;
  if (role.relay) {
    relay(p.comm, first, meta.num_chunks,
          {.free = opens, .dispatch = opens || p.empty, .combine = receives});
    if (opens && !receives && threadIdx.x == 0) solo_step(p) = first;
  } else if (role.send >= 0 && p.empty) {
    if (role.send == 0) send_release(p, first);
  } else if (role.send >= 0) {
    if (kOthers == 0 && opens && !receives && role.send == 0 && threadIdx.x == 0)
      solo_step(p) = first;
    combine_send(p, meta, first, role.send);
  } else {
    combine_recv(p, meta, first, role.recv);
  }
  if (opens) steps.close(p.comm, meta.num_chunks);
}
