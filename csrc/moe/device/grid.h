// How many blocks of a device kernel send and receive: a pure function of the call.
#pragma once

#include <cstdint>

#include "kernels/abi/params.h"

namespace moe_p2p::moe {

// A kernel as it was compiled and loaded (moe_p2p/gpu/kernels.py).
struct DeviceKernel {
  uint64_t handle = 0;       // CUfunction
  unsigned num_threads = 0;  // of a block
  unsigned shared_bytes = 0;
  int num_send_workers = 1;  // workers of a sending block
  int num_recv_workers = 1;
  int max_send_blocks = 1;  // more would not make it faster
  int max_recv_blocks = 1;
  int max_copy_blocks = 1;      // in place of max_send_blocks, where senders only copy
  int max_resident_blocks = 0;  // that fit on the device at once
  uint64_t max_slot_bytes = 0;  // of a dispatch: what its buffers hold
};

struct GridInput {
  int64_t send_items = 0;  // what the sending workers of one chunk have to carry; 0: no such half
  int64_t recv_items = 0;
  int relay_blocks = 0;  // abi::Grid::relay_blocks
  int num_sms = 0;       // most blocks of the whole grid; 0: as many as help
  bool copies = false;   // rows that senders carry need no sum
};

// A worker for each item, as far as blocks may be had; few blocks are divided in the proportion of
// the most that each half may have, and what one half does not need the other gets.
// Each half that there is has a block, whatever num_sms says. A grid stays within
// max_resident_blocks: senders of several chunks wait for what other ranks' receivers do in the
// same call, those of a gateway for what other senders of its node do.
abi::Grid choose_grid(const DeviceKernel& kernel, const GridInput& input) noexcept;

}  // namespace moe_p2p::moe
