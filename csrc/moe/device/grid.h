// How many blocks of a device kernel send and receive: a pure function of the call.
#pragma once

#include <cstdint>

#include "kernels/abi/params.h"

namespace moe_p2p::moe {

// A kernel, compiled and loaded (moe_p2p/moe/gpu/kernels.py).
struct DeviceKernel {
  uint64_t handle = 0;       // CUfunction
  unsigned num_threads = 0;  // threads of a block
  unsigned shared_bytes = 0;
  int num_send_workers = 1;  // workers of a sending block
  int num_recv_workers = 1;
  int max_send_blocks = 1;  // more would not make it faster
  int max_recv_blocks = 1;
  int max_copy_blocks = 1;      // replaces max_send_blocks when senders only copy
  int max_away_blocks = 1;      // replaces it where own rows stay in place, too
  int max_resident_blocks = 0;  // blocks that fit on the device at once
  uint64_t max_slot_bytes = 0;  // of a dispatch: capacity of its buffers
  int max_tokens = 0;           // of a call: it is for short ones; 0: for all
};

struct GridInput {
  int64_t send_items = 0;  // items that the sending workers of one chunk carry; 0: no such half
  int64_t recv_items = 0;
  int32_t relay_blocks = 0;
  int num_sms = 0;        // most blocks of the whole grid; 0: as many as help
  bool copies = false;    // rows that senders carry need no sum
  bool own_stay = false;  // and a slot has one row: rows to the own rank may stay
  bool weights = false;   // late ones
};

// Gives each item a worker, as far as there are blocks; few blocks are divided in the proportion of
// each half's maximum, and blocks that one half does not need go to the other. Each half of the
// call has a block, whatever num_sms is. A grid stays within max_resident_blocks: senders of
// several chunks wait for other ranks' receivers in the same call, senders of a gateway for other
// senders of its node.
abi::Grid choose_grid(const DeviceKernel& kernel, const GridInput& input) noexcept;

}  // namespace moe_p2p::moe
