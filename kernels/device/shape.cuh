// The numbers that a kernel is compiled for, from macros (moe_p2p/moe/gpu/kernels.py sets them),
// and where things lie in the memory of a rank.
#pragma once

#include "kernels/abi/handle.h"
#include "kernels/abi/params.h"
#include "kernels/abi/signal.h"
#include "kernels/device/ptx.cuh"

// 1: arrivals from other nodes are seen by flags (kernels/abi/region.h), 0: they are relayed. Each
// communicator knows which before its first kernel is compiled.
#ifndef MOE_P2P_ARRIVAL_FLAGS
#define MOE_P2P_ARRIVAL_FLAGS 0
#endif
// 1: a NIC that only keeps time (csrc/provider/loopback/timed.h) finds what goes to other nodes in
// its place.
#ifndef MOE_P2P_IN_PLACE
#define MOE_P2P_IN_PLACE 0
#endif

// 1: the world changes (docs/elastic.md).
#ifndef MOE_P2P_ELASTIC
#define MOE_P2P_ELASTIC 0
#endif
// 1: rows of y are written while combine runs (kernels/combine/send.cuh); dispatch counts rows that
// have arrived (kernels/dispatch/ready.cuh).
#ifndef MOE_P2P_READY
#define MOE_P2P_READY 0
#endif

namespace moe_p2p::device {

inline constexpr Shape kShape{
    .world_size = MOE_P2P_WORLD_SIZE,
    .ranks_per_node = MOE_P2P_RANKS_PER_NODE,
    .num_experts = MOE_P2P_NUM_EXPERTS,
    .max_local_experts = MOE_P2P_MAX_LOCAL_EXPERTS,
    .topk = MOE_P2P_TOPK,
    .chunk_tokens = MOE_P2P_CHUNK_TOKENS,
    .steps_in_flight = MOE_P2P_STEPS_IN_FLIGHT,
    // Where masks grow either all rows of a source arrive or none.
    .part_bytes = MOE_P2P_MASKS == 1 ? 0 : MOE_P2P_PART_BYTES,
    .max_token_bytes = MOE_P2P_MAX_TOKEN_BYTES,
    .max_partial_bytes = MOE_P2P_MAX_PARTIAL_BYTES,
};
// Kernels of one node find regions by numbers from the host, so steps of other lengths share them:
// the macro is then the longest of the class (moe_p2p/moe/gpu/launch_shape.py, step_class). In
// bulk, and with parts that go to other nodes, they are constants, which take fewer registers.
inline constexpr bool kFixedPlaces = MOE_P2P_BULK || kShape.num_other_nodes() > 0;
inline constexpr Places kPlaces = Places::make(kShape);
inline constexpr u64 kArrivals = make_regions(kShape).arrivals;  // with other nodes
inline constexpr Signals kSignals = Signals::make(kShape);
inline constexpr DeviceWords kWords = DeviceWords::make(kShape);
inline constexpr u64 kInboxSlots = inbox_slots_offset(kShape);
inline constexpr u64 kOutboxSlots = outbox_slots_offset(kShape);
// 1: ranks that are gone are masked, 2: only ranks that are absent from the first step on.
inline constexpr bool kMasks = MOE_P2P_MASKS, kMasksGrow = MOE_P2P_MASKS == 1;
// Sums that lack what a masked rank had to send. kUnseen: they go without it; kCounted: that is
// counted, too; kPoisoned: they are NaN, and counted.
#ifndef MOE_P2P_LOST
#define MOE_P2P_LOST 0
#endif
enum class LostSums { kUnseen, kCounted, kPoisoned };
inline constexpr LostSums kLostSums{MOE_P2P_LOST};
static_assert(kLostSums == LostSums::kUnseen || kMasksGrow);
// Rows from own-node ranks flag themselves as arrived (device/self_flag.cuh).
inline constexpr bool kSelfFlagged = MOE_P2P_SELF_FLAGGED;
// Whether what goes to another node can be more than one part.
inline constexpr u64 kWidestSlot = slot_bytes(kShape.topk, kShape.max_token_bytes);
inline constexpr u64 kWidestPartial = align_up(kShape.max_partial_bytes, kLine);
inline constexpr bool kInParts = kShape.num_nodes() > 1 &&
                                 part_slots(kShape, kWidestSlot > kWidestPartial
                                                        ? kWidestSlot
                                                        : kWidestPartial) < kShape.chunk_tokens;
// Plain kernels are for calls without rare options (is_plain() in csrc/moe/device/backend.cpp):
// what these ask for is a constant here, so the code is shorter and fewer registers are live.
inline constexpr bool kPlain = MOE_P2P_PLAIN;
inline constexpr bool kReady = MOE_P2P_READY;
template <typename Params>
__device__ __forceinline__ i32 num_chunks_of(const Params& p) {
  return kPlain ? 1 : p.num_chunks;
}
inline constexpr i32 kHidden = MOE_P2P_HIDDEN_DIM;
inline constexpr i32 kExperts = kShape.num_experts;
inline constexpr i32 kMaxLocalExperts = kShape.max_local_experts;
inline constexpr i32 kTopk = kShape.topk;
inline constexpr i32 kWorld = kShape.world_size;
inline constexpr i32 kLocal = kShape.ranks_per_node;
inline constexpr i32 kNodes = kShape.num_nodes();
inline constexpr i32 kOthers = kShape.num_other_nodes();
inline constexpr i32 kColumns = kLocal + kNodes;    // of HandleMeta's send_slots
inline constexpr i32 kChunk = kShape.chunk_tokens;  // chunk_of() or more
inline constexpr i32 kChunkWords = (kChunk + 31) / 32;
inline constexpr i32 kSteps = kShape.steps_in_flight;
inline constexpr i32 kScales = (kHidden + kScaleBlock - 1) / kScaleBlock;

// The mirror world, for measuring W ranks on one or two GPUs (docs/gpu.md, "The mirror world"):
// this rank is rank 0 of a node, and all others are played by one partner, or by itself.
#ifndef MOE_P2P_MIRROR
#define MOE_P2P_MIRROR 0
#endif
inline constexpr bool kMirror = MOE_P2P_MIRROR;
static_assert(!kMirror || (kOthers == 0 && !kMasks && MOE_P2P_UNIFORM_EXPERTS));

// Whether the grid has a relaying block. Where no arrivals are seen by flags it is known ahead.
__device__ __forceinline__ bool has_relay(const Grid& grid) {
  return kOthers > 0 && (!MOE_P2P_ARRIVAL_FLAGS || grid.num_relay_blocks > 0);
}
inline constexpr bool kElastic = MOE_P2P_ELASTIC;
__device__ __forceinline__ EpochTable* table_of(const DeviceComm& comm) {
  return reinterpret_cast<EpochTable*>(comm.data[0]);
}
// Regions, and signal memory, of rank `i` of the node (DeviceComm), and the number of handles.
__device__ __forceinline__ u64 data_of(const DeviceComm& comm, i32 i) {
  return kElastic ? table_of(comm)->data[i] : comm.data[i];
}
__device__ __forceinline__ u64 signals_of(const DeviceComm& comm, i32 i) {
  return kElastic ? table_of(comm)->signals[i] : comm.signals[i];
}
__device__ __forceinline__ u32 communicator_of(const DeviceComm& comm) {
  return kElastic ? table_of(comm)->communicator : comm.communicator;
}
// M: most tokens of a step.
__device__ __forceinline__ i32 chunk_of(const DeviceComm& comm) {
  return kFixedPlaces ? kChunk : comm.places.chunk_tokens;
}
// Region `index` of step slot `slot` in the memory at `data`.
template <u32 Places::* kFirst, u32 Places::* kEach>
__device__ __forceinline__ char* region_at(const DeviceComm& comm, u64 data, i32 slot, i32 index) {
  if constexpr (kFixedPlaces) {
    constexpr u64 kStep = kPlaces.step * kLine, kBegin = kPlaces.*kFirst * kLine;
    constexpr u64 kSize = kPlaces.*kEach * kLine;
    return reinterpret_cast<char*>(data + static_cast<u64>(slot) * kStep + kBegin +
                                   static_cast<u64>(index) * kSize);
  } else {
    const Places& at = comm.places;
    const u32 line =
        static_cast<u32>(slot) * at.step + at.*kFirst + static_cast<u32>(index) * (at.*kEach);
    return reinterpret_cast<char*>(data + static_cast<u64>(line) * kLine);
  }
}
__device__ __forceinline__ char* inbox_at(const DeviceComm& comm, u64 data, i32 slot, i32 source) {
  return region_at<&Places::inbox, &Places::inbox_lines>(comm, data, slot, source);
}
__device__ __forceinline__ u32* inbox_flags_at(const DeviceComm& comm, u64 data, i32 slot,
                                               i32 source) {
  return reinterpret_cast<u32*>(
      region_at<&Places::inbox_flags, &Places::flags_lines>(comm, data, slot, source));
}
__device__ __forceinline__ char* partial_at(const DeviceComm& comm, u64 data, i32 slot,
                                            i32 expert_rank) {
  return region_at<&Places::partial_inbox, &Places::partial_lines>(comm, data, slot, expert_rank);
}
__device__ __forceinline__ u32* partial_flags_at(const DeviceComm& comm, u64 data, i32 slot,
                                                 i32 expert_rank) {
  return reinterpret_cast<u32*>(
      region_at<&Places::partial_flags, &Places::flags_lines>(comm, data, slot, expert_rank));
}
// `other` counts nodes without the own one (other_index).
__device__ __forceinline__ char* outbox_at(const DeviceComm& comm, u64 data, i32 slot, i32 other) {
  return region_at<&Places::outbox, &Places::outbox_lines>(comm, data, slot, other);
}
__device__ __forceinline__ char* landing_at(const DeviceComm& comm, u64 data, i32 slot, i32 other) {
  return region_at<&Places::landing, &Places::outbox_lines>(comm, data, slot, other);
}
__device__ __forceinline__ char* gather_at(const DeviceComm& comm, u64 data, i32 slot, i32 other,
                                           i32 expert_rank) {
  return region_at<&Places::gather, &Places::partial_lines>(comm, data, slot,
                                                            other * kLocal + expert_rank);
}
__device__ __forceinline__ u32* gather_flags_at(const DeviceComm& comm, u64 data, i32 slot,
                                                i32 other, i32 expert_rank) {
  return reinterpret_cast<u32*>(region_at<&Places::gather_flags, &Places::flags_lines>(
      comm, data, slot, other * kLocal + expert_rank));
}
__device__ __forceinline__ char* combine_outbox_at(const DeviceComm& comm, u64 data, i32 slot,
                                                   i32 other) {
  return region_at<&Places::combine_outbox, &Places::partial_lines>(comm, data, slot, other);
}
__device__ __forceinline__ char* combine_landing_at(const DeviceComm& comm, u64 data, i32 slot,
                                                    i32 other) {
  return region_at<&Places::combine_landing, &Places::partial_lines>(comm, data, slot, other);
}
__device__ __forceinline__ char* weights_inbox_at(const DeviceComm& comm, u64 data, i32 slot,
                                                  i32 source) {
  return region_at<&Places::weights_inbox, &Places::weights_lines>(comm, data, slot, source);
}
__device__ __forceinline__ char* weights_outbox_at(const DeviceComm& comm, u64 data, i32 slot,
                                                   i32 other) {
  return region_at<&Places::weights_outbox, &Places::weights_lines>(comm, data, slot, other);
}
__device__ __forceinline__ char* weights_landing_at(const DeviceComm& comm, u64 data, i32 slot,
                                                    i32 other) {
  return region_at<&Places::weights_landing, &Places::weights_lines>(comm, data, slot, other);
}

// Loads the parameters of a kernel that waits for the kernel before it: the first read of each line
// takes as long as one of global memory.
template <typename Params>
__device__ __forceinline__ void touch(const Params& p) {
  constexpr u64 kLineBytes = 64, kPeers = sizeof(u64) * kLocal;
  constexpr u64 kRest = 2 * sizeof(u64) * kMaxDomainRanks;  // what follows the addresses
  const auto* words = reinterpret_cast<const u32*>(&p);
  u32 all = 0;
#pragma unroll
  for (u64 at = 0; at < kPeers; at += kLineBytes) all ^= words[at / sizeof(u32)];
#pragma unroll
  for (u64 at = kRest; at < sizeof(Params); at += kLineBytes) all ^= words[at / sizeof(u32)];
  use(all);
}

// Words of the communicator's own memory (DeviceWords).
template <typename T>
__device__ __forceinline__ T* state_words(const DeviceComm& comm, u64 offset) {
  return reinterpret_cast<T*>(comm.state + offset);
}

// A rank as itself sees it.
struct Self {
  i32 rank, node, local;

  __device__ explicit Self(const DeviceComm& comm)
      : rank(comm.rank), node(comm.rank / kLocal), local(comm.rank % kLocal) {}
  __device__ bool same_node(i32 source) const { return kNodes == 1 || source / kLocal == node; }
  // Its index among the regions of rank l of the own node: wherever a rank stores into, or reads
  // from, the memory of another rank, data_of(comm, l).
  __device__ i32 index_at(i32 l) const { return kMirror ? (kLocal - l) % kLocal : local; }
};

// Where this rank writes what its NICs take to another node: its own region, or the region over
// there into which they would write.
struct FarPlace {
  u64 data;
  i32 index;

  __device__ FarPlace(const DeviceComm& comm, const Self& self, i32 other)
      : data(data_of(comm, MOE_P2P_IN_PLACE ? kLocal + other : self.local)),
        index(MOE_P2P_IN_PLACE ? other_index(self.node, other_node(other, self.node)) : other) {}
};
__device__ __forceinline__ char* outbox_of(const DeviceComm& comm, const Self& self, i32 slot,
                                           i32 other) {
  const FarPlace at(comm, self, other);
  return MOE_P2P_IN_PLACE ? landing_at(comm, at.data, slot, at.index)
                          : outbox_at(comm, at.data, slot, at.index);
}
__device__ __forceinline__ char* combine_outbox_of(const DeviceComm& comm, const Self& self,
                                                   i32 slot, i32 other) {
  const FarPlace at(comm, self, other);
  return MOE_P2P_IN_PLACE ? combine_landing_at(comm, at.data, slot, at.index)
                          : combine_outbox_at(comm, at.data, slot, at.index);
}
__device__ __forceinline__ char* weights_outbox_of(const DeviceComm& comm, const Self& self,
                                                   i32 slot, i32 other) {
  const FarPlace at(comm, self, other);
  return MOE_P2P_IN_PLACE ? weights_landing_at(comm, at.data, slot, at.index)
                          : weights_outbox_at(comm, at.data, slot, at.index);
}

// A slot of a step: slot `index` of `source`.
struct Item {
  i32 source, index;
};
// Items in an order that takes the sources in turns, the own rank first, and begins each round with
// the next: a worker that takes every n-th item meets all sources, whatever n is.
__device__ __forceinline__ Item item_of(const Self& self, i32 i) {
  const i32 index = i / kWorld;
  return {(i + index + self.rank) % kWorld, index};
}
// The same in the order of combine, for sources with at most `most` slots each: slots that a
// neighbour adds up for another node and therefore waits for, slots that this rank adds up for
// other nodes, then the own node's.
__device__ __forceinline__ Item sum_item_of(const Self& self, i32 i, i32 most) {
  if constexpr (kOthers == 0) return item_of(self, i);
  constexpr i32 kNeighbours = kLocal > 1 ? kLocal - 1 : 1, kFar = kOthers > 0 ? kOthers : 1;
  constexpr i32 kPushed = kOthers * (kLocal - 1);
  const auto far = [&](i32 other, i32 l) { return other_node(other, self.node) * kLocal + l; };
  if (i < most * kPushed) {
    const i32 index = i / max(kPushed, 1), n = (i + index + self.rank) % max(kPushed, 1);
    return {far(n / kNeighbours, (self.local + 1 + n % kNeighbours) % kLocal), index};
  }
  i -= most * kPushed;
  if (i < most * kOthers) {
    const i32 index = i / kFar;
    return {far((i + index + self.rank) % kFar, self.local), index};
  }
  i -= most * kOthers;
  const i32 index = i / kLocal;
  return {self.node * kLocal + (i + index + self.local) % kLocal, index};
}

// Returns the region with what `source` dispatched to this rank or its node.
__device__ __forceinline__ char* dispatch_region(const DeviceComm& comm, const Self& self, i32 slot,
                                                 i32 source) {
  return self.same_node(source) ? inbox_at(comm, data_of(comm, self.local), slot, source % kLocal)
                                : landing_at(comm, data_of(comm, source % kLocal), slot,
                                             other_index(source / kLocal, self.node));
}
// The same for the weights sent with combine.
__device__ __forceinline__ char* weights_region(const DeviceComm& comm, const Self& self, i32 slot,
                                                i32 source) {
  return self.same_node(source)
             ? weights_inbox_at(comm, data_of(comm, self.local), slot, source % kLocal)
             : weights_landing_at(comm, data_of(comm, source % kLocal), slot,
                                  other_index(source / kLocal, self.node));
}

// Number of slots in a part that comes from, or goes to, another node.
__device__ __forceinline__ i32 slots_of_part(u64 stride) {
  const Shape shape = kShape;  // a constant of the compiler has no address on the device
  return kInParts ? part_slots(shape, stride) : kChunk;
}
__device__ __forceinline__ i32 part_of_slot(u64 stride, i32 index) {
  return kInParts ? index / slots_of_part(stride) : 0;
}

__device__ __forceinline__ i32 slot_of(u64 step) {
  return static_cast<i32>(step % static_cast<u64>(kSteps));
}

// The value of the flags of a step's slots and rows: the low half of e + 1, but never 0, which
// memory holds at first.
__device__ __forceinline__ u32 flag_of(u64 step) {
  const auto flag = static_cast<u32>(step + 1);
  return flag != 0 ? flag : 1u << 31;
}

struct Owner {
  i32 rank;
  i32 local;  // among the experts of that rank
};
__device__ __forceinline__ Owner owner_of(const DeviceComm& comm, i32 expert) {
#if MOE_P2P_UNIFORM_EXPERTS
  return {expert / kMaxLocalExperts, expert % kMaxLocalExperts};
#else
  return {__ldg(&comm.expert_rank[expert]), __ldg(&comm.expert_local[expert])};
#endif
}

__device__ __forceinline__ i32 num_local_experts(const DeviceComm& comm) {
  constexpr bool kEqual = MOE_P2P_UNIFORM_EXPERTS && kExperts == kWorld * kMaxLocalExperts;
  return kEqual ? kMaxLocalExperts : comm.num_local_experts;
}

// Returns the expert meant by an id in a slot from `source`. In the mirror world rank s sends what
// rank 0 sends, with experts turned by s ranks.
__device__ __forceinline__ i32 expert_from(i32 source, i32 expert) {
  return kMirror ? (expert + source * kMaxLocalExperts) % kExperts : expert;
}

// The handle's arrays (HandleLayout). In registers they need an address and two numbers.
struct HandleArrays {
  i32* words;
  i32 num_chunks, num_slots;

  template <typename Params>
  __device__ explicit HandleArrays(const Params& p)
      : words(reinterpret_cast<i32*>(p.handle)),
        num_chunks(num_chunks_of(p)),
        num_slots(p.num_slots) {}
  __device__ HandleLayout layout() const {
    const Shape shape = kShape;  // a constant of the compiler has no address on the device
    return HandleLayout::make(shape, 0, num_chunks, num_slots);
  }
  __device__ HandleMeta& meta() const { return *reinterpret_cast<HandleMeta*>(words); }
  __device__ i32& slot_count(i32 chunk, i32 source) const {
    return words[layout().slot_counts + static_cast<u64>(chunk * kWorld + source)];
  }
  __device__ u64 slot_index(i32 chunk, i32 source, i32 index) const {
    return static_cast<u64>(chunk * kWorld + source) * static_cast<u64>(num_slots) +
           static_cast<u64>(index);
  }
  __device__ i32* rows_of(i32 chunk, i32 source, i32 index) const {
    return words + layout().slot_rows + slot_index(chunk, source, index) * kTopk;
  }
  __device__ u64* ranks_of(i32 chunk, i32 source, i32 index) const {
    return reinterpret_cast<u64*>(words + layout().slot_ranks) + slot_index(chunk, source, index);
  }
  __device__ i32* send_slots(i64 token) const {
    return words + layout().send_slots + static_cast<u64>(token) * kColumns;
  }
};

}  // namespace moe_p2p::device
