// dispatch_eager, dispatch_counted and combine_plain as functions of Python that skip torch's
// dispatcher, which takes longer than the calls themselves. moe_p2p/moe/direct.py makes them and
// has verified every fact about this torch that is used here. Where anything is not as they expect
// (an argument of another type, a subclass of Tensor, autograd, a mode, a transform, a profiler),
// they call the op, and that decides. Python's functions are looked up in the process, all of its
// stable ABI.
#include <dlfcn.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/log.h"
#include "ops/whole_dispatch.h"

namespace moe_p2p::ops {

namespace {

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
  Object* (*call)(Object*, Object* args, Object* kwargs) = nullptr;
  Object* (*new_tuple)(ptrdiff_t) = nullptr;
  int (*set_in_tuple)(Object*, ptrdiff_t, Object*) = nullptr;  // takes the reference over
  Object* (*new_list)(ptrdiff_t) = nullptr;
  int (*set_in_list)(Object*, ptrdiff_t, Object*) = nullptr;  // likewise
  ptrdiff_t (*list_size)(Object*) = nullptr;
  Object* (*in_list)(Object*, ptrdiff_t) = nullptr;  // borrowed
  long long (*to_number)(Object*, int* overflow) = nullptr;
  Object* (*from_number)(long long) = nullptr;
  void (*keep)(Object*) = nullptr;
  void (*drop)(Object*) = nullptr;
  void* (*release_gil)() = nullptr;
  void (*take_gil)(void*) = nullptr;
  int (*ensure_gil)() = nullptr;
  void (*leave_gil)(int) = nullptr;
  void (*set_error)(Object* type, const char* text) = nullptr;
  Object* (*set_no_memory)() = nullptr;
  Object *none = nullptr, *int_type = nullptr, *list_type = nullptr;
  Object** runtime_error = nullptr;
  bool complete = false;

  PythonCalls() {
    complete = find("PyCFunction_NewEx", new_function) && find("PyObject_Call", call) &&
               find("PyTuple_New", new_tuple) && find("PyTuple_SetItem", set_in_tuple) &&
               find("PyList_New", new_list) && find("PyList_SetItem", set_in_list) &&
               find("PyList_Size", list_size) && find("PyList_GetItem", in_list) &&
               find("PyLong_AsLongLongAndOverflow", to_number) &&
               find("PyLong_FromLongLong", from_number) && find("Py_IncRef", keep) &&
               find("Py_DecRef", drop) && find("PyEval_SaveThread", release_gil) &&
               find("PyEval_RestoreThread", take_gil) && find("PyGILState_Ensure", ensure_gil) &&
               find("PyGILState_Release", leave_gil) && find("PyErr_SetString", set_error) &&
               find("PyErr_NoMemory", set_no_memory) && find("_Py_NoneStruct", none) &&
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

const PythonCalls kPy;

// What moe_p2p/moe/direct.py has found out about this torch; the fields in its order.
struct Torch {
  Object *tensor, *parameter;  // the types
  int64_t head;           // bytes of an object before its at::Tensor; its type is the last word
  int64_t keys;           // offset of the dispatch keys in a TensorImpl
  uint64_t plain_keys;    // those of tensors that are nothing but memory of a CPU or a GPU
  uint64_t inference[2];  // a thread's keys under inference_mode; none without any mode
  Object* (*wrap)(AtenTensorHandle);
  bool (*observed)();  // by a profiler
  bool (*in_function_mode)();
  bool (*requires_grad)(const void* impl);
  void* libc10;
};
Torch torch_of_process;

Object* type_of(Object* object) {
  return *reinterpret_cast<Object**>(static_cast<char*>(object) + torch_of_process.head -
                                     sizeof(void*));
}

// Whether the dispatcher would do more than to call the op.
bool watched() {
  thread_local const auto* const keys = static_cast<const uint64_t*>(
      dlsym(torch_of_process.libc10, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  const auto& inference = torch_of_process.inference;
  if ((keys[0] | keys[1]) != 0 && (keys[0] != inference[0] || keys[1] != inference[1])) return true;
  return torch_of_process.observed() || torch_of_process.in_function_mode();
}

// --- arguments: false unless they are exactly what is expected; null: left out ---

bool read(Object* object, int64_t& number) {
  if (!object || type_of(object) != kPy.int_type) return false;
  int overflow = 0;
  number = kPy.to_number(object, &overflow);
  return overflow == 0;
}

bool read(Object* object, std::vector<int64_t>& numbers) {
  if (!object) return true;
  if (type_of(object) != kPy.list_type) return false;
  numbers.resize(static_cast<size_t>(kPy.list_size(object)));
  for (size_t i = 0; i < numbers.size(); ++i)
    if (!read(kPy.in_list(object, static_cast<ptrdiff_t>(i)), numbers[i])) return false;
  return true;
}

bool read(Object* object, std::optional<Tensor>& tensor) {
  if (!object || object == kPy.none) return true;
  const Torch& torch = torch_of_process;
  if (const Object* type = type_of(object); type != torch.tensor && type != torch.parameter)
    return false;
  auto* const held = reinterpret_cast<AtenTensorHandle>(static_cast<char*>(object) + torch.head);
  const char* const impl = *reinterpret_cast<const char* const*>(held);
  if ((*reinterpret_cast<const uint64_t*>(impl + torch.keys) & ~torch.plain_keys) != 0)
    return false;
  if (aoti_torch_grad_mode_is_enabled() && torch.requires_grad(impl)) return false;
  AtenTensorHandle made = nullptr;
  if (aoti_torch_new_tensor_handle(held, &made) != AOTI_TORCH_SUCCESS) return false;
  tensor.emplace(made);
  return true;
}

// --- results: new references; null: a Python error is set ---

Object* object_of(int64_t number) { return kPy.from_number(number); }

Object* object_of(const Tensor& tensor) { return torch_of_process.wrap(tensor.get()); }

Object* object_of(const std::vector<Tensor>& tensors) {
  Object* const list = kPy.new_list(static_cast<ptrdiff_t>(tensors.size()));
  for (size_t i = 0; list && i < tensors.size(); ++i)
    kPy.set_in_list(list, static_cast<ptrdiff_t>(i), object_of(tensors[i]));
  return list;
}

template <typename... Parts>
Object* object_of(const std::tuple<Parts...>& parts) {
  Object* const made = kPy.new_tuple(sizeof...(Parts));
  const auto set = [&](const auto&... part) {
    ptrdiff_t i = 0;
    (kPy.set_in_tuple(made, i++, object_of(part)), ...);
  };
  if (made) std::apply(set, parts);
  return made;
}

// --- calls ---

class WithoutGil {
 public:
  WithoutGil() : state_(kPy.release_gil()) {}
  ~WithoutGil() { kPy.take_gil(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* const state_;
};

Object* call_op(Object* op, Object* const* given, ptrdiff_t num) {
  Object* const args = kPy.new_tuple(num);
  if (!args) return nullptr;
  for (ptrdiff_t i = 0; i < num; ++i) {
    kPy.keep(given[i]);
    kPy.set_in_tuple(args, i, given[i]);
  }
  Object* const result = kPy.call(op, args, nullptr);
  kPy.drop(args);
  return result;
}

template <typename Argument>
struct Slot {  // where an argument is read to
  std::decay_t<Argument> value{};
  bool read_from(Object* object) { return read(object, value); }
  const std::decay_t<Argument>& get() const { return value; }
};
template <>
struct Slot<const Tensor&> {
  std::optional<Tensor> value;
  bool read_from(Object* object) { return read(object, value) && value; }
  const Tensor& get() const { return *value; }
};

template <typename Result, typename... Arguments>
Object* call_with(Result (*function)(Arguments...), Object* op, Object* const* given,
                  ptrdiff_t num) {
  std::tuple<Slot<Arguments>...> slots;  // outlives WithoutGil: tensors are dropped with the GIL
  const auto read_all = [&](auto&... slot) {
    ptrdiff_t i = 0;
    return (slot.read_from(i < num ? given[i++] : nullptr) && ...);
  };
  constexpr auto kMost = static_cast<ptrdiff_t>(sizeof...(Arguments));
  if (num > kMost || watched() || !std::apply(read_all, slots)) return call_op(op, given, num);
  try {
    const Result result = [&] {
      const WithoutGil released;
      return std::apply([&](const auto&... slot) { return function(slot.get()...); }, slots);
    }();
    return object_of(result);
  } catch (const std::bad_alloc&) {
    return kPy.set_no_memory();
  } catch (const std::exception& error) {
    kPy.set_error(*kPy.runtime_error, error.what());  // as torch does for ops
    return nullptr;
  }
}

template <auto Called>
Object* direct(Object* op, Object* const* given, ptrdiff_t num) {
  return call_with(Called, op, given, num);
}

// Returns the address of a new function, with its reference, that stands for the op of that name; 0
// in a process without Python's stable ABI. op: address of what is called as the op. torch: the
// fields of Torch.
int64_t direct_call(const std::string& name, int64_t op, std::vector<int64_t> torch) {
  static MethodDef all[] = {{"dispatch_eager", &direct<&dispatch_eager>, kFastCall, nullptr},
                            {"dispatch_counted", &direct<&dispatch_counted>, kFastCall, nullptr},
                            {"combine_plain", &direct<&combine_plain>, kFastCall, nullptr}};
  if (!kPy.complete) return 0;
  MOE_P2P_CHECK(torch.size() * sizeof(int64_t) == sizeof(Torch), base::Code::kInvalidArgument,
                torch.size(), " facts about torch, must be ", sizeof(Torch) / sizeof(int64_t));
  std::memcpy(&torch_of_process, torch.data(), sizeof(Torch));
  MethodDef* const def = std::find_if(std::begin(all), std::end(all),
                                      [&](const MethodDef& each) { return name == each.name; });
  MOE_P2P_CHECK(def != std::end(all), base::Code::kInvalidArgument, "no direct call is named ",
                name);
  const int gil = kPy.ensure_gil();
  Object* const made = kPy.new_function(def, reinterpret_cast<Object*>(op), nullptr);
  kPy.leave_gil(gil);
  return reinterpret_cast<int64_t>(made);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("direct_call", TORCH_BOX(&direct_call));
}

}  // namespace moe_p2p::ops
