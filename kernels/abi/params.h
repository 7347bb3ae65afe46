// What the host hands to each device kernel: one struct, filled by csrc/moe/device_kernels.cpp.
#pragma once

#include "kernels/abi/layout.h"

namespace moe_p2p::abi {

inline constexpr i32 kMaxDomainRanks = 64;  // ranks whose memory a device maps: those of its node

// The first wait of a communicator that ended without its word, for the host to tell. In pinned
// host memory; `raised` is taken by compare-and-swap, so one story is told.
struct Fault {
  u32 raised;  // FaultKind
  i32 phase;
  i32 source;  // rank that was waited for, or local expert for kCapacity
  i32 reserved;
  u64 step;
  u64 expected;
  u64 got;
  u32 complete;  // stored last
  u32 padding;
};
static_assert(sizeof(Fault) == 48, "shared between host and device");
enum FaultKind : u32 {
  kNoFault = 0,
  kTimedOut = 1,
  kCapacity = 2,       // expected: rows there are, got: rows needed
  kBadExpert = 3,      // expected: token, got: expert id
  kWrongHeader = 4,    // expected, got: flags or slot bytes
  kTooManyTokens = 5,  // expected: at most, got: tokens
};

// Device memory of one communicator that only its own kernels use.
struct DeviceState {
  u64 next_step;
  u32 blocks_done;  // of the running kernel; back to 0 at its end
  u32 aborted;      // 1 once a wait failed: nobody waits any more
};

// Fixed for a communicator.
struct DeviceComm {
  u64 data[kMaxDomainRanks];  // regions of each rank of the node, as this device maps them
  u64 state;                  // DeviceState
  u64 fault;                  // Fault, device address of pinned host memory
  u64 expert_rank;            // i32 [E]
  u64 expert_local;           // i32 [E]
  u64 timeout_ns;
  Regions regions;
  i32 rank;
  i32 num_local_experts;
  u32 communicator;
  i32 reserved;
};

struct DevicePart {
  u64 data;
  u64 row_bytes;
};

struct DispatchParams {
  DeviceComm comm;
  // sender; all rows contiguous
  u64 x;             // [T, H]
  u64 scales;        // f32 [T, ceil(H / 128)] or 0
  u64 topk_idx;      // i32 or i64 [T, K]
  u64 topk_weights;  // f32 [T, K] or 0
  u64 num_tokens;    // i32 or i64 on the device, or 0
  i32 num_tokens_host;
  i32 num_rows;  // T
  i32 topk_is_int64;
  i32 num_tokens_is_int64;
  DevicePart extras[kMaxExtras];
  u64 handle;  // i32 words
  // receiver
  u64 out_x;
  u64 out_scales;
  DevicePart out_extras[kMaxExtras];
  u64 row_weights;  // f32 [rows]
  u64 counts;       // i32 [E_local]
  u64 offsets;      // i32 [E_local + 1]
  u64 source;       // i32 [rows, 2] or 0
  i32 grouped;
  i32 zero_padding;
  i64 capacity;
  i64 alignment;
  TokenParts parts;
  i32 num_extras;
  // blocks [0, num_send_blocks) send, the others receive
  i32 num_send_blocks;
};

struct CombineParams {
  DeviceComm comm;
  u64 handle;
  u64 y;            // [rows, H]
  u64 row_weights;  // f32 [rows] or 0
  u64 row_scalars;  // f32 [rows] or 0
  u64 out;          // [T, H]
  u64 out_scalars;  // f32 [T, K] or 0
  u64 stride;       // of partial rows
  i32 num_send_blocks;
  i32 empty;  // release: headers only
};

}  // namespace moe_p2p::abi
