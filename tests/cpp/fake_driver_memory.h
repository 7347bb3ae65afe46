// The part of FakeDriver that names memory for other processes, and maps what it has named.
#pragma once

#include <cstddef>
#include <cstdint>

#include "platform/cuda_driver.h"

namespace moe_p2p::test {

// A CUresult: what is wrong with this thread for a call that cuda.h calls potentially unsafe; with
// a capture in another thread it would fail, and break that.
int refusal();
bool has_context();       // this thread
void* current_context();  // null: none

int address_range(uint64_t* base, size_t* bytes, uint64_t address);
int ipc_get(platform::IpcHandle* handle, uint64_t base);
int ipc_open(uint64_t* address, platform::IpcHandle handle, unsigned flags);
int ipc_close(uint64_t base);
int enable_peer(void* context, unsigned flags);
int host_register(void* memory, size_t bytes, unsigned flags);
int host_unregister(void* memory);

}  // namespace moe_p2p::test
