#include "platform/mapped_gpu_memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/log.h"
#include "platform/library.h"

namespace moe_p2p::platform {

using base::Code;

namespace {

constexpr uint64_t kPage = 65536;
constexpr const char* kInstall =
    "install GDRCopy (libgdrapi and the kernel module gdrdrv) to have arrivals stored into GPU "
    "memory by the CPU";

// As gdrapi.h of GDRCopy 2 has them.
struct Handle {
  unsigned long number;
};
struct Info {
  uint64_t address, mapped_bytes;
  uint32_t page_bytes;
  uint64_t cycles;
  uint32_t cycles_per_ms;
  unsigned mapped : 1;
  unsigned write_combined : 1;
  int mapping_type;
  uint64_t spare[8];  // of later versions
};

}  // namespace

struct MappedGpuMemory::Functions {
  explicit Functions(const std::vector<std::string>& files) {
    const Library library(
        files.empty() ? std::vector<std::string>{"libgdrapi.so.2", "libgdrapi.so"} : files,
        {"GDRCopy", kInstall, "libgdrapi", "version 2 of GDRCopy is needed"});
    library.load("gdr_open", open);
    library.load("gdr_close", close);
    library.load("gdr_pin_buffer", pin);
    library.load("gdr_unpin_buffer", unpin);
    library.load("gdr_map", map);
    library.load("gdr_unmap", unmap);
    library.load("gdr_get_info_v2", info);
  }
  static const Functions& of(const std::vector<std::string>& files) {
    if (!files.empty()) return *new Functions(files);  // of a test: libraries are never closed
    static const Functions functions({});
    return functions;
  }

  void* (*open)() = nullptr;
  int (*close)(void*) = nullptr;
  int (*pin)(void*, unsigned long, size_t, uint64_t, uint32_t, Handle*) = nullptr;
  int (*unpin)(void*, Handle) = nullptr;
  int (*map)(void*, Handle, void**, size_t) = nullptr;
  int (*unmap)(void*, Handle, void*, size_t) = nullptr;
  int (*info)(void*, Handle, Info*) = nullptr;
};

MappedGpuMemory::MappedGpuMemory(uint64_t address, uint64_t bytes,
                                 const std::vector<std::string>& files)
    : functions_(Functions::of(files)), bytes_(bytes) {
  MOE_P2P_CHECK(address % kPage == 0 && bytes % kPage == 0 && bytes > 0, Code::kUnavailable,
                "GDRCopy: mapping ", bytes, " bytes of GPU memory at ", address,
                ": must be whole pages of 64 KiB");
  const auto check = [&](int error, const char* what) {
    if (error == 0) return;
    release();
    MOE_P2P_CHECK(
        false, Code::kUnavailable, "GDRCopy: ", what, " ", bytes, " bytes of GPU memory: error ",
        error, "; is the memory made for GPUDirect RDMA, and is there room in the GPU's window?");
  };
  library_ = functions_.open();
  MOE_P2P_CHECK(library_, Code::kUnavailable,
                "GDRCopy: its driver does not answer; modprobe gdrdrv, and let this user open "
                "/dev/gdrdrv");
  Handle handle{};
  check(functions_.pin(library_, address, bytes, 0, 0, &handle), "pinning");
  handle_ = handle.number;
  pinned_ = true;
  check(functions_.map(library_, handle, &mapped_, bytes), "mapping");
  Info info{};
  check(functions_.info(library_, handle, &info), "looking up");
  data_ = static_cast<char*>(mapped_) + (address - info.address);
}

MappedGpuMemory::~MappedGpuMemory() { release(); }

void MappedGpuMemory::release() noexcept {
  if (mapped_) functions_.unmap(library_, {handle_}, mapped_, bytes_);
  if (pinned_) functions_.unpin(library_, {handle_});
  if (library_) functions_.close(library_);
  mapped_ = nullptr;
  pinned_ = false;
  library_ = nullptr;
}

void MappedGpuMemory::fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  asm volatile("dmb oshst" ::: "memory");
#else
#error "a fence behind write-combined stores"
#endif
}

}  // namespace moe_p2p::platform
