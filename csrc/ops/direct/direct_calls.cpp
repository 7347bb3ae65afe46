// Dispatch and combine as functions of Python that skip torch's dispatcher, which takes longer than
// the calls themselves, and that take and return what Python's callers have.
// moe_p2p/moe/direct.py makes them and has verified every fact about this torch that is used here.
// Where anything is not as they expect (an argument of another type, a subclass of Tensor,
// autograd, a mode, a transform, a profiler, a kernel that is not compiled), they return None and
// have done nothing: then the caller calls the op, and that decides. MOE_P2P_DIRECT=0 makes none.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
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

bool read(Object* object, std::optional<int64_t>& number) {
  return object == kPy.none || read(object, number.emplace());
}

bool read(Object* object, std::vector<int64_t>& numbers) {
  if (!object || object == kPy.none) return true;
  if (type_of(object) != kPy.list_type) return false;
  numbers.resize(static_cast<size_t>(kPy.list_size(object)));
  for (size_t i = 0; i < numbers.size(); ++i)
    if (!read(kPy.in_list(object, static_cast<ptrdiff_t>(i)), numbers[i])) return false;
  return true;
}

// Borrowed: who calls the direct call owns it until that returns. An own reference would take the
// GIL, twice.
bool read(Object* object, std::optional<Tensor>& tensor) {
  if (!object || object == kPy.none) return true;
  const Torch& torch = torch_of_process;
  if (const Object* type = type_of(object); type != torch.tensor && type != torch.parameter)
    return false;
  auto* const handle = reinterpret_cast<AtenTensorHandle>(static_cast<char*>(object) + torch.head);
  const char* const impl = *reinterpret_cast<const char* const*>(handle);
  if ((*reinterpret_cast<const uint64_t*>(impl + torch.keys) & ~torch.plain_keys) != 0)
    return false;
  if (aoti_torch_grad_mode_is_enabled() && torch.requires_grad(impl)) return false;
  using Handle = std::shared_ptr<AtenTensorOpaque>;  // the one field of a Tensor
  static_assert(sizeof(Tensor) == sizeof(Handle));
  const Handle without_owner(std::shared_ptr<void>(), handle);
  tensor.emplace(reinterpret_cast<const Tensor&>(without_owner));
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

// As new references, null where they are null.
Object* kept(Object* object) {
  kPy.keep(object);
  return object;
}

Object* declined() { return kept(kPy.none); }

// make: of the result an object.
template <typename Result, typename... Arguments, typename Make>
Object* call_with(Result (*function)(Arguments...), Object* const* given, ptrdiff_t num,
                  const Make& make) {
  std::tuple<Slot<Arguments>...> slots;
  const auto read_all = [&](auto&... slot) {
    ptrdiff_t i = 0;
    return (slot.read_from(i < num ? given[i++] : nullptr) && ...);
  };
  constexpr auto kMost = static_cast<ptrdiff_t>(sizeof...(Arguments));
  if (num > kMost || watched() || !std::apply(read_all, slots)) return declined();
  try {
    return make([&] {
      const WithoutGil released;
      return std::apply([&](const auto&... slot) { return function(slot.get()...); }, slots);
    }());
  } catch (const std::bad_alloc&) {
    return kPy.set_no_memory();
  } catch (const base::Error& error) {
    // Calls throw it before anything is launched: a kernel is not compiled.
    if (error.code() == base::Code::kUnavailable) return declined();
    kPy.set_error(*kPy.runtime_error, error.what());  // as torch does for ops
  } catch (const std::exception& error) {
    kPy.set_error(*kPy.runtime_error, error.what());
  }
  return nullptr;
}

// --- dispatch and combine: self is the tuple of these objects of moe_p2p/moe/dispatched.py ---

enum Of : ptrdiff_t { kDispatchedType, kCallType, kNoRows };
// The fields of Dispatched and Call, in their order.
enum Field : ptrdiff_t { kRowWeights = 3, kTopkIdx = 10, kCall = 11 };
enum CallField : ptrdiff_t { kHandle, kOptions, kMaxTokens };

// Puts these objects, whose references it takes over, into a new tuple.
Object* filled(Object* tuple, std::initializer_list<Object*> objects) {
  ptrdiff_t i = 0;
  for (Object* const object : objects)
    if (tuple) kPy.set_in_tuple(tuple, i++, object);
  return tuple;
}

Object* named(Object* type, std::initializer_list<Object*> fields) {
  return filled(kPy.new_object(type, std::ssize(fields)), fields);
}

enum Parts : int64_t { kWhole, kApart, kRowsAlone };  // of moe_p2p/moe/dispatched.py

// given: comm, DispatchOptions.number, max_tokens, capacity (None: as AllToAll.dispatch takes it),
// x, topk_idx, topk_weights, scales, numbers of communicators to check first, Parts. Returns a
// Dispatched; apart: rows, their scales, and a Dispatched without them; alone: rows and scales.
Object* dispatch(Object* self, Object* const* given, ptrdiff_t num) {
  int64_t parts = 0;
  if (num != 10 || !read(given[9], parts)) return declined();
  return call_with(&dispatch_directly, given, 9, [&](const DirectDispatch& made) {
    const auto& [rows, scales, row_weights, counts, offsets, handle, more] = made.results;
    const moe::DispatchOptions& options = made.options;
    Object* const x = object_of(rows);
    Object* const row_scales = made.has_scales ? object_of(scales) : kept(kPy.none);
    if (parts == kRowsAlone) return filled(kPy.new_tuple(2), {x, row_scales});
    auto next = more.begin();
    const auto wanted = [&](bool is) { return is ? object_of(*next++) : kept(kPy.none); };
    Object* const source = wanted(options.with_source);
    Object* const ranges = wanted(options.with_ranges);
    Object* const wait_ticks = wanted(options.with_wait_ticks);
    Object* const topk_idx = options.copy_topk ? object_of(*next++) : kept(given[5]);
    Object* const row_topk = wanted(options.rows().per_token);
    Object* const call = named(
        kPy.in_tuple(self, kCallType),
        {object_of(handle), kept(given[1]), object_of(made.max_tokens), object_of(made.capacity)});
    Object* const dispatched =
        named(kPy.in_tuple(self, kDispatchedType),
              {parts == kApart ? kept(kPy.in_tuple(self, kNoRows)) : x,
               parts == kApart ? kept(kPy.none) : row_scales, kPy.new_tuple(0),
               object_of(row_weights), row_topk, object_of(counts), object_of(offsets), source,
               ranges, wait_ticks, topk_idx, call, kept(kPy.none)});
    if (parts != kApart) return dispatched;
    return filled(kPy.new_tuple(3), {x, row_scales, dispatched});
  });
}

// given: comm, y, a Dispatched, CombineOptions.number, .weighted, topk_weights, out. The sums.
Object* combine(Object* self, Object* const* given, ptrdiff_t num) {
  Object* const from = num == 7 ? given[2] : nullptr;
  if (!from || type_of(from) != kPy.in_tuple(self, kDispatchedType) ||
      kPy.tuple_size(from) <= kCall)
    return declined();
  Object* const call = kPy.in_tuple(from, kCall);
  int64_t options = 0;
  if (type_of(call) != kPy.in_tuple(self, kCallType) || kPy.tuple_size(call) <= kMaxTokens ||
      !read(kPy.in_tuple(call, kOptions), options))
    return declined();
  Object *const weighted = given[4], *const topk_weights = given[5];
  const bool late = topk_weights != kPy.none;
  Object* row_weights = kPy.none;
  if (abi::facts_of(static_cast<abi::RowLayout>(options & moe::kLayoutMask))
          .per_token) {  // sums over experts
    if (late || (weighted != kPy.none && weighted != kPy.no)) return declined();
  } else if (weighted != kPy.no && !late) {
    row_weights = kPy.in_tuple(from, kRowWeights);
  }
  Object* const inputs[] = {given[0],
                            kPy.in_tuple(call, kOptions),
                            given[3],
                            kPy.in_tuple(call, kMaxTokens),
                            kPy.in_tuple(call, kHandle),
                            given[1],
                            kPy.in_tuple(from, kTopkIdx),
                            row_weights,
                            topk_weights,
                            given[6]};
  return call_with(
      &combine_directly, inputs, std::ssize(inputs),
      [&](const std::optional<Tensor>& made) { return made ? object_of(*made) : kept(given[6]); });
}

Object* counted(Object*, Object* const* given, ptrdiff_t num) {
  return call_with(&dispatch_counted, given, num,
                   [](const Counted& made) { return object_of(made); });
}

// Returns the address of a new function of that name, with its reference; 0 in a process without
// Python's stable ABI. self: address of the function's. torch: the fields of Torch.
int64_t direct_call(const std::string& name, int64_t self, std::vector<int64_t> torch) {
  static MethodDef all[] = {{"dispatch", &dispatch, kFastCall, nullptr},
                            {"dispatch_counted", &counted, kFastCall, nullptr},
                            {"combine", &combine, kFastCall, nullptr}};
  if (!kPy.complete) return 0;
  MOE_P2P_CHECK(torch.size() * sizeof(int64_t) == sizeof(Torch), base::Code::kInvalidArgument,
                torch.size(), " facts about torch, must be ", sizeof(Torch) / sizeof(int64_t));
  std::memcpy(&torch_of_process, torch.data(), sizeof(Torch));
  MethodDef* const def = std::find_if(std::begin(all), std::end(all),
                                      [&](const MethodDef& each) { return name == each.name; });
  MOE_P2P_CHECK(def != std::end(all), base::Code::kInvalidArgument, "no direct call is named ",
                name);
  const int gil = kPy.ensure_gil();
  Object* const made = kPy.new_function(def, reinterpret_cast<Object*>(self), nullptr);
  kPy.leave_gil(gil);
  return reinterpret_cast<int64_t>(made);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(moe_p2p, CompositeExplicitAutograd, m) {
  m.impl("direct_call", TORCH_BOX(&direct_call));
}

}  // namespace moe_p2p::ops::direct
