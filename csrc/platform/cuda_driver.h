// The CUDA driver's functions that csrc calls, opened with dlopen: the package builds and runs
// without CUDA. Only what the data path needs; memory and kernels are made by
// moe_p2p/moe/gpu/memory.py and moe_p2p/machine/jit.py. Another function needs a line here and one
// in cuda_driver.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moe_p2p::platform {

// Names memory of one process for another, by value (CUipcMemHandle).
struct IpcHandle {
  char bytes[64];
};

// Named without the driver's prefix and version; each returns a CUresult.
struct DriverTable {
  int (*error_string)(int error, const char** text);
  int (*init)(unsigned flags);
  int (*device_get)(int* device, int ordinal);
  int (*device_attribute)(int* value, int attribute, int device);
  int (*context_retain)(void** context, int device);  // the primary one
  int (*context_release)(int device);
  int (*context_set)(void* context);
  int (*context_push)(void* context);
  int (*context_pop)(void** context);
  int (*capture_mode)(int* mode);  // exchanges the calling thread's mode
  int (*priority_range)(int* least, int* greatest);
  int (*stream_create)(void** stream, unsigned flags, int priority);
  int (*stream_destroy)(void* stream);
  int (*stream_wait_event)(void* stream, void* event, unsigned flags);
  // graph, dependencies and their number may be null.
  int (*capture_info)(void* stream, int* status, uint64_t* id, void** graph, void** dependencies,
                      size_t* num_dependencies);
  int (*event_create)(void** event, unsigned flags);
  int (*event_record)(void* event, void* stream);
  int (*event_query)(void* event);
  int (*event_destroy)(void* event);
  int (*copy_async)(uint64_t to, uint64_t from, size_t bytes, void* stream);  // within GPU memory
  int (*copy_any_async)(uint64_t to, uint64_t from, size_t bytes,
                        void* stream);                             // also host memory
  int (*host_alloc)(void** memory, size_t bytes, unsigned flags);  // pinned, seen by devices
  int (*host_free)(void* memory);
  int (*launch)(const void* config, void* kernel, void** params, void** extra);
  int (*flush_writes)(int target, int scope) = nullptr;  // null before CUDA 11.3
  // Null in drivers without it. `kind` is kDmabufHandle; address and bytes are multiples of a page
  // of the host.
  int (*export_dmabuf)(int* fd, uint64_t address, size_t bytes, int kind,
                       unsigned long long flags) = nullptr;
  int (*stream_green)(void* stream, void** green) = nullptr;  // its green context; null before 12.4
  int (*pointer_attribute)(void* value, int attribute, uint64_t address) = nullptr;
  // For memory of peers on this host (peer_memory.h); drivers of CUDA 11.8 and later have all.
  int (*address_range)(uint64_t* base, size_t* bytes, uint64_t address) = nullptr;
  int (*ipc_get)(IpcHandle* handle, uint64_t base) = nullptr;
  int (*ipc_open)(uint64_t* base, IpcHandle handle, unsigned flags) = nullptr;
  int (*ipc_close)(uint64_t base) = nullptr;
  int (*enable_peer)(void* context, unsigned flags) = nullptr;
  int (*host_register)(void* memory, size_t bytes, unsigned flags) = nullptr;
  int (*host_unregister)(void* memory) = nullptr;
  int (*host_pointer)(uint64_t* address, void* memory, unsigned flags) = nullptr;  // on devices
  int (*stream_write)(void* stream, uint64_t address, uint64_t value, unsigned flags) = nullptr;
};

inline constexpr int kDmabufHandle = 1;
// As in cuda.h of CUDA 11.8 and later.
inline constexpr unsigned kNonBlockingStream = 1;
inline constexpr unsigned kEventWithoutTiming = 2;
// Of pinned memory: for all contexts, and with an address on devices.
inline constexpr unsigned kPortableAndMapped = 3;

inline constexpr int kIsCapturing = 1;  // CUstreamCaptureStatus

inline constexpr int kIsManaged = 8;  // attribute of pointer_attribute(), an unsigned

inline constexpr int kDriverNotReady = 600;  // event_query(): not yet

// Loaded by the first call. Throws Error{kUnavailable} when there is no driver or it is too old.
const DriverTable& driver();
// "out of memory (2)"
std::string driver_error(int error);

#if defined(MOE_P2P_TESTING)
// Replaces the driver from now on; null restores the real one.
void set_driver_for_tests(const DriverTable* table) noexcept;
#endif

}  // namespace moe_p2p::platform
