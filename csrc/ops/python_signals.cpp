// Signals while an op waits: runs Python's handlers, as Python's own blocking calls do (PEP 475),
// and ends the wait when one raises. The exception is kept; moe_p2p/library.py raises it in place
// of the error that the wait ends with. Python's functions are looked up in the process: nothing
// links to them.
#include <dlfcn.h>

#include <utility>

#include "ops/tensor_checks.h"
#include "platform/interrupt.h"

namespace moe_p2p::ops {

namespace {

// All of Python's stable ABI. PyErr_Fetch is deprecated, and its successor is not in Python 3.10.
struct Python {
  int (*is_initialized)() = nullptr;
  int (*ensure_gil)() = nullptr;
  void (*release_gil)(int) = nullptr;
  int (*check_signals)() = nullptr;
  void (*fetch)(void**, void**, void**) = nullptr;
  void (*normalize)(void**, void**, void**) = nullptr;
  void (*drop)(void*) = nullptr;
  bool complete = false;

  Python() {
    complete = find("Py_IsInitialized", is_initialized) && find("PyGILState_Ensure", ensure_gil) &&
               find("PyGILState_Release", release_gil) &&
               find("PyErr_CheckSignals", check_signals) && find("PyErr_Fetch", fetch) &&
               find("PyErr_NormalizeException", normalize) && find("Py_DecRef", drop);
  }

 private:
  template <typename Function>
  static bool find(const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
    return function != nullptr;
  }
};

const Python& python() {
  static const Python functions;
  return functions;
}

void* kept = nullptr;  // the exception, a reference of ours; main thread only

bool check_signals() noexcept {
  const Python& py = python();
  if (!py.complete || py.is_initialized() == 0) return false;
  const int gil = py.ensure_gil();
  const bool raised = py.check_signals() != 0;
  if (raised) {
    void *type = nullptr, *value = nullptr, *traceback = nullptr;
    py.fetch(&type, &value, &traceback);
    py.normalize(&type, &value, &traceback);
    py.drop(type);
    if (traceback != nullptr) py.drop(traceback);
    if (kept != nullptr) py.drop(kept);
    kept = value;
  }
  py.release_gil(gil);
  return raised;
}

[[maybe_unused]] const bool kAsked = [] {
  platform::set_interrupt_check(&check_signals);
  return true;
}();

// Returns the address of the exception object with its reference; 0: none was raised, or the caller
// is not the main thread.
int64_t take_interrupt() {
  if (!platform::on_main_thread()) return 0;
  return reinterpret_cast<int64_t>(std::exchange(kept, nullptr));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("take_interrupt", TORCH_BOX(&take_interrupt));
}

}  // namespace moe_p2p::ops
