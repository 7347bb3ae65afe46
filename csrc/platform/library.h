// A shared library opened while the package runs, because it builds and loads on machines without
// it: the CUDA driver, libibverbs, libfabric. The opening code makes a table of its functions.
// Set-up only. Never closed: the drivers inside keep threads, fork and exit handlers.
#pragma once

#include <string>
#include <vector>

namespace moe_p2p::platform {

// Parts of the error texts, each in an Error{kUnavailable}:
//   "<what> cannot be opened: <the loader's reason>; <install>"
//   "<name> has no <symbol>; <needed>"
struct LibraryTexts {
  const char* what;
  const char* install;
  const char* name;
  const char* needed;
};

class Library {
 public:
  // Opens the first of `files` that can be opened; when none can, the error has the first one's
  // reason. Symbols of `version` are preferred: without it, a library with several interfaces under
  // one name may return an older one.
  Library(const std::vector<std::string>& files, const LibraryTexts& texts,
          const char* version = nullptr);

  template <typename Function>
  void load(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(require(symbol));
  }
  // Null where the library does not have it.
  template <typename Function>
  void load_if_there(const char* symbol, Function& function) const {
    function = reinterpret_cast<Function>(find(symbol));
  }

 private:
  void* find(const char* symbol) const noexcept;
  void* require(const char* symbol) const;

  void* handle_ = nullptr;
  LibraryTexts texts_;
  const char* version_;
};

}  // namespace moe_p2p::platform
