// What the host passes to each device kernel: one struct, filled in csrc/moe/device/backend.cpp.
#pragma once

#include "kernels/abi/region.h"

namespace moe_p2p::abi {

inline constexpr i32 kMaxDomainRanks = 64;  // ranks of a node, whose memory a device maps

// The first failure of a communicator, for the host to report. In pinned host memory, written by
// the thread that sets DeviceState::aborted, so only one is reported.
struct Fault {
  u32 raised;  // FaultKind
  i32 phase;
  i32 source;  // rank waited for; for kCapacity the local expert, or -1: all together
  i32 reserved;
  u64 step;
  u64 expected;
  u64 got;
  u32 complete;  // stored last: not 0, and in a world that changes epoch_mark()
  u32 padding;
  // Tokens whose sums lacked what a lost rank had to send: their number, under the mark of the
  // epoch, and of the last one the step and the rank.
  u64 lost_tokens, lost_step;
  i64 lost_rank;
};
static_assert(sizeof(Fault) == 72, "shared between host and device");
// Of the communicator whose kernels report something; not 0.
MOE_P2P_HD constexpr u32 epoch_mark(u32 communicator) { return communicator + 1; }
inline constexpr i32 kMarkBit = 48;  // of Fault::lost_tokens, which counts below it
enum FaultKind : u32 {
  kNoFault = 0,
  kTimedOut = 1,
  kCapacity = 2,         // expected: rows available, got: rows needed
  kBadExpert = 3,        // expected: token, got: expert id
  kWrongHeader = 4,      // expected, got: flags or slot bytes
  kTooManyTokens = 5,    // this rank's; expected: at most, got: tokens
  kAborted = 6,          // the abort word of the signal memory; got: that word
  kBadHandle = 7,        // expected, got: communicator
  kDuplicateExpert = 8,  // expected: token, got: expert id
  kTwoAtOnce = 9,        // expected: kernels that had ended, got: that had begun
  kOtherMaxTokens = 10,  // expected, got: max_tokens of the call
  kRowsNotReady = 11,    // expected: which counter of RowCounters, got: what it stands at
};

// Device memory of one communicator that only its own kernels use: DeviceState, then the words.
struct DeviceState {
  // Every block of a kernel adds its share once it has read this, kLaunch in all: the upper part
  // counts kernels and changes only when the last block has added.
  u64 launches;
  u64 next_step[2];  // kernel number n reads [n mod 2] and writes the other
  u32 aborted;       // 1 once a fault was raised: all waits end
  u32 begun;         // kernels whose first block has begun
  u64 masks;  // i32 [W] on this device, not 0 for masked ranks (csrc/moe/node/masks.h); or null
  u32 ended;  // kernels whose first block has ended: as many as have begun, unless two run at once
  u32 num_absent;   // ranks that are not in this epoch (EnterParams)
  u64 lost_tokens;  // as Fault has them
  u64 stamps;  // StepStamps [kStampedSteps] of kernels that are compiled to note times; or null
  u32 reserved[16];
};
static_assert(sizeof(DeviceState) == kLine, "the words start on a line");
inline constexpr u64 kLaunch = 65536;  // most blocks of a kernel

// The last dispatch of a step slot, which its combine or a release has to close. The device decides
// which combine that is: a graph is replayed without the host.
struct OpenStep {
  u64 step;    // e + 1
  u64 closer;  // 1 + the number of the kernel that has closed it, or closes it; 0: none yet
};

// Times of the last steps, by phase (kernels/device/stamps.cuh). A time of an earlier lap is before
// the step's first one.
inline constexpr i32 kStampedSteps = 2048, kStamps = 6;
struct StepStamps {
  u64 step;  // e + 1
  u64 time[kNumPhases][kStamps];
};

// Offsets in bytes from DeviceState.
struct DeviceWords {
  u64 arrivals;  // u64 [3][S][W]  flags of other nodes (signal.h), relayed here by one block
  // u32 [S][N][kMaxParts]  how many items of a part of an outbox, or of a combine_outbox, are
  // written: slots, and the header. Wraps to 0 when the part is complete.
  u64 outbox, combine_outbox;
  u64 read;      // u64 [S]        e + 1: the sums of a solo combine of step e are read
  u64 received;  // u32 [S]        workers that have read a solo dispatch, or combine
  u64 came;      // u64 [S][W]     with masks, 2 (e + 1) + whether the dispatch of step e arrived
  u64 lost;  // u64 [S]        after a fault, e + 1 above the count of poisoned rows of its dispatch
  u64 lost_row;  // stands in for a partial row that did not arrive
  u64 open;      // OpenStep [S]
  u64 total_bytes;

  MOE_P2P_HD static constexpr DeviceWords make(const Shape& s) {
    const u64 slots = static_cast<u64>(s.steps_in_flight);
    DeviceWords w{};
    w.arrivals = sizeof(DeviceState);
    w.outbox = w.arrivals + 8 * kNumPhases * slots * static_cast<u64>(s.world_size);
    const u64 parts = slots * static_cast<u64>(s.num_nodes()) * kMaxParts;
    w.combine_outbox = w.outbox + 4 * parts;
    w.read = align_up(w.combine_outbox + 4 * parts, 8);
    w.received = w.read + 8 * slots;
    w.came = align_up(w.received + 4 * slots, 8);
    w.lost = w.came + 8 * slots * static_cast<u64>(s.world_size);
    w.lost_row = align_up(w.lost + 8 * slots, kLine);
    w.open = align_up(w.lost_row + s.max_partial_bytes, kLine);
    w.total_bytes = align_up(w.open + sizeof(OpenStep) * slots, kLine);
    return w;
  }
};

// Address of values in device memory, which the host only passes on. T = void: the type depends on
// the call.
template <typename T>
struct DevicePtr {
  u64 address;

  template <typename U>
  MOE_P2P_HD U* as() const {
    return reinterpret_cast<U*>(address);
  }
  MOE_P2P_HD T* get() const { return as<T>(); }
  MOE_P2P_HD auto& operator[](i64 i) const { return get()[i]; }
  MOE_P2P_HD explicit operator bool() const { return address != 0; }
};

// What an epoch of a world that changes has of its own, and what is therefore no argument of its
// kernels, which a captured graph keeps. In this device's memory, where it stays; stored by
// kernels/enter.cu.
struct EpochTable {
  u64 data[kMaxDomainRanks], signals[kMaxDomainRanks];  // DeviceComm's
  u32 communicator;                                     // likewise
  u32 padding;
};
static_assert(sizeof(EpochTable) % sizeof(u64) == 0, "copied by words");

// Fixed for a communicator.
struct DeviceComm {
  // Regions of each rank of the node, as this device maps them; behind them, if a NIC writes in
  // place, the regions of this rank's partners, by other node. Where the world changes: data[0] is
  // the address of an EpochTable, which has these, `signals` and `communicator`.
  u64 data[kMaxDomainRanks];
  u64 signals[kMaxDomainRanks];       // signal memory of each rank of the node, likewise
  u64 state;                          // DeviceState and DeviceWords
  DevicePtr<Fault> fault;             // pinned host memory, as the device sees it
  DevicePtr<const i32> expert_rank;   // [E]
  DevicePtr<const i32> expert_local;  // [E]
  u64 timeout_ns;
  i32 rank;
  i32 num_local_experts;
  u32 communicator;
  i32 flag_words;  // arrival flags of a part (region.h); 0: arrivals are relayed
  Places places;
};

// Roles of a kernel's blocks: one relaying block when something is to be relayed from other nodes,
// then sending blocks, then receiving ones. A half without blocks is left out.
struct Grid {
  i32 num_send_blocks;
  i32 num_recv_blocks;
  i32 num_relay_blocks;  // 0 or 1
};

struct DevicePart {
  DevicePtr<char> data;
  u64 row_bytes;
};

// Where scales lie: word b of row r of local expert e is at r * row + e * expert + b * word, in
// words of 4 bytes. `expert` is 0 but for columns in the padded layout.
struct ScalePlace {
  i64 row, expert, word;
};

struct DispatchParams {
  DeviceComm comm;
  // sender; all rows contiguous
  DevicePtr<const void> x;              // [T, H]
  DevicePtr<const void> scales;         // f32 [T, ceil(H / 128)], or the caller's own words, or 0
  DevicePtr<const void> topk_idx;       // i32 or i64 [T, K]
  DevicePtr<const float> topk_weights;  // [T, K] or 0
  DevicePtr<void> topk_copy;            // as topk_idx, or 0
  DevicePtr<const void> num_tokens;     // i32 or i64 on the device, or 0
  i32 num_tokens_host;
  i32 num_rows;  // T
  i32 num_chunks;
  i32 num_slots;  // HandleMeta's
  i32 max_tokens;
  i32 solo;  // the receiving half answers with the empty combine
  i32 topk_is_int64;
  i32 num_tokens_is_int64;
  DevicePart extras[kMaxExtras];
  u64 handle;  // i32 words
  // receiver
  DevicePtr<void> out_x;
  DevicePtr<void> out_scales;  // words of 4 bytes
  DevicePart out_extras[kMaxExtras];
  DevicePtr<float> row_weights;  // [rows], per token: [rows, K]
  DevicePtr<void> row_topk;      // per token: i32 or i64, as topk_idx, [rows, K]
  DevicePtr<i32> counts;         // [E_local]
  // [E_local + 1], per token: [W + 1]; 0: there are no outputs, nor room for rows
  DevicePtr<i32> offsets;
  DevicePtr<i32> source;      // [rows, 2] or 0
  DevicePtr<i64> ranges;      // [E_local, W] or 0; not per token
  DevicePtr<i64> wait_ticks;  // [W] or 0
  i32 grouped;                // not LayoutFacts::apart
  i32 zero_padding;
  i64 capacity;
  i64 alignment;
  ScalePlace scale_place;
  TokenParts parts;
  i32 num_extras;
  i32 opaque;  // RegionFlags::kOpaque
  Grid grid;
  i32 drop;  // rows past the capacity are no fault; the last offset says how many would be enough
  // u32 [E_local, arrival_counters(capacity)], padded, or 0: a product begins before all rows are
  // here (kernels/dispatch/ready.cuh).
  DevicePtr<u32> ready;
};

// A counter of rows that arrive is for kArrivalRows of an expert, and rises by kArrivalWant in each
// dispatch: by 1 for a row, and by the rest, which is more than all of its rows, for the count of
// its expert.
inline constexpr i32 kArrivalRows = 128;
inline constexpr u32 kArrivalWant = 512;
MOE_P2P_HD constexpr i32 arrival_counters(i64 capacity) {
  return static_cast<i32>((capacity + kArrivalRows - 1) / kArrivalRows);
}
MOE_P2P_HD constexpr u32 arrival_rest(i64 num_rows, i32 counter) {
  const i64 rows = num_rows - i64{counter} * kArrivalRows;
  const i64 here = rows < 0 ? 0 : rows < kArrivalRows ? rows : kArrivalRows;
  return kArrivalWant - static_cast<u32>(here);
}

// Counters that the caller's kernel raises when rows of y are written (kernels/combine/send.cuh).
// Row r of local expert e is, once counter e * per_expert + r / rows is at `want` or beyond, where
// the counter may have passed 2^32: differences are signed.
struct RowCounters {
  DevicePtr<const u32> counters;  // 0: all rows are written when the kernel begins
  DevicePtr<const u32> base;      // a word that `want` is added to, or 0
  u32 want;
  i32 rows;        // of a counter
  i32 per_expert;  // counters
  i32 capacity;    // rows of an expert

  MOE_P2P_HD i32 counter_of(i32 row) const {
    return row / capacity * per_expert + row % capacity / rows;
  }
};

struct CombineParams {
  DeviceComm comm;
  u64 handle;
  DevicePtr<const void> y;             // [rows, H]
  DevicePtr<const float> row_weights;  // [rows] or 0
  DevicePtr<const float> row_scalars;  // [rows] or [rows, K], or 0
  // [T, K] of this rank's tokens, for the expert ranks, or 0; alike on all ranks
  DevicePtr<const float> topk_weights;
  DevicePtr<void> out;            // [T, H]
  DevicePtr<float> out_scalars;   // [T, K] or 0
  DevicePtr<const void> bias[2];  // [T, H] as `out` or 0, the first addends
  DevicePtr<i64> wait_ticks;      // [W] or 0
  u64 stride;                     // of partial rows
  i32 num_rows;                   // T; where only the sending half runs, without topk_weights, 0
  i32 num_chunks;
  i32 num_slots;     // HandleMeta's
  i32 with_scalars;  // on all ranks alike
  i32 topk_scalars;  // row_scalars has K for each row, and all of them travel
  i32 empty;         // release: headers only, once the dispatch has arrived
  Grid grid;
  // Of kernels that add in the order of top-k.
  DevicePtr<const void> topk_idx;  // i32 or i64 [T, K] of the dispatch
  i32 topk_is_int64;
  i32 rows_apart;  // SumOrder::kRows
  RowCounters ready;
};

// Of the kernel that takes lost ranks back (kernels/clean.cu).
struct CleanParams {
  DeviceComm comm;
  u64 round;
  u64 gone;  // bits of the ranks whose memory may be gone: nothing is stored there
};
static_assert(kMaxDomainRanks <= 64, "a bit for each rank");

// Of the kernel with which a rank enters an epoch (kernels/enter.cu).
inline constexpr i32 kMaxRanks = 8192;
struct EnterParams {
  DeviceComm comm;
  EpochTable table;
  u64 absent[kMaxRanks / 64];  // bits of the ranks that are not in it
};
static_assert(sizeof(EnterParams) <= 4096, "the most that a kernel may be given");

}  // namespace moe_p2p::abi
