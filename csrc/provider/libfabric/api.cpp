#include "provider/libfabric/api.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/log.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

#if defined(MOE_P2P_TESTING)
const Library* stand_in = nullptr;
#endif

// The machine's own library first; then the folder in which AWS's installer puts its own.
constexpr const char* kNames[] = {"libfabric.so.1", "/opt/amazon/efa/lib/libfabric.so.1",
                                  "/opt/amazon/efa/lib64/libfabric.so.1"};

void* open_library() {
  const char* asked = std::getenv("MOE_P2P_LIBFABRIC");
  std::string reason;
  const auto open = [&](const char* name) {
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle && reason.empty()) reason = dlerror();
    return handle;
  };
  if (asked && *asked) {
    if (void* handle = open(asked)) return handle;
  } else {
    for (const char* name : kNames)
      if (void* handle = open(name)) return handle;
  }
  throw base::Error(Code::kUnavailable,
                    base::concat("libfabric cannot be opened: ", reason,
                                 "; install it (Debian, Ubuntu: apt-get install libfabric1; on EC2 "
                                 "the EFA installer) or name the file in MOE_P2P_LIBFABRIC"));
}

template <typename Function>
void load(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  MOE_P2P_CHECK(function, Code::kUnavailable, "libfabric.so.1 has no ", name,
                "; it must be release 1.10 or newer");
}

Library load_library() {
  void* handle = open_library();  // stays open: providers have threads and exit handlers
  Library library{};
  load(handle, "fi_getinfo", library.getinfo);
  load(handle, "fi_freeinfo", library.freeinfo);
  load(handle, "fi_dupinfo", library.dupinfo);
  load(handle, "fi_fabric", library.fabric);
  load(handle, "fi_strerror", library.strerror);
  load(handle, "fi_version", library.version);
  return library;
}

}  // namespace

const Library& library() {
#if defined(MOE_P2P_TESTING)
  if (stand_in) return *stand_in;
#endif
  static const Library loaded = load_library();
  return loaded;
}

std::string error_text(int64_t error) {
  const int number = static_cast<int>(error < 0 ? -error : error);
  return base::concat(library().strerror(number), " (", number, ")");
}

#if defined(MOE_P2P_TESTING)
void set_library_for_tests(const Library* library) noexcept { stand_in = library; }
#endif

}  // namespace moe_p2p::provider::libfabric
