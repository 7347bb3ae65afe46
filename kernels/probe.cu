// Measures the links of this machine, for the floors of `python -m moe_p2p bench`: bandwidth of an
// all-to-all push, round trips of words between GPUs and between GPU and host, and a barrier of the
// GPUs that lines up the clocks. Launched only by moe_p2p/tools/probe.py; every wait has a
// deadline, and a missed one is reported in Params::result.
#include "kernels/device/ptx.cuh"

namespace moe_p2p::probe {

using namespace abi;
using device::globaltimer_ns;
using device::ld_acquire_sys_u64;
using device::st_release_sys_u64;

// moe_p2p/tools/probe.py has the same fields in the same order.
struct Params {
  u64 data[kMaxRanksPerNode];  // memory of each rank, as this device maps it
  u64 host;                    // HostWords, pinned
  u64 result;                  // Result, pinned
  u64 bytes;                   // pushed to each peer, a multiple of kPieceBytes
  u64 first;                   // words are first + 1, first + 2, ... up to first + count
  u64 count;
  u64 timeout_ns;
  i32 rank;
  i32 num_ranks;
};
static_assert(sizeof(Params) == MOE_P2P_PROBE_PARAMS_BYTES, "moe_p2p/tools/probe.py has another");

struct Result {
  u64 elapsed_ns;
  u64 missed;  // 1 + what was waited for: a rank, or kMaxRanksPerNode for the host
};

// A rank's memory: one line per word, then what peers push.
constexpr u64 kBarrierWords = 0;
constexpr u64 kPingWord = kMaxRanksPerNode * kLine;
constexpr u64 kRelayWord = kPingWord + kLine;
constexpr u64 kPushed = 65536;
static_assert(kRelayWord < kPushed, "words lie before the payload");
// Pinned memory: one line per direction, so that neither side evicts the other's line.
constexpr u64 kToDevice = 0, kToHost = kLine;

constexpr u64 kThreads = 512, kStores = 4, kPieceBytes = kThreads * kStores * sizeof(device::Vec);

__device__ u64* word_at(u64 base, u64 offset) { return reinterpret_cast<u64*>(base + offset); }

// Waits until the word reaches `want`; returns false, with a report in the result, if it is late.
__device__ bool wait_word(const Params& p, const u64* word, u64 want, u64 what) {
  const u64 deadline = globaltimer_ns() + p.timeout_ns;
  for (u32 looks = 1; ld_acquire_sys_u64(word) < want; ++looks) {
    if (looks % 256 == 0 && globaltimer_ns() > deadline) {
      st_release_sys_u64(&reinterpret_cast<Result*>(p.result)->missed, what + 1);
      return false;
    }
  }
  return true;
}

}  // namespace moe_p2p::probe

using namespace moe_p2p::probe;

// Thread t flags rank t and waits for it. Returns on all GPUs within a one-way flag of each other.
extern "C" __global__ void moe_p2p_probe_barrier(const __grid_constant__ Params p) {
  const auto peer = static_cast<i32>(threadIdx.x);
  if (peer >= p.num_ranks) return;
  const u64 want = p.first + 1;
  st_release_sys_u64(word_at(p.data[peer], kBarrierWords + kLine * static_cast<u64>(p.rank)), want);
  wait_word(p, word_at(p.data[p.rank], kBarrierWords + kLine * threadIdx.x), want, threadIdx.x);
}

// Pieces go to the peers in turn, and every rank begins with another one: no link is used twice.
extern "C" __global__ void __launch_bounds__(kThreads)
    moe_p2p_probe_push(const __grid_constant__ Params p) {
  const u64 others = static_cast<u64>(p.num_ranks - 1);
  const u64 pieces = p.bytes / kPieceBytes * others;
  const moe_p2p::device::Vec value{{threadIdx.x, blockIdx.x, 0, 0}};
  for (u64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const u64 peer =
        (static_cast<u64>(p.rank) + 1 + piece % others) % static_cast<u64>(p.num_ranks);
    char* out = reinterpret_cast<char*>(p.data[peer] + kPushed) +
                static_cast<u64>(p.rank) * p.bytes + piece / others * kPieceBytes;
    for (u64 i = 0; i < kStores; ++i)
      moe_p2p::device::st_na_v4(out + (i * kThreads + threadIdx.x) * sizeof(value), value);
  }
}

// Ranks 2i and 2i + 1 pass a word to and fro; the even one measures.
extern "C" __global__ void moe_p2p_probe_flags(const __grid_constant__ Params p) {
  const i32 peer = p.rank ^ 1;
  if (peer >= p.num_ranks) return;
  const u64* mine = word_at(p.data[p.rank], kPingWord);
  u64* theirs = word_at(p.data[peer], kPingWord);
  const bool leads = p.rank < peer;
  const u64 begin = globaltimer_ns();
  for (u64 i = p.first + 1; i <= p.first + p.count; ++i) {
    if (leads) st_release_sys_u64(theirs, i);
    if (!wait_word(p, mine, i, static_cast<u64>(peer))) return;
    if (!leads) st_release_sys_u64(theirs, i);
  }
  reinterpret_cast<Result*>(p.result)->elapsed_ns = globaltimer_ns() - begin;
}

// Answers the host's words. With a second block the first one passes them on in device memory, as
// the relay block does with arrivals from other nodes.
extern "C" __global__ void moe_p2p_probe_host(const __grid_constant__ Params p) {
  const bool relayed = gridDim.x > 1;
  const bool relays = relayed && blockIdx.x == 0;
  u64* relay = word_at(p.data[p.rank], kRelayWord);
  const u64* from = relayed && !relays ? relay : word_at(p.host, kToDevice);
  u64* to = relays ? relay : word_at(p.host, kToHost);
  for (u64 i = p.first + 1; i <= p.first + p.count; ++i) {
    if (!wait_word(p, from, i, kMaxRanksPerNode)) return;
    if (relays)
      moe_p2p::device::st_release_gpu_u64(to, i);
    else
      st_release_sys_u64(to, i);
  }
}
