// The letter of the protocol, first page: integers, types, limits, and the shape of a communicator,
// from which all sizes follow. The files of this folder are the one description used by the
// planner, the host kernels and the device kernels, so they compile under g++ and NVRTC and include
// nothing else:
//
//   shape.h    what a communicator is made for      handle.h   what dispatch leaves for its combine
//   slot.h     where a token lies in its slot       signal.h   words that ranks of a node share
//   region.h   where slots lie in a rank's memory   params.h   what the host hands to a kernel
//   rows.h     copies of many rows by one launch    copy.h     requests to the copy kernel
//   layout.h   where a receiver's rows lie
//
//   W ranks, L ranks per node, N = W / L nodes, rank = node * L + local
//   M tokens per step (slot capacity), K top-k, S steps in flight, H hidden size
//
// A *step* is one dispatch and one combine. Step e uses step slot e mod S of every region.
// docs/protocol.md explains how these are used.
#pragma once

#if defined(__CUDACC_RTC__)
#define MOE_P2P_HD __host__ __device__ inline
namespace moe_p2p::abi {
using i32 = int;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
}  // namespace moe_p2p::abi
#else
#include <cstdint>
#if defined(__CUDACC__)
#define MOE_P2P_HD __host__ __device__ inline
#else
#define MOE_P2P_HD inline
#endif
namespace moe_p2p::abi {
using i32 = std::int32_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using i64 = std::int64_t;
using u64 = std::uint64_t;
}  // namespace moe_p2p::abi
#endif

namespace moe_p2p::abi {

inline constexpr i32 kMaxTopk = 32;
inline constexpr i32 kMaxExperts = 32768;    // expert ids travel in 16 bits, one value means "none"
inline constexpr i32 kMaxRanksPerNode = 64;  // a set of local ranks is one 64-bit word
inline constexpr i32 kMaxExtras = 8;
inline constexpr u16 kNoExpert = kMaxExperts;
// A warp's store must cover whole 128-byte lines to use NVLink fully.
inline constexpr u64 kLine = 128;
inline constexpr i32 kScaleBlock = 128;  // values that share one fp8 scale

MOE_P2P_HD constexpr u64 align_up(u64 value, u64 to) { return (value + to - 1) / to * to; }

// Returns the values `offset` bytes behind `base`, const where the bytes are. Byte: char in
// kernels, std::byte on hosts.
template <typename T, typename Byte>
struct SameConst {
  using Type = T;
};
template <typename T, typename Byte>
struct SameConst<T, const Byte> {
  using Type = const T;
};
template <typename T, typename Byte>
MOE_P2P_HD auto* values_at(Byte* base, u64 offset = 0) {
  return reinterpret_cast<typename SameConst<T, Byte>::Type*>(base + offset);
}

// kWeights: weights that a source sends with combine, because it did not know them at dispatch.
enum class Phase : i32 { kDispatch = 0, kCombine = 1, kWeights = 2 };
inline constexpr i32 kNumPhases = 3;

// kInt10, kBlock16: of partial sums that travel, no tensor has them.
enum class DType : i32 {
  kBFloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
  kFloat8E4M3 = 3,
  kInt10 = 4,
  kBlock16 = 5  // kernels/abi/block16.h
};

// The order in which a combine adds (docs/protocol.md, section 10). All but kRanks on one node
// only.
//   kRanks: rank by rank. kTopk: the sum of each rank at the last k of its experts. kRows: no sums
//   on the way, each row at its k.
enum class SumOrder : i32 { kRanks = 0, kTopk = 1, kRows = 2 };

// The type of partial sums that travel: the result's, 10-bit integers, these for what goes from
// node to node only, or blocks of 16-bit values.
enum class Partials : i32 { kSame = 0, kInt10 = 1, kInt10Nodes = 2, kBlock16 = 3 };
MOE_P2P_HD constexpr DType near_type(DType out, Partials partials) {
  return partials == Partials::kInt10     ? DType::kInt10
         : partials == Partials::kBlock16 ? DType::kBlock16
                                          : out;
}
MOE_P2P_HD constexpr DType far_type(DType out, Partials partials) {
  return partials == Partials::kInt10Nodes ? DType::kInt10 : near_type(out, partials);
}

// A row of 10-bit integers (docs/protocol.md, section 10). 32 values share a bf16 scale; 8 values
// are a *group*, 80 bits of codes, the first value lowest. Of a unit of 32 groups the lowest 64
// bits of each lie in the row's first plane, the other 16 bits in the second, the 8 scales in the
// third. A code is 512 + the integer from -511 to 511, and no scale is 0: so no word is ever 0.
inline constexpr i32 kInt10Block = 32, kInt10Group = 8, kInt10Unit = 256;
inline constexpr u64 kInt10UnitCodes = 256, kInt10UnitRest = 64, kInt10UnitScales = 16;  // bytes
inline constexpr u32 kInt10Zero = 512, kInt10Mask = 1023;
inline constexpr float kInt10Step = 1.0f / 511.0f;    // scale / the largest of a block
inline constexpr u32 kInt10LeastScale = 0x00800000u;  // 2^-126 as fp32
inline constexpr u32 kInt10NanScale = 0x7fc00000u;    // of a block that holds a NaN or an inf
inline constexpr float kInt10Magic = 12583424.0f;     // 1.5 * 2^23 + 512: x + it has code x below
MOE_P2P_HD constexpr u64 int10_units(u64 hidden) {
  return (hidden + kInt10Unit - 1) / static_cast<u64>(kInt10Unit);
}

// What a quantizing dispatch delivers as scales; on the wire they are fp32 always.
//   kPowerOfTwo: fp32, rounded up to a power of two; kUe8m0: its exponent byte, four in an i32
enum class ScaleFormat : i32 { kFloat32 = 0, kPowerOfTwo = 1, kUe8m0 = 2 };

MOE_P2P_HD constexpr u64 item_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 ? 1 : 2;
}
// Bytes of a row of `hidden` values.
MOE_P2P_HD constexpr u64 row_bytes(DType dtype, u64 hidden) {
  return dtype == DType::kInt10
             ? int10_units(hidden) * (kInt10UnitCodes + kInt10UnitRest + kInt10UnitScales)
             : hidden * item_bytes(dtype);
}

// Fixed when the communicator is made, equal on all ranks (checked by name at construction).
struct Shape {
  i32 world_size;
  i32 ranks_per_node;
  i32 num_experts;
  i32 max_local_experts;  // of the rank that owns most
  i32 topk;
  i32 chunk_tokens;     // M
  i32 steps_in_flight;  // S
  i32 part_bytes;  // between nodes, least bytes sent ahead of the rest; 0: a region is sent whole
  u64 max_token_bytes;    // payload + scales + extras of one token, each part 16-byte aligned
  u64 max_partial_bytes;  // one combined row, with its K scalars

  MOE_P2P_HD constexpr i32 num_nodes() const { return world_size / ranks_per_node; }
  MOE_P2P_HD constexpr i32 num_other_nodes() const { return num_nodes() - 1; }
};

}  // namespace moe_p2p::abi
