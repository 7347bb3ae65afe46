// dispatch_inference, dispatch_counted, combine_inference and combine_out as functions of Python
// that skip torch's dispatcher, which takes longer than the calls themselves.
// moe_p2p/moe/direct.py makes them and has verified every fact about this torch that is used here.
// Where anything is not as they expect (an argument of another type, a subclass of Tensor,
// autograd, a mode, a transform, a profiler), they call the op, and that decides.
// MOE_P2P_DIRECT=0 makes none of them.
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
#include "ops/direct/python_calls.h"
#include "ops/direct/torch_facts.h"
#include "ops/whole_dispatch.h"

namespace moe_p2p::ops::direct {

namespace {

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

// Nothing, or an empty list.
bool read(Object* object, std::vector<Tensor>&) {
  return !object || (type_of(object) == kPy.list_type && kPy.list_size(object) == 0);
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
    const auto run = [&] {
      const WithoutGil released;
      return std::apply([&](const auto&... slot) { return function(slot.get()...); }, slots);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      kPy.keep(kPy.none);
      return kPy.none;
    } else {
      return object_of(run());
    }
  } catch (const std::bad_alloc&) {
    return kPy.set_no_memory();
  } catch (const std::exception& error) {
    kPy.set_error(*kPy.runtime_error, error.what());  // as torch does for ops
    return nullptr;
  }
}

template <auto Called>
Object* function_of(Object* op, Object* const* given, ptrdiff_t num) {
  return call_with(Called, op, given, num);
}

// Returns the address of a new function, with its reference, that stands for the op of that name; 0
// in a process without Python's stable ABI. op: address of what is called as the op. torch: the
// fields of Torch.
int64_t direct_call(const std::string& name, int64_t op, std::vector<int64_t> torch) {
  static MethodDef all[] = {
      {"dispatch_inference", &function_of<&dispatch_directly>, kFastCall, nullptr},
      {"dispatch_counted", &function_of<&dispatch_counted>, kFastCall, nullptr},
      {"combine_inference", &function_of<&combine_directly>, kFastCall, nullptr},
      {"combine_out", &function_of<&combine_out>, kFastCall, nullptr}};
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

}  // namespace moe_p2p::ops::direct
