#include "platform/library.h"

#include <dlfcn.h>

#include "base/log.h"
#include "platform/signal_handlers.h"

namespace moe_p2p::platform {

using base::Code;

Library::Library(const std::vector<std::string>& files, const LibraryTexts& texts,
                 const char* version)
    : texts_(texts), version_(version) {
  const KeptSignalHandlers kept;
  std::string reason;
  for (const std::string& file : files) {
    handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_) return;
    if (reason.empty()) reason = dlerror();
  }
  throw base::Error(Code::kUnavailable,
                    base::concat(texts_.what, " cannot be opened: ", reason, "; ", texts_.install));
}

void* Library::find(const char* symbol) const noexcept {
  void* found = version_ ? dlvsym(handle_, symbol, version_) : nullptr;
  return found ? found : dlsym(handle_, symbol);
}

void* Library::require(const char* symbol) const {
  void* found = find(symbol);
  MOE_P2P_CHECK(found, Code::kUnavailable, texts_.name, " has no ", symbol, "; ", texts_.needed);
  return found;
}

}  // namespace moe_p2p::platform
