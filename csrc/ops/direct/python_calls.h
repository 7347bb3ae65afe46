// The functions of Python's stable ABI that direct calls use, looked up in the process: the
// extension links no Python. complete: all were found; without, there are no direct calls.
#pragma once

#include <dlfcn.h>

#include <cstddef>

namespace moe_p2p::ops::direct {

using Object = void;  // a PyObject

using Function = Object* (*)(Object* self, Object* const* given, ptrdiff_t num);
struct MethodDef {  // PyMethodDef
  const char* name;
  Function function;
  int flags;
  const char* doc;
};
constexpr int kFastCall = 0x80;  // METH_FASTCALL

struct PythonCalls {
  Object* (*new_function)(MethodDef*, Object* self, Object* module) = nullptr;
  Object* (*new_object)(Object* type, ptrdiff_t) = nullptr;
  Object* (*new_tuple)(ptrdiff_t) = nullptr;
  int (*set_in_tuple)(Object*, ptrdiff_t, Object*) = nullptr;  // takes the reference over
  Object* (*in_tuple)(Object*, ptrdiff_t) = nullptr;           // borrowed
  ptrdiff_t (*tuple_size)(Object*) = nullptr;
  Object* (*new_list)(ptrdiff_t) = nullptr;
  int (*set_in_list)(Object*, ptrdiff_t, Object*) = nullptr;  // likewise
  ptrdiff_t (*list_size)(Object*) = nullptr;
  Object* (*in_list)(Object*, ptrdiff_t) = nullptr;  // borrowed
  long long (*to_number)(Object*, int* overflow) = nullptr;
  Object* (*from_number)(long long) = nullptr;
  void (*keep)(Object*) = nullptr;
  void* (*release_gil)() = nullptr;
  void (*take_gil)(void*) = nullptr;
  int (*ensure_gil)() = nullptr;
  void (*leave_gil)(int) = nullptr;
  void (*set_error)(Object* type, const char* text) = nullptr;
  Object* (*set_no_memory)() = nullptr;
  Object *none = nullptr, *no = nullptr;  // None, False
  Object *int_type = nullptr, *list_type = nullptr;
  Object** runtime_error = nullptr;
  bool complete = false;

  PythonCalls() {
    complete = find("PyCFunction_NewEx", new_function) && find("PyType_GenericAlloc", new_object) &&
               find("PyTuple_New", new_tuple) && find("PyTuple_SetItem", set_in_tuple) &&
               find("PyTuple_GetItem", in_tuple) && find("PyTuple_Size", tuple_size) &&
               find("PyList_New", new_list) && find("PyList_SetItem", set_in_list) &&
               find("PyList_Size", list_size) && find("PyList_GetItem", in_list) &&
               find("PyLong_AsLongLongAndOverflow", to_number) &&
               find("PyLong_FromLongLong", from_number) && find("Py_IncRef", keep) &&
               find("PyEval_SaveThread", release_gil) && find("PyEval_RestoreThread", take_gil) &&
               find("PyGILState_Ensure", ensure_gil) && find("PyGILState_Release", leave_gil) &&
               find("PyErr_SetString", set_error) && find("PyErr_NoMemory", set_no_memory) &&
               find("_Py_NoneStruct", none) && find("_Py_FalseStruct", no) &&
               find("PyLong_Type", int_type) && find("PyList_Type", list_type) &&
               find("PyExc_RuntimeError", runtime_error);
  }

 private:
  template <typename Found>
  static bool find(const char* name, Found& found) {
    found = reinterpret_cast<Found>(dlsym(RTLD_DEFAULT, name));
    return found != nullptr;
  }
};

inline const PythonCalls kPy;

}  // namespace moe_p2p::ops::direct
