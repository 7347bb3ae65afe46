#include "provider/libfabric/api.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include "base/log.h"
#include "platform/library.h"

namespace moe_p2p::provider::libfabric {

using base::Code;

namespace {

#if defined(MOE_P2P_TESTING)
const Library* stand_in = nullptr;
#endif

// The process's library. Providers register themselves with their library: a second library would
// not see the first one's devices.
struct {
  std::mutex mutex;
  std::string file;
  Library owned;
  std::atomic<const Library*> library{nullptr};
} loading;

Library load_library(const std::string& file, bool for_efa) {
  // AWS's installer's folders, and the machine's own library.
  std::vector<std::string> files = {"/opt/amazon/efa/lib/libfabric.so.1",
                                    "/opt/amazon/efa/lib64/libfabric.so.1", "libfabric.so.1"};
  if (!for_efa) std::ranges::rotate(files, files.end() - 1);
  const platform::Library opened(
      file.empty() ? files : std::vector{file},
      {.what = "libfabric",
       .install = "install it (Debian, Ubuntu: apt-get install libfabric1; on EC2 the EFA "
                  "installer) or name the file with library=",
       .name = "libfabric.so.1",
       .needed = "it must be release 1.10 or newer"});
  Library library{};
  opened.load("fi_getinfo", library.getinfo);
  opened.load("fi_freeinfo", library.freeinfo);
  opened.load("fi_dupinfo", library.dupinfo);
  opened.load("fi_fabric", library.fabric);
  opened.load("fi_strerror", library.strerror);
  opened.load("fi_version", library.version);
  return library;
}

}  // namespace

void open_library(const std::string& file, bool for_efa) {
#if defined(MOE_P2P_TESTING)
  if (stand_in) return;
#endif
  const std::lock_guard lock(loading.mutex);
  if (!loading.library) {
    loading.owned = load_library(file, for_efa);
    loading.file = file;
    loading.library.store(&loading.owned, std::memory_order_release);  // pairs with library()
  }
  MOE_P2P_CHECK(file.empty() || file == loading.file, Code::kInvalidArgument,
                "libfabric: library=", file, ", but this process already uses ",
                loading.file.empty() ? "the machine's own" : loading.file);
}

const Library& library() {
#if defined(MOE_P2P_TESTING)
  if (stand_in) return *stand_in;
#endif
  const Library* open = loading.library.load(std::memory_order_acquire);  // open_library()
  if (open) return *open;
  open_library("", /*for_efa=*/false);
  return *loading.library.load(std::memory_order_acquire);
}

std::string error_text(int64_t error) {
  const int number = static_cast<int>(error < 0 ? -error : error);
  return base::concat(library().strerror(number), " (", number, ")");
}

#if defined(MOE_P2P_TESTING)
void set_library_for_tests(const Library* library) noexcept { stand_in = library; }
#endif

}  // namespace moe_p2p::provider::libfabric
