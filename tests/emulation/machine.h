// Runs a GPU's threads on one host thread, for the kernels of kernels/: each is a fiber that runs
// until it waits, for its warp, its block, a barrier, a copy or a peer. Launches run to their end
// inside cuLaunchKernelEx, launches of a graph inside its replay, where one may begin before
// earlier ones have ended; a stream is a thread that calls these. Ranks are threads of one process
// and see each other's memory.
//
// As on a GPU, or worse: the order of threads is random, warps sleep while others go on, copies in
// bulk happen late, shared memory starts full of garbage, and only so many blocks run at once.
// Memory is the host's, but a read that no chain of releases, acquires, barriers and fences orders
// ends with an error text (order.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
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
// Whether this process has that mutation (MOE_P2P_MUTATION), which may also be the name of a line
// that orders memory: "device/wait.cuh:130".
bool moe_p2p_mutated(const char* name);
// Called by each line that orders memory. Returns false if the mutation names that line. Kernels
// must not read a Site, where earlier there was memory that something else wrote to.
bool moe_p2p_orders(const std::source_location& site);
// Writes names of lines to a file that have run since the process began.
void moe_p2p_write_ordered(const char* to);
// Called where a GPU faults.
[[noreturn]] void moe_p2p_misaligned(const void* at, size_t bytes);
const Thread& moe_p2p_thread();
// Called when nothing new was seen: others go on first.
void moe_p2p_pause();
// Returns the values of all lanes of the mask, by lane, once all have arrived. Valid until the
// lane's next call. orders: writes before it are seen behind it.
const uint64_t* moe_p2p_warp(uint32_t mask, uint64_t value, bool orders);
// Barrier `id` of the block, once num_threads have arrived; 0: all that have not ended.
Votes moe_p2p_meet(int id, unsigned num_threads, bool vote);
// Barriers in shared memory: num_arrivals in each phase, and the bytes that the arrivals expect.
void moe_p2p_barrier_init(uint64_t* barrier, unsigned num_arrivals);
void moe_p2p_barrier_expect(uint64_t* barrier, unsigned bytes);
// Whether the phase of that parity is over.
bool moe_p2p_barrier_test(uint64_t* barrier, bool parity);
// A copy that happens at some time, and then subtracts its bytes from a barrier in shared memory.
void moe_p2p_load(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
// A copy that belongs to the thread's open group; commit closes the group.
void moe_p2p_store(void* to, const void* from, uint32_t bytes);
void moe_p2p_commit();
// Waits until all but the last `num_left` of this thread's closed groups are read, or written.
void moe_p2p_wait_stores(unsigned num_left, bool written);
// A word of shared memory announces this thread; and a thread has read that word.
void moe_p2p_arrive(const void* word);
void moe_p2p_depart(const void* word);
// Called before a word of global memory is stored, for this rank's blocks or all ranks; and after
// one is read.
void moe_p2p_release(const void* word, bool to_system);
void moe_p2p_release_too(
    const void* word);  // to this rank's blocks, by a word that is read and written at once
void moe_p2p_acquire(const void* word);
// The same without an order, which a fence after reading or before writing gives.
void moe_p2p_saw(const void* word);
void moe_p2p_marked(const void* word);
void moe_p2p_fence();
void moe_p2p_let_next_begin();
void moe_p2p_wait_for_kernels();
void moe_p2p_fence_global();
void moe_p2p_fence_shared();
void moe_p2p_signal_host(const void* word);
void moe_p2p_host_memory(const void* at, size_t bytes);
void moe_p2p_no_host_memory(const void* at);
void moe_p2p_shared_memory(const void* at, size_t bytes);
void moe_p2p_no_shared_memory(const void* at, size_t bytes);
// Words of shared memory. A load that nothing orders behind the last store may return the value
// before it.
void moe_p2p_st_block(uint32_t* word, uint32_t value);
uint32_t moe_p2p_ld_block(const uint32_t* word);
}

}  // namespace moe_p2p::emulation
