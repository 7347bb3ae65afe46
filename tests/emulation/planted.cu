// Faults of a kernel, each of which the machine has to report: one a process, by its name
// (tests/gpu/test_emulation.py).
#include "tests/emulation/ahead.h"
#include "tests/emulation/order.h"

using namespace moe_p2p::device;

namespace {

constexpr unsigned kSharedBytes = 1024;
alignas(64) char memory[512];  // of the GPU
u32 word;
u64 flag, bell;

template <typename T>
T* at(size_t bytes) {
  return reinterpret_cast<T*>(memory + bytes);
}
template <typename T>
void keep(const T& value) {  // as if something used it
  asm volatile("" ::"m"(value));
}
bool is(unsigned thread) { return threadIdx.x == thread; }

struct Fault {
  const char* name;
  const char* report;  // a part of it
  void (*kernel)(const void*);
};

#define FAULT(name, report, ...) {name, report, [](const void*) { __VA_ARGS__; }}

const Fault kFaults[] = {
    // --- addresses that a GPU does not take ---
    FAULT("load of 2 bytes", "misaligned address", keep(*at<u16>(1))),
    FAULT("load of 4 bytes", "misaligned address", keep(u32{*at<u32>(2)})),
    FAULT("load of 8 bytes", "misaligned address", keep(u64{*at<u64>(4)})),
    FAULT("load of 16 bytes", "misaligned address", keep(Vec{*at<Vec>(8)})),
    FAULT("store of 2 bytes", "misaligned address", *at<u16>(1) = 1),
    FAULT("store of 4 bytes", "misaligned address", *at<u32>(2) = 1),
    FAULT("store of 8 bytes", "misaligned address", *at<u64>(4) = 1),
    FAULT("store of 16 bytes", "misaligned address", *at<Vec>(8) = {}),
    FAULT("ld_nc_v4", "misaligned address", keep(ld_nc_v4(memory + 8))),
    FAULT("ld_na_v4", "misaligned address", keep(ld_na_v4(memory + 8))),
    FAULT("st_na_v4", "misaligned address", st_na_v4(memory + 8, {})),
    FAULT("ld_na_v2", "misaligned address", keep(ld_na_v2(memory + 4))),
    FAULT("st_na_v2", "misaligned address", st_na_v2(memory + 4, {})),
    FAULT("ld_na_u32", "misaligned address", keep(ld_na_u32(memory + 2))),
    FAULT("st_na_u32", "misaligned address", st_na_u32(memory + 2, 1)),
    FAULT("ld_relaxed_sys_v2", "are not aligned", keep(ld_relaxed_sys_v2(memory + 4))),
    FAULT("st_relaxed_sys_v2", "are not aligned", st_relaxed_sys_v2(memory + 4, {})),
    FAULT("ld_relaxed_sys_v4", "are not aligned", keep(ld_relaxed_sys_v4(memory + 8))),
    FAULT("ld_acquire_sys_v4", "are not aligned", keep(ld_acquire_sys_v4(memory + 8))),
    FAULT("st_relaxed_sys_v4", "are not aligned", st_relaxed_sys_v4(memory + 8, {})),
    FAULT("ld_relaxed_sys_u32", "are not aligned", keep(ld_relaxed_sys_u32(at<u32>(2)))),
    FAULT("ld_acquire_sys_u64", "are not aligned", keep(ld_acquire_sys_u64(at<u64>(4)))),
    FAULT("st_release_sys_u64", "are not aligned", st_release_sys_u64(at<u64>(4), 1)),
    FAULT("red_add_relaxed_gpu_u64", "are not aligned", red_add_relaxed_gpu_u64(at<u64>(4), 1)),
    FAULT("red_add_release_gpu_u32", "are not aligned", red_add_release_gpu_u32(at<u32>(2), 1)),
    FAULT("atom_inc_acq_rel_gpu_u32", "are not aligned", keep(atom_inc_acq_rel_gpu_u32(at<u32>(2), 1))),
    FAULT("atomicAdd", "are not aligned", atomicAdd(at<u32>(2), 1)),
    FAULT("atomicMax", "are not aligned", atomicMax(at<u64>(4), 1)),
    FAULT("atomicOr", "are not aligned", atomicOr(at<u32>(2), 1)),
    FAULT("atomicExch", "are not aligned", atomicExch(at<u32>(2), 1)),
    FAULT("bulk_load to", "are not aligned", bulk_load(shared_memory() + 8, memory, 16, at<u64>(64))),
    FAULT("bulk_load from", "are not aligned", bulk_load(shared_memory(), memory + 8, 16, at<u64>(64))),
    FAULT("bulk_store bytes", "are not aligned", bulk_store(memory, shared_memory(), 8)),

    // --- accesses that nothing orders ---
    FAULT("read of another thread's write", "nothing orders the two",
          if (is(0)) word = 1; if (is(1)) keep(u32{word})),
    FAULT("read of another warp's write", "nothing orders the two",
          if (is(0)) word = 1; __syncwarp(); if (is(32)) keep(u32{word})),
    FAULT("bytes of a word", "nothing orders the two",
          if (is(0)) memory[1] = 1; if (is(1)) keep(char{memory[1]})),
    FAULT("read behind a word that is not released", ", the same, wrote: nothing orders the two",
          if (is(0)) { word = 1; st_relaxed_sys_u64(&flag, 1); }
          if (is(1)) { while (ld_acquire_sys_u64(&flag) == 0) {} keep(u32{word}); }),
    FAULT("read behind a word that is not acquired", ", the same, wrote: nothing orders the two",
          if (is(0)) { word = 1; st_release_sys_u64(&flag, 1); }
          if (is(1)) { while (ld_relaxed_sys_u64(&flag) == 0) {} keep(u32{word}); }),
    FAULT("write over what another thread reads", ", the same, read: nothing orders the two",
          if (is(0)) { keep(u32{word}); st_relaxed_sys_u64(&flag, 1); }
          if (is(1)) { while (ld_acquire_sys_u64(&flag) == 0) {} word = 1; }),
    FAULT("copy of what no fence orders", "copies 16 bytes",
          if (is(0)) { st_na_v4(memory, {});
                       bulk_load(shared_memory(), memory, 16, at<u64>(64)); }),
    FAULT("copy of shared memory that no fence orders", "copies 16 bytes",
          if (is(0)) { st_na_v4(shared_memory(), {}); bulk_store(memory, shared_memory(), 16); }),
    FAULT("read of a copy that is under way", "by a copy that nobody has waited for",
          if (is(0)) { bulk_store(memory, shared_memory(), 16); bulk_commit();
                       keep(ld_na_v4(memory)); }),
    FAULT("write over a copy's source", "by a copy that may not have read it yet",
          if (is(0)) { bulk_store(memory, shared_memory(), 16); bulk_commit();
                       st_na_v4(shared_memory(), {}); }),
    FAULT("copy for the host of what is not released", "a copy that the host has asked for",
          if (is(0)) { word = 1; moe_p2p::emulation::order::copy_for_host(memory, &word, 4); }),
    FAULT("read of a copy for the host", "nothing orders the two",
          if (is(0)) { moe_p2p::emulation::order::copy_for_host(memory, memory + 64, 4);
                       keep(u32{*at<u32>(0)}); }),
    FAULT("bell before what it announces", "nothing orders what it knows before the bell",
          if (is(0)) { word = 1; st_relaxed_sys_u64(&bell, 1); }),

    // --- threads and copies ---
    FAULT("barrier that a thread does not come to", "all threads wait for each other",
          if (!is(0)) bar_sync(1, 64)),
    FAULT("barrier with a thread too many", "more threads at a barrier",
          if (is(0)) { st_relaxed_sys_u64(&flag, 1); bar_sync(1, 64); }
          if (is(1)) { while (ld_relaxed_sys_u64(&flag) == 0) {} bar_sync(1, 1); }),
    FAULT("lane that is not of the mask", "a lane that is not of the mask", __syncwarp(1)),
    FAULT("lane that does not come", "all threads wait for each other", if (!is(0)) __syncwarp()),
    FAULT("copies of no group", "copies that belong to no group",
          if (is(0)) bulk_store(memory, shared_memory(), 16)),
    FAULT("copy into what another still reads", "that another may still be reading",
          if (is(0)) { bulk_store(memory, shared_memory(), 16); bulk_commit();
                       bulk_load(shared_memory(), memory + 64, 16, at<u64>(128)); }),
    FAULT("block that ends before its copies", "a block ended while copies used",
          if (is(0)) { for (int i = 0; i < 16; ++i)
                         bulk_store(memory + 16 * i, shared_memory() + 16 * i, 16);
                       bulk_commit(); }),
    FAULT("write behind shared memory", "wrote behind its shared memory",
          if (is(0)) shared_memory()[kSharedBytes] = 1),
};

}  // namespace

extern "C" {
size_t moe_p2p_num_planted() { return std::size(kFaults); }
const char* moe_p2p_planted(size_t number) { return kFaults[number].name; }
const char* moe_p2p_report(size_t number) { return kFaults[number].report; }
void moe_p2p_run_planted(size_t number) {
  moe_p2p::emulation::moe_p2p_host_memory(&bell, sizeof bell);
  moe_p2p::emulation::run({{{1, 64, kSharedBytes, false}, kFaults[number].kernel, nullptr}});
}
}
