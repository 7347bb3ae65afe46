// A GPU's threads on one of the host's, for the kernels of kernels/: each is a fiber that runs
// until it waits, for its warp, its block, a barrier, a copy or a peer. Launches run to their end
// inside cuLaunchKernelEx, those of a graph inside its replay, where one may begin before those
// ahead have ended; a stream is a thread that asks for them. Ranks are threads of one process and
// see each other's memory.
//
// What is as on a GPU, or worse: the order of threads is random, warps sleep while others go on,
// copies in bulk happen late, shared memory starts full of garbage, and only so many blocks are
// there at once. Memory is that of the host, but who reads what no chain of releases, acquires,
// barriers and fences orders ends with a story (order.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe_p2p::emulation {

struct Index {
  unsigned x;
};
// What a kernel knows of the thread that runs it.
struct Thread {
  Index thread, block, block_dim, grid_dim;
  char* shared;
};
struct Votes {
  unsigned count;  // of true ones
  bool all;
};

using Kernel = void (*)(const void* params);
struct Config {
  unsigned num_blocks, num_threads, shared_bytes;
  bool early;  // it may begin before earlier kernels of its stream have ended
};
struct Work {
  Config config;
  Kernel kernel;
  const void* params;
};
// Launches of one stream. Returns when all have ended.
void run(const std::vector<Work>& stream);

// What kernels call.
extern "C" {
// Whether this process has that mutation (MOE_P2P_MUTATION), or one of this line:
// "device/wait.cuh:130".
bool moe_p2p_mutated(const char* name);
bool moe_p2p_leaves_out();  // whether it is one of a line
bool moe_p2p_left_out(const char* file, unsigned line);
const Thread& moe_p2p_thread();
// Nothing new was seen: others go on first.
void moe_p2p_pause();
// The values of all lanes of the mask, by lane, once all have come. Good until the lane's next
// call. orders: what was written before it is seen behind it.
const uint64_t* moe_p2p_warp(uint32_t mask, uint64_t value, bool orders);
// Barrier `id` of the block, once so many threads have come; 0: all that have not ended.
Votes moe_p2p_meet(int id, unsigned num_threads, bool vote);
// Barriers in shared memory: num_arrivals in each phase, and the bytes that they say are to come.
void moe_p2p_barrier_init(uint64_t* barrier, unsigned num_arrivals);
void moe_p2p_barrier_expect(uint64_t* barrier, unsigned bytes);
// Whether the phase of that parity is over.
bool moe_p2p_barrier_test(uint64_t* barrier, bool parity);
// A copy that happens some time, and then takes its bytes off a barrier of shared memory.
void moe_p2p_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
// One that belongs to the thread's open group; commit closes the group.
void moe_p2p_store(void* to, const void* from, uint32_t bytes);
void moe_p2p_commit();
// Until of this thread's closed groups only the last `num_left` are not read, or written.
void moe_p2p_wait_stores(unsigned num_left, bool written);
// A word of shared memory says that this thread is here; and it was read, and said so.
void moe_p2p_arrive(const void* word);
void moe_p2p_depart(const void* word);
// Before a word of global memory says so, to this rank's blocks or to everybody; and behind reading
// one.
void moe_p2p_release(const void* word, bool to_system);
void moe_p2p_release_too(
    const void* word);  // to this rank's, by a word that is read and written at once
void moe_p2p_acquire(const void* word);
// The same without an order, which a fence behind reading or before writing gives.
void moe_p2p_saw(const void* word);
void moe_p2p_marked(const void* word);
void moe_p2p_fence();
void moe_p2p_let_next_begin();
void moe_p2p_wait_for_kernels();
void moe_p2p_fence_global();
void moe_p2p_fence_shared();
void moe_p2p_tell_host(const void* word);
void moe_p2p_host_memory(const void* at, size_t bytes);
void moe_p2p_no_host_memory(const void* at);
// Words of shared memory. One that nothing orders behind the last store may be read as it was
// before.
void moe_p2p_st_block(uint32_t* word, uint32_t value);
uint32_t moe_p2p_ld_block(const uint32_t* word);
}

}  // namespace moe_p2p::emulation
